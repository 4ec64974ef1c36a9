"""`verify` says of every class, config and name what the tables say that the class did."""

import sys
from pathlib import Path

import pytest

from calib.engines.catalogue import find_engine
from calib.engines.classes import TRANSFORMERS
from calib.engines.loading import simulate
from calib.files.model_directory import ModelDirectory
from calib.files.names import parse_scale_name
from calib.files.scale_files import ScaleTensor

sys.path.append(str(Path(__file__).parents[2] / "interop"))
from engine_cases import NAMINGS, QUANTIZATIONS, fixtures

K_ALONE = "partly: all with K alone"


def directory(fixture, quantization, naming):
    """The fixture's checkpoint with a scale for each module, under one name."""
    config = dict(fixture.config)
    if quantization.config:
        config["quantization_config"] = quantization.config
    text = config.get("text_config") or config
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads") or text["n_head"]
    values = (0.5,) * (heads if quantization.per_head else 1)
    patterns = NAMINGS[:2] if naming == "both" else (naming,)
    names = {p.format(module=m, x=x) for p in patterns for m in fixture.modules for x in "kv"}
    tensors = [
        ScaleTensor(name, parse_scale_name(name), "m", "F32", (len(values),), values)
        for name in sorted(names)
    ]
    made = ModelDirectory(Path(), config, {"m": {}})
    # what would be read of files
    scales = {"tensors": tensors, "unlisted": [], "offsets": [], "json": None}
    vars(made).update(scales, modelopt=quantization.document, modules={*fixture.modules})
    return made


def said(simulation):
    if simulation.refused:
        return "refused"
    if any(outcome.status == "unknown" for outcome in simulation.outcomes):
        return "unknown"
    return "loaded" if simulation.is_good else simulation.fate


def expected(fate):
    """`verify`'s word for a fate in the tables."""
    word = fate.partition(":")[0]
    return {"crash": "refused"}.get(word, word)


def results(classes, name):
    """What is to be predicted: of latents also what loads in the backend for transformers' code."""
    of_class = classes.results.get(name, {})
    for kind, fates in of_class.items():
        others = of_class.get(f"{kind}{TRANSFORMERS}", {}) if name in classes.latent else {}
        if not kind.endswith(TRANSFORMERS):
            yield kind, fates | {n: fate for n, fate in others.items() if fate == "loaded"}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_architecture_config_and_name(engine):
    rules, classes = find_engine(engine), find_engine(engine).classes
    wrong, cases = [], 0
    for fixture in fixtures([]):
        for kind, fates in results(classes, fixture.architecture):
            for naming, fate in fates.items():
                found = said(simulate(directory(fixture, QUANTIZATIONS[kind], naming), rules))
                cases += 1
                if found != expected(fate):
                    wrong.append((fixture.name, kind, naming, fate, found))
    assert wrong == []
    assert cases > 3000
