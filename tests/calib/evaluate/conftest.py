"""One small evaluation, for the tests of what becomes of it."""

import pytest
from families import FAMILIES, save_model, tiny_model

from calib.caches.types import CACHES
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.summarize import summarize
from calib.recipe import load_recipe

VARIANTS = ["none", "tensor", "attn_head", "channel", "k only"]


@pytest.fixture(scope="session")
def small_directory(tmp_path_factory):
    model = tiny_model("mistral", **FAMILIES["mistral"])
    return save_model(model, tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="session")
def small_recipe():
    choices = {"data.dataset": "random", "device": "cpu", "dtype": "float32"}
    return load_recipe(None, {**choices, "evaluation.variants": VARIANTS})


@pytest.fixture(scope="session")
def small_evaluation(small_directory, small_recipe):
    return evaluate(str(small_directory), small_recipe, suite=Suite(3, 3, 40, 2, 6, (), (), 2))


@pytest.fixture(scope="session")
def small_report(small_evaluation):
    """The object in report.json."""
    return summarize(small_evaluation).to_json()


@pytest.fixture(scope="session")
def cache_report(small_report):
    """The same with twenty more caches, of 28 to 53 % of 16 bits' bytes."""
    variants, whole = dict(small_report["variants"]), small_report["bytes_per_token"]["16bit"]
    plain = {"int8_per_token_head": (0.53, 1e-3), "fp8_per_token_head": (0.53, 6e-3)}
    plain |= {"lmdeploy_int8": (0.53, 4e-4), "fp8_k_nvfp4_v": (0.39, 0.017), "nvfp4": (0.28, 0.095)}
    plain |= {"nvfp4_4over6": (0.28, 0.08), "int4_per_token_head": (0.28, 0.06)}
    plain |= {"lmdeploy_int4": (0.28, 0.2), "a": (0.53, 7e-3), "b": (0.28, 0.1)}
    for name, (share, kl) in plain.items():
        for suffix, factor in (("", 1.0), (", baked", 0.7)):
            value = kl * factor
            variants[name + suffix] = variants["tensor"] | {
                "kind": "cache",
                "cache": name if name in CACHES else "int8_per_token_head",
                "kl": {"value": value, "low": 0.9 * value, "high": 1.1 * value},
                "bytes_per_token": round(share * whole),
            }
    return small_report | {"variants": variants}
