"""Evaluations that several files look at, each made once in a process; no test changes them."""

from itertools import product

import pytest
from baking import model_directory
from evaluations import caches_recipe, plain_inputs
from families import FAMILIES, save_model, tiny_model
from transformers import AutoModelForCausalLM

from calib.caches.types import CACHES
from calib.evaluate import inputs
from calib.evaluate.report import Report, Suite
from calib.evaluate.run import evaluate
from calib.evaluate.summarize import summarize
from calib.recipe import load_recipe


@pytest.fixture(scope="session")
def small_directory(tmp_path_factory):
    model = tiny_model("mistral", **FAMILIES["mistral"])
    return save_model(model, tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="session")
def small_recipe():
    names = ["none", "e5m2", "tensor", "attn_head", "channel", "k only", "v only", "random"]
    choices = {"data.dataset": "random", "device": "cpu", "dtype": "float32", "evaluation.variants": names}
    return load_recipe(None, choices)


@pytest.fixture(scope="session")
def small_evaluation(small_directory, small_recipe):
    """Static FP8: three documents, two of them read layer by layer, and two texts of six tokens."""
    return evaluate(str(small_directory), small_recipe, suite=Suite(3, 3, 40, 2, 6, (), (), 2))


@pytest.fixture(scope="session")
def small_report(small_evaluation):
    """The object in report.json."""
    return summarize(small_evaluation).to_json()


@pytest.fixture(scope="session")
def plain(small_evaluation):
    """The model in plain transformers, and the documents that the evaluation measures on, [1, T] each."""
    return plain_inputs(small_evaluation)


@pytest.fixture(scope="session")
def cache_report(small_report):
    """The report as of an evaluation with twenty more caches, of 28 to 53 % of 16 bits' bytes."""
    variants, whole = dict(small_report["variants"]), small_report["bytes_per_token"]["16bit"]
    plain = {"int8_per_token_head": (0.53, 1e-3), "fp8_per_token_head": (0.53, 6e-3)}
    plain |= {"lmdeploy_int8": (0.53, 4e-4), "fp8_k_nvfp4_v": (0.39, 0.017), "nvfp4": (0.28, 0.095)}
    plain |= {"nvfp4_4over6": (0.28, 0.08), "int4_per_token_head": (0.28, 0.06)}
    plain |= {"lmdeploy_int4": (0.28, 0.2), "a": (0.53, 7e-3), "b": (0.28, 0.1)}
    for (name, (share, value)), baked in product(plain.items(), (False, True)):
        value *= 0.7 if baked else 1.0
        kl = {"value": value, "low": 0.9 * value, "high": 1.1 * value}
        cache = {"kind": "cache", "cache": name if name in CACHES else "int8_per_token_head", "kl": kl}
        size = {"bytes_per_token": round(share * whole)}
        variants[name + ", baked" * baked] = variants["tensor"] | cache | size
    return Report.model_validate(small_report | {"variants": variants})


@pytest.fixture(scope="session")
def caches_directory(tmp_path_factory):
    path = model_directory(tmp_path_factory.mktemp("model") / "it's tiny", "llama", head_dim=32)
    model = AutoModelForCausalLM.from_pretrained(path)
    # the padding token's is 0, and so are its K and V, which LMDeploy divides by 0
    weight = model.get_input_embeddings().weight.data
    weight[0] = weight[5]
    # K too small for FP8 at scale 1.0
    attention = model.model.layers[1].self_attn
    attention.k_proj.weight.data /= 2**9
    attention.q_proj.weight.data *= 2**9
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def caches_evaluation(caches_directory):
    """All types of cache for K and V of heads, plain and on baked weights."""
    recipe = caches_recipe("none", "tensor", "attn_head")
    return evaluate(str(caches_directory), recipe, suite=Suite(4, 3, 32, 2, 4, (), (), 0))


@pytest.fixture(scope="session")
def caches_report(caches_evaluation):
    return summarize(caches_evaluation)


@pytest.fixture
def small_suite(monkeypatch):
    monkeypatch.setitem(inputs.SUITES, "quick", Suite(3, 4, 24, 2, 5, (), (), 2))
