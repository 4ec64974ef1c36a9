"""Scales of latents (MLA) in the engines' own code: what docs/engines.md says of them holds.

check_mla.py vllm OUT   OUT as `write_models.py families` leaves it: with `--model-impl transformers` vLLM
                        holds our scales, its own classes 1.0
check_mla.py baked OUT  OUT as `write_models.py latents` leaves it: vLLM's own class computes with the baked
                        model as with the source, at scale 1.0 too, where the twin is garbage
check_mla.py sglang OUT the same OUT: its class holds scales of a calibration, its cache is written
                        without, a backend reads with
check_mla.py kernel     vLLM's TRITON_MLA, in Triton's interpreter, is right with such a cache
"""

import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

if sys.argv[1:] == ["kernel"]:  # Triton looks when it is imported
    import interpreted_triton  # noqa: F401

import engine
import no_pictures  # noqa: F401 (before an engine)
import torch
from engine_cases import MLA_NAMINGS, QUANTIZATIONS, fixtures, write

from calib.engines.simulate_loading import simulate
from calib.files.model_directory import open_model_directory
from calib.scales.stats_file import load_scales

(FIXTURE,) = fixtures(["DeepseekV2ForCausalLM"])


def check_vllm(out: Path):
    import vllm_classes

    for home in sorted(out.iterdir()):
        refused = {file.stem for file in home.glob("*.refused")}
        yield f"{home.name}: written for no engine but by modelopt", refused == {"vllm", "sglang"}
        directory = home / "modelopt"
        found = simulate(open_model_directory(directory, weights=False), engine.installed_engine())
        predicted = {(o.module, o.letter): o.values for o in found.outcomes if o.letter != "q"}
        held = scales_of(directory, vllm_classes.MLAAttention, model_impl="transformers")
        yield f"{home.name}: verify names the flag", "--model-impl transformers" in found.flag
        yield f"{home.name}: transformers' code holds our scales", held == predicted
        held = scales_of(directory, vllm_classes.MLAAttention)
        yield f"{home.name}: vLLM's own class holds 1.0", {*held.values()} == {(1.0,)}


def scales_of(directory: Path, kind: type, **options: str) -> dict[tuple[str, str], tuple]:
    """The scales in force in what vLLM's loader makes of the checkpoint, weights and all."""
    model = engine.load(directory, kv_cache_dtype="fp8", **options)
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, kind)]
    held = [(name, x, getattr(attn, f"_{x}_scale").flatten().tolist()) for name, attn in layers for x in "kv"]
    return {(name.partition(".self_attn")[0] + ".self_attn", x): tuple(scale) for name, x, scale in held}


def check_baked(out: Path):
    source, twin, baked = (served(out / name) for name in ("source", "twin", "baked"))
    yield "baked: in 16 bits the source's logprobs, exactly", torch.equal(baked[0], source[0])
    garbage, lost = (float((each[1] - source[0]).abs().mean()) for each in (twin, baked))
    # E4M3 rounds by 2^-4 at most; of the twin nothing is left
    far = f"{lost:.4f} nats from the source at 1.0, the twin {garbage:.4f}"
    yield f"baked: {far}", lost < garbage / 8


def served(directory: Path) -> list[torch.Tensor]:
    """Logprobs of a fixed prompt: with latents in 16 bits, and as an FP8 cache at 1.0 has them."""
    # 8 pages are too few for more
    with patch.dict(engine.OPTIONS, max_model_len=64):
        llm = engine.start(directory, skip_tokenizer_init=True, enable_prefix_caching=False)
    prompt, found = {"prompt_token_ids": list(range(3, 60))}, []
    for rounds in (nullcontext, rounded):
        with rounds():
            made = engine.generate(llm, prompt, max_tokens=1, prompt_logprobs=0, detokenize=False)
        found.append([next(iter(each.values())).logprob for each in made.prompt_logprobs[1:]])
    return [torch.tensor(each) for each in found]


