"""Scales of latents (MLA) in the engines' own code: what docs/engines.md says of them holds.

check_mla.py vllm OUT   OUT as write_families.py leaves it: with `--model-impl transformers` vLLM
                        holds our scales, its own classes 1.0, and mended ones would hold them
check_mla.py sglang     its class holds scales, its cache is written without, a backend reads with
check_mla.py kernel     vLLM's TRITON_MLA, in Triton's interpreter, is right with such a cache
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

if sys.argv[1:] == ["kernel"]:  # Triton looks when it is imported
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

import no_pictures  # noqa: F401 (before an engine)
import torch
from engine_cases import (
    MLA_NAMINGS,
    NAMINGS,
    QUANTIZATIONS,
    build,
    fixtures,
    run_case,
    scale_tensors,
    wanted,
    write,
)

sys.path.insert(0, str(Path(__file__).parents[2]))

from calib.scalefiles.folder import open_scales
from calib.verify.rules import choose_rules
from calib.verify.simulate import simulate

ARCHITECTURE = "DeepseekV2ForCausalLM"
OWN_NAMES = ("{module}.{x}_proj.{x}_scale", MLA_NAMINGS[1])  # those that vLLM once knew


def check_vllm(out: Path) -> Iterator[tuple[str, bool]]:
    """What is right of vLLM, each with its name."""
    import vllm_classes

    engine = vllm_classes.VLLM()
    for home in sorted(out.iterdir()):
        refused = {file.stem for file in home.glob("*.refused")}
        yield f"{home.name}: written for no engine but by modelopt", refused == {"vllm", "sglang"}
        directory = home / "modelopt"
        found = simulate(open_scales(directory), choose_rules("vllm", None)[0])
        predicted = {(o.module, o.letter): o.values for o in found.outcomes if o.letter != "q"}
        held = scales_of(directory, vllm_classes.MLAAttention, model_impl="transformers")
        yield f"{home.name}: verify names the flag", "--model-impl transformers" in found.flag
        yield f"{home.name}: transformers' code holds our scales", held == predicted
        held = scales_of(directory, vllm_classes.MLAAttention)
        yield f"{home.name}: vLLM's own class holds 1.0", {*held.values()} == {(1.0,)}
    (fixture,) = fixtures([ARCHITECTURE])
    for kind in ("modelopt", "compressed-tensors"):
        model = build(engine, fixture, QUANTIZATIONS[kind])
        fates = {run_case(engine, model, fixture, n, False) for n in (*NAMINGS, *MLA_NAMINGS)}
        yield f"{kind}: no name arrives", not any(fate.startswith("loaded") for fate in fates)
        with mended():
            model = build(engine, fixture, QUANTIZATIONS[kind])
            fates = {run_case(engine, model, fixture, name, False) for name in OWN_NAMES}
        yield f"{kind}: names arrive in a mended vLLM", fates == {"loaded"}


def scales_of(directory: Path, kind: type, **options: str) -> dict[tuple[str, str], tuple]:
    """The scales in force in what vLLM's loader makes of the checkpoint, weights and all."""
    from engine import load

    model = load(directory, kv_cache_dtype="fp8", **options)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, kind)}
    return {
        (name.partition(".self_attn")[0] + ".self_attn", x): tuple(
            getattr(layer, f"_{x}_scale").flatten().tolist()
        )
        for name, layer in layers.items()
        for x in "kv"
    }


