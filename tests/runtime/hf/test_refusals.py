"""What `fp8_attention` refuses, in words that say what to do, and that it leaves no trace."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from fake_quant import scales_for
from families import FAMILIES, LATENT, tiny_model
from transformers import DynamicCache, StaticCache

from calib.scales.scales import KVScales, LayerScales
from fp8kv_runtime.errors import AttentionError
from fp8kv_runtime.hf import attention, fp8_attention, paged_cache, swap_attention
from fp8kv_runtime.hf.attention import check_mask
from fp8kv_runtime.hf.layers import left_padding

ALL = {**FAMILIES, **LATENT}
IDS = torch.arange(3, 11)[None]
BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def scales(model):
    return scales_for(model)


def fingerprint(model):
    """Hooks, `forward` and attention implementation of every module."""
    return [
        (
            name,
            dict(module._forward_pre_hooks),
            dict(module._forward_hooks),
            vars(module).get("forward"),
            getattr(getattr(module, "config", None), "_attn_implementation", None),
        )
        for name, module in model.named_modules()
    ]


NO_SCALES = KVScales("tensor", "e4m3fn", {})
REFUSED = {
    "no layer has scales, so there is nothing to hold in FP8": ("llama", {"scales": NO_SCALES}),
    "FP8 queries need query scales and one K scale per tensor or head: calibrate with --targets qkv "
    "--strategy tensor or attn_head": ("llama", {"quantize_query": True}),
    "this model calls attention itself: its queries cannot be reached": ("falcon", {"quantize_query": True}),
    "FalconForCausalLM calls attention itself and cannot be given kernels; use the torch backend": (
        "falcon",
        {"backend": "triton"},
    ),
    "DeepseekV3ForCausalLM caches a latent (MLA), which no Triton kernel reads; use the torch backend": (
        "deepseek_v3",
        {"backend": "triton"},
    ),
    "scales must be as calib.load_scales returns them, got 'scales'": ("llama", {"scales": "scales"}),
    "backend must be one of auto, triton, torch, got 'cuda'": ("llama", {"backend": "cuda"}),
    "block_size must be a whole number from 1 on, got 0": ("llama", {"block_size": 0}),
}


def assert_refused(message, model, **arguments):
    with pytest.raises(AttentionError, match=f"^{re.escape(message)}$"), fp8_attention(model, **arguments):
        model(IDS)


def test_what_does_not_fit_is_refused_before_anything_runs(model, scales, monkeypatch):
    for message, (family, changes) in REFUSED.items():
        other = tiny_model(family, **ALL[family])
        other.forward = None  # which would be called in the block
        assert_refused(message, other, **{"scales": scales_for(other)} | changes)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    no_gpu = "the Triton kernels need a GPU, or TRITON_INTERPRET=1; use torch"
    assert_refused(no_gpu, model, scales=scales, backend="triton")


def test_caches_that_are_not_its_own_are_refused_and_an_empty_one_is_welcome(model, scales):
    cache = model(IDS, use_cache=True).past_key_values
    static = StaticCache(config=model.config, max_cache_len=16)
    with torch.inference_mode(), fp8_attention(model, scales):
        with pytest.raises(
            AttentionError, match="^the cache holds 16-bit K and V already; start with an emp"
        ):
            model(IDS, past_key_values=cache)
        with pytest.raises(AttentionError, match="is StaticLayer; give generate a DynamicCache"):
            model(IDS, past_key_values=static)
        with pytest.raises(AttentionError, match="^give the model input_ids or inputs_embeds$"):
            model()
        own = DynamicCache()
        expected = model(IDS).logits
        assert torch.equal(model(IDS, past_key_values=own).logits, expected)
    with pytest.raises(AttentionError, match="would hold 1 rows of 9 tokens, not 1 of 8"):
        model(IDS[:, :1], past_key_values=own)


@BACKENDS
def test_a_pass_that_failed_before_its_first_layer_leaves_no_trace(backend, model, scales):
    caches = [DynamicCache(config=model.config) for _ in "ab"]
    with torch.inference_mode(), fp8_attention(model, scales, backend=backend, block_size=4):
        for cache in caches:
            model(IDS[:, :4], past_key_values=cache)
        with pytest.raises(IndexError):
            model(IDS[:, 4:] + 10**6, past_key_values=caches[0])
        found, expected = (model(IDS[:, 4:], past_key_values=c).logits for c in caches)
    assert torch.equal(found, expected)


def test_a_pass_that_failed_half_way(model, scales, monkeypatch):
    cache = DynamicCache(config=model.config)
    with torch.inference_mode(), fp8_attention(model, scales):
        model(IDS, past_key_values=cache)
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(model.model.layers[1], "forward", lambda *_, **__: 1 // 0)
            model(IDS, past_key_values=cache)
        with pytest.raises(AttentionError, match="hold 8 to 16 tokens: an earlier forward pass"):
            model(IDS, past_key_values=cache)


def test_blocks_do_not_nest(model, scales):
    with fp8_attention(model, scales):
        with pytest.raises(AttentionError, match="inside an fp8_attention block: leave that one first"):
            fp8_attention(model, scales).__enter__()
        assert model(IDS).logits.isfinite().all()
    with fp8_attention(model, scales):  # one after the other
        model(IDS)


@pytest.mark.parametrize("block", ["fp8", "measured"])
@pytest.mark.parametrize("family", ["llama", "falcon", "deepseek_v3"])
def test_a_block_leaves_no_trace_also_after_an_error_and_in_it_a_model_is_not_copied(block, family):
    model = tiny_model(family, **ALL[family])
    scales, before = scales_for(model), fingerprint(model)
    enter = {
        "fp8": lambda: fp8_attention(model, scales),
        "measured": lambda: swap_attention(model, lambda original, *a, **kw: original(*a, **kw)),
    }
    with torch.inference_mode():
        plain = model(IDS).logits
        with pytest.raises(KeyError), enter[block]():
            for part in (model, model.get_decoder()):
                with pytest.raises(AttentionError, match="copy the model before that block, or after"):
                    copy.deepcopy(part)
            expected = model(IDS).logits
            # the other changes a name that compares as before
            assert fingerprint(model) != before or block == "measured"
            raise KeyError
        assert fingerprint(model) == before
        assert not any("fp8kv" in key for module in model.modules() for key in vars(module))
        after = model(IDS)
        assert torch.equal(after.logits, plain)
        assert torch.equal(copy.deepcopy(model)(IDS).logits, plain)
        with enter[block]():
            assert torch.equal(model(IDS).logits, expected)
    with pytest.raises(ValueError, match="^this cache holds no FP8 blocks: it was not filled inside fp8_att"):
        paged_cache(after.past_key_values)


@BACKENDS
def test_inputs_may_be_given_by_position(backend, model, scales):
    decoder, mask = model.model, torch.ones_like(IDS)
    found = []
    for by_position in (True, False):
        cache, states = DynamicCache(config=model.config), []
        with torch.inference_mode(), fp8_attention(model, scales, backend=backend):
            for ids, length in ((IDS[:, :5], 5), (IDS[:, 5:], 8)):
                if by_position:
                    out = decoder(ids, mask[:, :length], None, cache)
                else:
                    out = decoder(ids, attention_mask=mask[:, :length], past_key_values=cache)
                states.append(out.last_hidden_state)
        assert paged_cache(cache).bytes_per_token
        found.append(torch.cat(states, 1))
    assert torch.equal(*found)
    with fp8_attention(model, scales, backend=backend), pytest.raises(TypeError, match="multiple"):
        decoder(IDS, input_ids=IDS)


def test_scales_of_other_heads_and_padding_that_kernels_do_not_know(model, scales, device):
    three = torch.ones(3)
    layers = {name: LayerScales(s.layer_idx, three, three) for name, s in scales.layers.items()}
    other = KVScales("attn_head", "e4m3fn", layers)
    assert_refused(
        "scales for 3 KV heads do not fit a layer with 2: they are of another model", model, scales=other
    )
    model, mask = model.to(device), torch.ones_like(IDS)
    mask[0, -2:] = 0
    with (
        pytest.raises(AttentionError, match="Pad on the left, or use the torch backend"),
        fp8_attention(model, scales, backend="triton"),
    ):
        model(IDS.to(device), attention_mask=mask.to(device))
    model.cpu()


def causal(window=None, starts=(0, 2)):
    rows, columns = torch.arange(3, 6)[:, None], torch.arange(6)[None]
    visible = (columns <= rows) & (columns >= torch.tensor(starts)[:, None, None])
    return visible[:, None] if window is None else (visible & (columns > rows - window))[:, None]


def test_masks_that_kernels_apply():
    for window in (None, 2):
        for mask in (causal(window), torch.zeros(2, 1, 3, 6).masked_fill(~causal(window), -torch.inf)):
            check_mask(mask, 3, torch.tensor([0, 2]), window)
    assert left_padding(torch.ones(2, 5)) is None
    assert left_padding(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]])).tolist() == [2, 0, 4]


@pytest.mark.parametrize(
    ("mask", "starts", "window"),
    [
        (causal(), [0, 1], None),
        (causal(), [0, 2], 2),
        (causal(2), [0, 2], None),
        (causal(2), [0, 2], 3),
        (torch.ones(2, 1, 3, 6, dtype=torch.bool), [0, 2], None),
        (torch.tensor([[1, 1, 1], [0, 1, 1]]), None, None),
        (torch.tensor([[1, 1, 0], [0, 1, 1]]), [0, 1], None),
    ],
)
def test_masks_that_kernels_do_not_apply(mask, starts, window):
    with pytest.raises(
        AttentionError, match="^the Triton kernels apply causal masks with a sliding window and"
    ):
        check_mask(mask, 3, None if starts is None else torch.tensor(starts), window)


def test_a_mask_that_several_layers_share_is_checked_for_each_window(monkeypatch):
    checked = []
    monkeypatch.setattr(attention, "check_mask", lambda *arguments: checked.append(arguments[-1]))
    rows = SimpleNamespace(checked_masks=[])
    one, other = causal(), causal()
    for mask, window in ((one, None), (one, None), (one, 2), (one, 2), (one, 3), (other, 3)):
        attention._check_mask_once(rows, mask, 3, None, window)
    assert checked == [None, 2, 3, 3]
