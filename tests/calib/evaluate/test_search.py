"""The search leaves as few layers in 16 bits as any choice of layers could."""

from itertools import combinations

import pytest
import torch
from families import tiny_model

from calib.capture.loop import calibrate
from calib.data import make_batches
from calib.evaluate.measure import _only, compare_variants, search_layers
from calib.evaluate.variants import Setup, build_variants
from calib.evaluate.verdict import _search_line, skip_argument
from calib.recipe import load_recipe

DOCUMENTS = [torch.randint(1, 90, (n,), generator=torch.Generator().manual_seed(n)) for n in (30, 20)]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", num_hidden_layers=4).eval()


@pytest.fixture(scope="module")
def variant(model):
    recipe = load_recipe(None, {"means": True, "targets": "qkv", "observer.name": "mse"})
    samples = [document.tolist() for document in DOCUMENTS]
    stats = calibrate(model, make_batches(samples, 1, pad_id=0), recipe)
    return next(v for v in build_variants(stats, stats) if v.name == "tensor")


@pytest.fixture(scope="module")
def kl_of(model, variant):
    """Mean KL by the set of layers that are skipped, for every set."""

    @torch.inference_mode()
    def mean(kept):
        if not kept:
            return 0.0
        only = _only(variant, kept)
        kl = [compare_variants(Setup(model, None, "torch"), d, [only])[only.name].kl for d in DOCUMENTS]
        return torch.cat(kl).double().mean().item()

    every = set(range(4))
    return {s: mean(every - set(s)) for n in range(5) for s in combinations(sorted(every), n)}


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6, 0.9, 1.5])
def test_no_other_choice_of_layers_is_smaller(share, model, variant, kl_of):
    budget = share * kl_of[()]
    found = search_layers(Setup(model, None, "torch"), [variant], DOCUMENTS, budget)
    fewest = min(len(skipped) for skipped, kl in kl_of.items() if kl <= budget)
    assert len(found.skipped) == fewest
    assert found.kl == pytest.approx(kl_of[found.skipped], rel=1e-6)
    assert found.kl <= budget
    assert found.kl_of_all == pytest.approx(kl_of[()], rel=1e-6)
    for layer, kl in found.kl_alone.items():
        others = tuple(i for i in range(4) if i != layer)
        assert kl == pytest.approx(kl_of[others], rel=1e-6)


def test_the_argument_is_vllms():
    assert skip_argument([3, 11]) == "--kv-cache-dtype-skip-layers 3 11"


def test_the_argument_ends_its_line_so_that_it_can_be_copied(model, variant, kl_of):
    found = search_layers(Setup(model, None, "torch"), [variant], DOCUMENTS, 0.3 * kl_of[()])
    assert _search_line(found).endswith(f" {skip_argument(found.skipped)}")