@contextmanager
def rounded():
    """vLLM's layer with latents as its FP8 writer leaves them, which has no kernel for CPUs."""
    from vllm.model_executor.layers.attention import MLAAttention

    own = MLAAttention.forward

    def forward(self, q, kv_c_normed, k_pe, *args, **kwargs):
        assert self._k_scale.item() == 1.0
        latent, rope = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (kv_c_normed, k_pe))
        return own(self, q, latent, rope, *args, **kwargs)

    with patch.object(MLAAttention, "forward", forward):
        yield


def check_sglang(out: Path):
    import sglang_classes
    from sglang.srt.layers.attention.trtllm_mla_backend import TRTLLMMLABackend
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    # no format of ours writes them for SGLang, so the names are given here
    scales, name = load_scales(out / "scales").layers, MLA_NAMINGS[0]
    pairs = [(module, x, getattr(layer, x)) for module, layer in scales.items() for x in "kv"]
    with TemporaryDirectory() as scratch:
        directory = write(FIXTURE, QUANTIZATIONS["compressed-tensors"], Path(scratch))
        tensors = [(name.format(module=module, x=x), scale.view(1)) for module, x, scale in pairs]
        layers = [*sglang_classes.sglang_attention(sglang_classes.load(directory, tensors)).values()]
    given = [((layer.k.item(),), (layer.v.item(),)) for layer in scales.values()]
    held = [sglang_classes.in_force(layer) for layer in layers]
    yield "attn_mqa holds exactly the scales of a calibration", held == given
    layer, rank, rope = layers[0], 512, 64
    sizes = {"size": 8, "page_size": 1, "layer_num": 2, "kv_lora_rank": rank, "qk_rope_head_dim": rope}
    how = {"dtype": torch.float8_e4m3fn, "device": "cpu", "enable_memory_saver": False}
    pool = MLATokenToKVPool(**sizes, **how)
    row, at = torch.full((1, 1, rank + rope), 3.0, dtype=torch.bfloat16), torch.tensor([1])
    halves = row[..., :rank], row[..., rank:]
    for writer, parts in ((pool.set_kv_buffer, (row, row)), (pool.set_mla_kv_buffer, halves)):
        pool.kv_buffer[0].zero_()
        writer(layer, at, *parts)
        stored = pool.get_key_buffer(0)[at].float()
        yield f"{writer.__name__} stores without the scale", {*stored.flatten().tolist()} == {3.0}
    backend = SimpleNamespace(data_type=torch.float8_e4m3fn)
    factor = TRTLLMMLABackend._compute_decode_bmm1_scale(backend, layer) / layer.scaling
    yield "trtllm_mla reads with it", factor == layer.k_scale_float != 1.0


def check_kernel():
    """Whether vLLM's kernel computes with the latents that lie in an FP8 cache by a scale."""
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    torch.manual_seed(0)
    (rank, rope), heads, tokens, page, scale = (512, 64), 4, 40, 16, torch.tensor(0.046875)
    stored = (torch.randn(tokens, rank + rope) * 6 / scale).clamp(-448, 448)
    cache = torch.zeros(48, rank + rope, dtype=torch.float8_e4m3fn)
    cache[:tokens] = stored.to(cache.dtype)
    held, query = cache[:tokens].float() * scale, torch.randn(1, heads, rank + rope) / 20
    output, pages = torch.zeros(1, heads, rank), cache.view(3, page, 1, rank + rope)
    how = {"k_scale": scale, "v_scale": scale, "is_mla": True}
    decode_attention_fwd(
        *(query, pages, pages[..., :rank], output, torch.zeros(1, heads)),
        *(torch.arange(3, dtype=torch.int32)[None], torch.tensor([tokens], dtype=torch.int32)),
        *(torch.zeros(1, heads, 2, rank + 1), 2, 0.1, page),
        **how,
    )
    expected = torch.softmax(query[0] @ held.T * 0.1, -1) @ held[:, :rank]
    # float32 in another order
    yield "TRITON_MLA multiplies by the scale", torch.allclose(output[0], expected, 1e-4, 1e-4)


if __name__ == "__main__":
    checks = {"vllm": check_vllm, "baked": check_baked, "sglang": check_sglang, "kernel": check_kernel}
    with torch.no_grad():
        engine.tell(checks[sys.argv[1]](*map(Path, sys.argv[2:])))
