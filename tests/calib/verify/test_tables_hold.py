"""`verify` says of every class, config and name what the tables say that the class did."""

import sys
from pathlib import Path

import pytest

from calib.scalefiles.folder import ScaleDirectory, ScaleTensor
from calib.scalefiles.names import parse_scale_name
from calib.verify.classes import load_classes
from calib.verify.rules import all_rules
from calib.verify.simulate import simulate

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
        ScaleTensor(name, parse_scale_name(name), "m", "F32", (len(values),), values, True)
        for name in sorted(names)
    ]
    document, modules = quantization.document, {*fixture.modules}
    return ScaleDirectory(Path(), config, document, None, ["m"], tensors, None, modules)


def said(simulation):
    if simulation.refused:
        return "refused"
    if any(outcome.status == "unknown" for outcome in simulation.outcomes):
        return "unknown"
    return "loaded" if simulation.is_good else simulation.fate


def expected(fate, is_latent, all_fates):
    """`verify`'s word for a fate in the tables."""
    if is_latent and "loaded" in all_fates:
        return "unknown"  # scales arrive; what the cache does with them was not run
    word = fate.partition(":")[0]
    return {"crash": "refused"}.get(word, word)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_architecture_config_and_name(engine):
    rules, classes = all_rules()[engine], load_classes(engine)
    wrong, cases = [], 0
    for fixture in fixtures([]):
        for kind, fates in classes.results.get(fixture.architecture, {}).items():
            for naming, fate in fates.items():
                found = said(simulate(directory(fixture, QUANTIZATIONS[kind], naming), rules))
                wanted = expected(fate, fixture.architecture in classes.latent, fates.values())
                cases += 1
                if found != wanted:
                    wrong.append((fixture.name, kind, naming, fate, found))
    assert wrong == []
    assert cases > 3000
