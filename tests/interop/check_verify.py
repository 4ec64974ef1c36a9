"""Load every hand-made directory with an engine; compare what it holds with what we predict.

check_verify.py vllm       exit 0 if `fp8kv verify` is right about every one
check_verify.py vllm DIR   the same of the checkpoints in DIR, every one of which must load
check_verify.py sglang     by SGLang's own loader code

SGLang's server needs a GPU. What decides about KV scales does not: quantization config, attention
layer with its KV method, mapping of names, weight loader. They run here on attention layers alone, in
the order of SGLang's Llama. What other model classes do is in their table, see sglang_classes.py.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from engine import ONE_GPU, Place, installed_engine, load, tell
from safetensors import safe_open
from scale_cases import CASES, HEAD_DIM, HEADS, KV_HEADS, LAYERS, PLACES, write_case

from calib.engines.catalogue import Engine, find_engine
from calib.engines.simulate_loading import Simulation, simulate
from calib.files.cache_type import is_for_nvfp4
from calib.files.model_directory import open_model_directory

# "attention module, letter" -> scales, of one rank or of all; or why the engine refused
Scales = dict[str, list[float]] | str
RANK = "--rank"
# what other tools wrote
GOLDEN = {
    f"{path.parent.parent.name}, {path.parent.name}": path.parent
    for path in sorted(Path(__file__).parents[1].glob("golden/*-*/*/config.json"))
}
# vLLM has no kernel for FP8 weights on every CPU, and none for NVFP4 weights
_WEIGHTS = ("fp8-kv", "fp8-nvfp4-kv", "nvfp4")
# SGLang starts with no fp8_pb_wo, and its rules do not know it; of a config without a word on the
# cache the loader of files reads on, which is not run here
_UNKNOWN = ("modelopt, tiles", "mixed precision, no cache")


def refusal(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def difference(predicted: Simulation, scales: Scales) -> str | None:
    """What the prediction has wrong; None if nothing."""
    if isinstance(scales, str) or predicted.refused:
        same = isinstance(scales, str) == bool(predicted.refused)
        return None if same else f"predicted {predicted.refused or 'loading'}, the engine: {scales}"
    for outcome in predicted.outcomes:
        if outcome.status == "unknown":
            return "predicted not known"
        values = scales[f"{outcome.module} {outcome.letter}"]
        wanted = list(outcome.values) * (len(values) // len(outcome.values))
        if not all(a == b or (a != a and b != b) for a, b in zip(wanted, values, strict=True)):  # NaN is NaN
            return f"{outcome.module} {outcome.letter}: predicted {wanted}, the engine holds {values}"
    return None


def check(name, path, scales: Scales, rules: Engine, place=ONE_GPU, *, must_load=False) -> tuple[str, bool]:
    predicted = simulate(open_model_directory(path, weights=False), rules, place)
    wrong = difference(predicted, scales)
    if must_load and not predicted.is_good:
        wrong = wrong or "it does not load every scale"
    return f"{place}: {name}: {wrong or (scales if isinstance(scales, str) else 'loaded')}", wrong is None


def held_by_vllm(directory: Path, place: Place, rank: int) -> Scales:
    """The scales of each attention module as vLLM leaves them on a rank."""
    from vllm.model_executor.layers.attention import Attention

    try:
        cache = "nvfp4" if is_for_nvfp4(open_model_directory(directory, weights=False)) else "fp8"
        model = load(directory, place, rank, kv_cache_dtype=cache)
    except Exception as error:  # noqa: BLE001 (whatever vLLM raises)
        return refusal(error)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    return {
        f"{layer.layer_name.removesuffix('.attn')} {x}": getattr(layer, f"_{x}_scale").flatten().tolist()
        for layer, x in product(layers, "kvq")
    }


def held_by_all(directories: list[Path], place: Place) -> list[Scales]:
    """The same of several directories, every rank in a process."""
    with tempfile.TemporaryDirectory() as meeting:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        environment["RENDEZVOUS"] = f"{meeting}/rendezvous" if place.ranks > 1 else ""
        how, started = {"stdout": subprocess.PIPE, "text": True, "env": environment}, []
        for rank in range(place.ranks):
            numbers = map(str, (rank, place.ranks, int(place.fnuz)))
            started.append(subprocess.Popen([sys.executable, __file__, RANK, *numbers, *directories], **how))
        found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    return [_together(ranks) for ranks in zip(*found, strict=True)]


def _together(ranks: tuple[Scales, ...]) -> Scales:
    if refused := [scales for scales in ranks if isinstance(scales, str)]:
        return refused[0]
    return {name: [value for scales in ranks for value in scales[name]] for name in ranks[0]}


def check_vllm(directories: dict[str, Path], place: Place = ONE_GPU, **options) -> list[tuple[str, bool]]:
    rules = installed_engine()
    loaded = zip(directories.items(), held_by_all([*directories.values()], place), strict=True)
    return [check(name, path, scales, rules, place, **options) for (name, path), scales in loaded]


def held_by_sglang(directory: Path) -> Scales:
    """The scales of each attention layer as SGLang's code leaves them, ready to serve."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_loader.weight_utils import default_weight_loader, maybe_remap_kv_scale_name

    try:
        quantization, layers = quantization_of(directory), {}
        for i in range(LAYERS):
            name = f"model.layers.{i}.self_attn.attn"
            how = {"quant_config": quantization, "prefix": name}
            layers[name] = RadixAttention(HEADS, HEAD_DIM, 1.0, KV_HEADS, i, **how)
        params = {f"{at}.{name}": x for at, layer in layers.items() for name, x in layer.named_parameters()}
        for name, tensor in scales_of(directory):
            target = maybe_remap_kv_scale_name(name, params)
            if target in params:
                default_weight_loader(params[target], tensor)
        for layer in layers.values():
            if layer.quant_method is not None:
                layer.quant_method.process_weights_after_loading(layer)
    except Exception as error:  # noqa: BLE001 (whatever SGLang raises)
        return refusal(error)
    in_force = {}
    for (name, layer), letter in product(layers.items(), "kvq"):
        scale = getattr(layer, f"{letter}_scale", None)  # 1.0 where it holds nothing
        in_force[f"{name.removesuffix('.attn')} {letter}"] = [1.0 if scale is None else float(scale)]
    return in_force


