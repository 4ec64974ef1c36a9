"""The Triton kernels and the torch path give the same logits and the same text."""

import pytest
import torch
from fake_quant import measured_scales, scales_for
from families import FAMILIES, HYBRIDS, SHARED_KV, UNEVEN, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8kv_runtime.hf import fp8_attention, paged_cache

ALL = {**FAMILIES, **HYBRIDS, **UNEVEN, "gemma3n_text": SHARED_KV}
ALL.pop("falcon")  # calls attention itself
# softcap and window; a scaling of its own; shared K and V; beside linear attention; K wider than V, and
# sinks; heads of two sizes
DIFFERENT = ("gemma2", "granite", "gemma3n_text", "qwen3_next", "mimo_v2_flash", "gemma4_text")
IDS = torch.tensor([[0, 0, 0, 5, 81, 7, 44, 9], [3, 99, 12, 6, 70, 8, 31, 20]])
MASK = (IDS != 0).long()
# fp32 queries are computed with in two float16 parts, 22 bits
SAME = 1e-5  # of the largest logit


def run(model, scales, backend, **options):
    """Logits of a padded prompt and of one more token, real tokens only."""
    ids, mask = IDS.to(model.device), MASK.to(model.device)
    with torch.inference_mode(), fp8_attention(model, scales, backend=backend, **options):
        prompt = model(ids, attention_mask=mask)
        longer = torch.cat([mask, mask[:, -1:]], 1)
        cache = prompt.past_key_values
        step = model(ids[:, 4:5], attention_mask=longer, past_key_values=cache)
    return torch.cat([prompt.logits[mask.bool()], step.logits[:, 0]]), cache


@pytest.mark.parametrize(
    "family", [name if name in DIFFERENT else pytest.param(name, marks=pytest.mark.nightly) for name in ALL]
)
def test_logits_agree(family, device):
    model = tiny_model(family, **ALL[family]).to(device)
    scales = scales_for(model)
    expected, theirs = run(model, scales, "torch", block_size=4)
    found, ours = run(model, scales, "triton", block_size=4)
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=SAME * max(1, largest))
    assert paged_cache(ours).num_bytes_used == paged_cache(theirs).num_bytes_used


def test_fp8_queries_and_additive_masks_of_eager_attention_agree(device):
    model = tiny_model("gpt_oss", **ALL["gpt_oss"]).to(device)
    model.set_attn_implementation("eager")
    scales = scales_for(model, with_q=True)
    expected, _ = run(model, scales, "torch", quantize_query=True)
    found, _ = run(model, scales, "triton", quantize_query=True)
    without, _ = run(model, scales, "torch")
    torch.testing.assert_close(found, expected, rtol=0, atol=SAME)
    assert not torch.allclose(without, expected, rtol=0, atol=SAME)


@pytest.mark.nightly
def test_a_real_model_writes_the_same_text(smollm2_directory, device):
    model = AutoModelForCausalLM.from_pretrained(smollm2_directory, dtype=torch.float32)
    model = model.to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2_directory)
    inputs = tokenizer("The capital of France is", return_tensors="pt").to(device)
    scales = measured_scales(model, inputs["input_ids"])
    texts = {}
    for backend in ("torch", "triton"):
        with fp8_attention(model, scales, backend=backend):
            texts[backend] = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert torch.equal(texts["triton"], texts["torch"])
    assert tokenizer.decode(texts["triton"][0]).startswith("The capital of France is Paris.")