@contextmanager
def mended() -> Iterator[None]:
    """vLLM without its first renaming, and with a place for scales of compressed-tensors."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
    from vllm.model_executor.models.utils import WeightsMapper

    with (
        patch.object(QuantizationConfig, "get_cache_scale_mapper", staticmethod(WeightsMapper)),
        patch.object(compressed_tensors, "Attention", (Attention, MLAAttention)),
    ):
        yield


def check_sglang() -> Iterator[tuple[str, bool]]:
    """What is right of SGLang, each with its name."""
    import sglang_classes
    from sglang.srt.layers.attention.trtllm_mla_backend import TRTLLMMLABackend
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    (fixture,) = fixtures([ARCHITECTURE])
    with TemporaryDirectory() as scratch:
        directory = write(fixture, QUANTIZATIONS["compressed-tensors"], Path(scratch))
        model = sglang_classes.load(directory, scale_tensors(fixture, MLA_NAMINGS[0]))
    layers = sglang_classes.sglang_attention(model)
    held = [sglang_classes.in_force(layer) for layer in layers.values()]
    yield "attn_mqa holds exactly the scales", held == wanted(fixture, MLA_NAMINGS[0])
    layer, rank, rope = next(iter(layers.values())), 512, 64
    pool = MLATokenToKVPool(
        size=8, page_size=1, dtype=torch.float8_e4m3fn, kv_lora_rank=rank, qk_rope_head_dim=rope,
        layer_num=2, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    row, at = torch.full((1, 1, rank + rope), 3.0, dtype=torch.bfloat16), torch.tensor([1])
    writers: dict[str, Callable[[], None]] = {
        "set_kv_buffer": lambda: pool.set_kv_buffer(layer, at, row, row),
        "set_mla_kv_buffer": lambda: pool.set_mla_kv_buffer(
            layer, at, row[..., :rank], row[..., rank:]
        ),
    }
    for name, store in writers.items():
        pool.kv_buffer[0].zero_()
        store()
        stored = pool.get_key_buffer(0)[at].float()
        yield f"{name} stores without the scale", {*stored.flatten().tolist()} == {3.0}
    backend = SimpleNamespace(data_type=torch.float8_e4m3fn)
    factor = TRTLLMMLABackend._compute_decode_bmm1_scale(backend, layer) / layer.scaling
    yield "trtllm_mla reads with it", factor == layer.k_scale_float != 1.0


def check_kernel() -> Iterator[tuple[str, bool]]:
    """Whether vLLM's kernel computes with the latents that lie in an FP8 cache by a scale."""
    from triton.backends import backends

    # vLLM's build for CPUs asks for a backend that the interpreter does not need
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    torch.manual_seed(0)
    (rank, rope), heads, tokens, page, scale = (512, 64), 4, 40, 16, torch.tensor(0.046875)
    stored = (torch.randn(tokens, rank + rope) * 6 / scale).clamp(-448, 448)
    cache = torch.zeros(48, rank + rope, dtype=torch.float8_e4m3fn)
    cache[:tokens] = stored.to(cache.dtype)
    held, query = cache[:tokens].float() * scale, torch.randn(1, heads, rank + rope) / 20
    output, pages = torch.zeros(1, heads, rank), cache.view(3, page, 1, rank + rope)
    decode_attention_fwd(
        *(query, pages, pages[..., :rank], output, torch.zeros(1, heads)),
        *(torch.arange(3, dtype=torch.int32)[None], torch.tensor([tokens], dtype=torch.int32)),
        *(torch.zeros(1, heads, 2, rank + 1), 2, 0.1, page),
        k_scale=scale,
        v_scale=scale,
        is_mla=True,
    )
    expected = torch.softmax(query[0] @ held.T * 0.1, -1) @ held[:, :rank]
    # float32 in another order
    yield "TRITON_MLA multiplies by the scale", torch.allclose(output[0], expected, 1e-4, 1e-4)


def main() -> None:
    """Check what the command line names."""
    kinds = {"sglang": check_sglang, "kernel": check_kernel}
    checks = check_vllm(Path(sys.argv[2])) if sys.argv[1] == "vllm" else kinds[sys.argv[1]]()
    wrong = 0
    for name, is_right in checks:
        wrong += not is_right
        print(f"{'OK' if is_right else 'WRONG'} {name}", flush=True)
    sys.exit(f"FAILED: {wrong}" if wrong else 0)


if __name__ == "__main__":
    with torch.no_grad():
        main()