def quantization_of(directory: Path):
    """The config object that SGLang makes of config.json."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.quantization import get_quantization_config

    config = json.loads((directory / "config.json").read_text())
    said = config.get("quantization_config") or config.get("compression_config")
    if said is None:
        return None
    if said["quant_method"] == "modelopt":
        # as its ModelConfig does; what that makes of FP8 is what its table of methods says, too
        parsed = ModelConfig._parse_modelopt_quant_config(None, {"quantization": said})
        if parsed and parsed["quant_algo"] == "MIXED_PRECISION":
            said |= parsed
    said["packed_modules_mapping"] = {}  # as its loader of models does
    return get_quantization_config(said["quant_method"]).from_config(said)


def scales_of(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of scales, in the files that the index names, or all without one."""
    index = directory / "model.safetensors.index.json"
    files = sorted(directory.glob("*.safetensors"))
    if index.exists():
        listed = set(json.loads(index.read_text())["weight_map"].values())
        files = [file for file in files if file.name in listed]
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dict)
                if "scale" in name and "weight" not in name and "input" not in name:
                    yield name, tensors.get_tensor(name)


def check_cases(engine: str):
    with tempfile.TemporaryDirectory() as scratch:
        made = {case.name: write_case(case, Path(scratch, str(i))) for i, case in enumerate(CASES)}
        if engine == "sglang":
            import no_pictures  # noqa: F401 (before SGLang)

            # whether files are there is checked by what is not run here
            left_out = {*_UNKNOWN, *(case.name for case in CASES if case.also_indexed)}
            for name, path in (made | GOLDEN).items():
                if name not in left_out:
                    yield check(name, path, held_by_sglang(path), find_engine("sglang"))
            return
        yield from check_vllm(made | {n: path for n, path in GOLDEN.items() if path.name not in _WEIGHTS})
        for place, names in PLACES:
            yield from check_vllm({name: made[name] for name in names}, place)


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    with torch.no_grad():
        if what == RANK:
            rank, ranks, fnuz = map(int, arguments[:3])
            place = Place(ranks, bool(fnuz))
            print(json.dumps([held_by_vllm(Path(path), place, rank) for path in arguments[3:]]))
        elif arguments:
            paths = {path.name: path for path in sorted(Path(arguments[0]).iterdir())}
            tell(check_vllm(paths, must_load=True))
        else:
            tell(check_cases(what))
