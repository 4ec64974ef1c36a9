"""What `verify` predicts of hand-made directories, and of every class, config and name in the tables."""

import sys
from pathlib import Path

import pytest
from scale_directories import simulated

from calib.engines.catalogue import load_catalogue
from calib.engines.model_classes import TRANSFORMERS
from calib.engines.simulate_loading import simulate
from calib.files.config import head_counts, text_config
from calib.files.model_directory import ModelDirectory
from calib.files.names import parse_scale_name
from calib.files.scale_files import ScaleTensor

sys.path.append(str(Path(__file__).parents[2] / "interop"))
from engine_cases import NAMINGS, QUANTIZATIONS, fixtures
from scale_cases import CASES, LAYERS, write_case


def words(simulation):
    """As the table of cases says it."""
    if simulation.refused:
        return "refused"
    loaded = [o.letter for o in simulation.outcomes if o.status == "loaded"]
    everywhere = [letter for letter in "kvq" if loaded.count(letter) == LAYERS]
    somewhere = [letter for letter in "kvq" if 0 < loaded.count(letter) < LAYERS]
    return " ".join(everywhere or somewhere) + (f" in 1 of {LAYERS}" if somewhere else "")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_vllm_is_predicted(case, tmp_path):
    assert words(simulated(write_case(case, tmp_path / "model"), "vllm")) == case.expected


def directory(fixture, quantization, naming):
    """The fixture's checkpoint with a scale for each module, under one name."""
    config = dict(fixture.config)
    if quantization.config:
        config["quantization_config"] = quantization.config
    parts = [config, config.get("thinker_config") or {}]
    parts = [part.get("text_config") or part.get("llm_config") or part for part in parts]
    keys = ("num_key_value_heads", "num_attention_heads", "n_head")
    heads = next(part[key] for part in parts for key in keys if part.get(key))
    values = (0.5,) * (heads if quantization.per_head else 1)
    patterns = NAMINGS[:2] if naming == "both" else (naming,)
    names = sorted({p.format(module=m, x=x) for p in patterns for m in fixture.modules for x in "kv"})
    tensors = [ScaleTensor(n, parse_scale_name(n), "m", "F32", (len(values),), values) for n in names]
    made = ModelDirectory(Path(), config, {"m": {}})
    # what would be read of files
    scales = {"tensors": tensors, "unlisted": [], "offsets": [], "json": None}
    vars(made).update(scales, modelopt=quantization.document, modules={*fixture.modules})
    return made


def word(simulation):
    if simulation.refused:
        return "refused"
    if any(outcome.status == "unknown" for outcome in simulation.outcomes):
        return "unknown"
    return "loaded" if simulation.is_good else simulation.fate


def results(classes, name):
    """What is to be predicted: of latents also what loads in the backend for transformers' code."""
    of_class = classes.results.get(name, {})
    for kind, fates in of_class.items():
        others = of_class.get(f"{kind}{TRANSFORMERS}", {}) if name in classes.latent else {}
        if not kind.endswith(TRANSFORMERS):
            yield kind, fates | {n: fate for n, fate in others.items() if fate == "loaded"}


@pytest.mark.parametrize("name", [name for name, engine in load_catalogue().items() if engine.classes])
def test_every_architecture_config_and_name(name):
    rules = load_catalogue()[name]
    wrong, cases = [], 0
    for fixture in fixtures([]):
        is_counted = head_counts(text_config(fixture.config), "k")
        for kind, fates in results(rules.classes, fixture.architecture):
            for naming, fate in fates.items():
                expected = fate.partition(":")[0].replace("crash", "refused")
                if kind.endswith("attn_head") and expected in ("loaded", "partly") and not is_counted:
                    expected = "unknown"  # heads of an unknown number
                found = word(simulate(directory(fixture, QUANTIZATIONS[kind], naming), rules))
                cases += 1
                if found != expected:
                    wrong.append((fixture.name, kind, naming, fate, found))
    assert wrong == []
    assert cases > 3000
