"""`--search-bits`: a type for each layer within a mean of bits per value."""

import json
from itertools import product
from math import inf, nan

import pytest
from command_line import fp8kv, one_line_error
from families import save_model, tiny_model

from calib.caches.types import Shape, cache_type
from calib.errors import InputError
from calib.eval.found import Mixture
from calib.eval.mixture import choose, layer_map, mixture_lines

BITS = {i: {"16 bits": 16.0, "fp8": 8.0, "nvfp4": 4.5, "": 32.0} for i in range(4)}
ALONE = {
    "16 bits": dict.fromkeys(range(4), 0.0),
    "fp8": {0: 0.01, 1: 0.002, 2: 0.03, 3: 0.001},
    "nvfp4": {0: 0.2, 1: 0.05, 2: 0.9, 3: 0.01},
}


def mean(chosen):
    return sum(BITS[i][name] for i, name in chosen.items()) / len(chosen)


def kl(chosen):
    return sum(ALONE[name][i] for i, name in chosen.items())


@pytest.mark.parametrize("budget", [4.5, 5.4, 6.0, 7.1, 8.0, 10.0, 13.0, 16.0])
def test_greedy_is_within_budget_and_the_best_here(budget):
    chosen = choose(ALONE, BITS, budget)
    assert mean(chosen) <= budget
    every = (dict(enumerate(names)) for names in product(ALONE, repeat=4))
    best = min(kl(each) for each in every if mean(each) <= budget)
    # greedy steps are not always the best; at these budgets they are
    assert kl(chosen) == pytest.approx(best)


def test_a_kl_that_is_no_number_is_never_kept():
    lost = {**ALONE, "nvfp4": {**ALONE["nvfp4"], 1: nan, 3: inf}}
    assert choose(lost, BITS, 7.2) == {0: "nvfp4", 1: "fp8", 2: "fp8", 3: "fp8"}
    with pytest.raises(InputError, match="of these types has 6.25 where the KL is a number"):
        choose(lost, BITS, 6.0)


def test_the_worst_layer_is_enlarged_first():
    assert choose(ALONE, BITS, 5.4) == {0: "nvfp4", 1: "nvfp4", 2: "fp8", 3: "nvfp4"}


def test_a_budget_below_the_smallest_type():
    with pytest.raises(InputError, match="--search-bits 4: the smallest of these types has 4.5"):
        choose(ALONE, BITS, 4.0)


def found(layers):
    modules = {i: f"model.layers.{i}.self_attn" for i in layers}
    return Mixture(budget=9, bits=8.5, documents=1, kl=0.01, kl_alone={}, layers=layers, modules=modules)


def held_as(*shapes):
    """How vLLM serves types for a model of such layers."""
    return lambda name: cache_type(name).serving("vllm", None, shapes)


def test_one_type_and_16_bits_is_served_by_vllm():
    mixture = found({0: "fp8", 1: "16 bits", 2: "fp8", 3: "16 bits"})
    (line,) = mixture_lines(mixture, held_as((1, 64, 64)))
    assert "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 1 3, with calibrated scales" in line
    (line,) = mixture_lines(found({0: "fp8", 1: "nvfp4"}), held_as((1, 64, 64)))
    assert "1 layer in fp8, 1 layer in nvfp4" in line
    assert "no released engine" in line
    written = json.loads(layer_map(mixture))
    assert "not yet read by vLLM" in written["note"]
    assert written["quantization"] == {
        "kv_cache_quant_algo": "MIXED_PRECISION",
        "kv_cache_schema_version": 1,
        "kv_cache_quantized_layers": {
            "model.layers.0.self_attn": {"quant_algo": "FP8"},
            "model.layers.2.self_attn": {"quant_algo": "FP8"},
        },
    }
    # ModelOpt has no name for this type
    assert layer_map(found({0: "int8_per_token_head"})) == ""


def test_the_flag_is_for_the_models_own_head_sizes():
    mixture = found({0: "nvfp4", 1: "16 bits"})
    (line,) = mixture_lines(mixture, held_as((1, 64, 128)))
    assert line.endswith("--kv-cache-dtype nvfp4 --kv-cache-dtype-skip-layers 1")
    (line,) = mixture_lines(mixture, held_as((1, 80, 80)))
    assert "--kv-cache-dtype" not in line
    assert "not of 80" in line


def test_latents_are_served_at_scale_1():
    latents, sparse = (Shape(1, 512, 64, kind) for kind in ("latents", "sparse latents"))
    (line,) = mixture_lines(found({0: "fp8", 1: "16 bits"}), held_as(latents))
    assert line.endswith("vLLM: --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 1")
    (line,) = mixture_lines(found({0: "fp8_ds_mla", 1: "16 bits"}), held_as(sparse))
    assert line.endswith("--kv-cache-dtype fp8_ds_mla --kv-cache-dtype-skip-layers 1")
    (line,) = mixture_lines(found({0: "fp8_ds_mla", 1: "16 bits"}), held_as(latents))
    assert line.endswith("not for latents")


def test_a_mixture_whose_kl_is_no_number_is_refused(tmp_path, monkeypatch):
    directory = save_model(tiny_model("llama"), tmp_path / "tiny")
    monkeypatch.setattr(
        "calib.eval.mixture.mean_kl",
        lambda _, name, v, __: [0.1 if len(v) > 1 else nan] * len(v),
    )
    flags = ("--dataset", "random", "--samples", "2", "--seq-len", "16", "--device", "cpu")
    done = fp8kv("eval", directory, *flags, "--caches", "nvfp4", "--search-bits", "7")
    one_line_error(done, "--search-bits 7: the KL of the mixture is nan")


def test_the_command_line(tmp_path):
    directory = save_model(tiny_model("llama"), tmp_path / "tiny")
    flags = ("--dataset", "random", "--samples", "2", "--seq-len", "16", "--device", "cpu")
    caches = ("--variants", "none", "--caches", "fp8,nvfp4")
    out = tmp_path / "report"
    done = fp8kv("eval", directory, *flags, *caches, "--search-bits", "7", "-o", out)
    assert done.exit_code == 0, done.stderr
    report = json.loads((out / "report.json").read_text())
    mixture = report["mixture"]
    assert mixture["bits"] <= 7
    assert set(mixture["layers"].values()) <= {"fp8", "nvfp4", "16 bits"}
    assert set(mixture["kl_alone"]) == {"fp8", "nvfp4"}
    assert any("7 bits a value are met" in line for line in report["advice"])
    layers = json.loads((out / "modelopt_kv_cache_layers.json").read_text())["quantization"]
    assert all(name.startswith("model.layers.") for name in layers["kv_cache_quantized_layers"])
    # again into the same directory
    assert fp8kv("eval", directory, *flags, *caches, "-o", out).exit_code == 0
    assert not (out / "modelopt_kv_cache_layers.json").exists()
    one_line_error(fp8kv("eval", directory, *flags, "--search-bits", "7"), "--caches")
    one_line_error(fp8kv("eval", directory, "--search-bits", "0"), "evaluation.bits_budget")
