"""Documents are read in chunks: the figures do not depend on their size."""

import pytest
import torch
from families import FAMILIES, tiny_model

from calib.capture.loop import calibrate
from calib.data import make_batches
from calib.evaluate import measure
from calib.evaluate.measure import compare_variants
from calib.evaluate.variants import REFERENCE, Setup, build_variants
from calib.recipe import load_recipe

# of which no K or V lies so near the middle of two codes that attention's float32 decides
DOCUMENT = torch.randint(1, 90, (37,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_chunks_give_what_one_pass_gives(family, monkeypatch):
    # float64, where chunks differ by what attention does in float32 alone
    model = tiny_model(family, **FAMILIES[family]).double()
    recipe = load_recipe(None, {"means": True, "targets": "qkv", "observer.name": "mse"})
    stats = calibrate(model, make_batches([DOCUMENT.tolist()], 1, pad_id=0), recipe)
    variants = build_variants(stats, stats)
    with torch.inference_mode():
        whole = compare_variants(Setup(model, None, "torch"), DOCUMENT, variants)
        monkeypatch.setattr(measure, "_TOKENS", 10)
        chunked = compare_variants(Setup(model, None, "torch"), DOCUMENT, variants)
    assert list(whole) == [REFERENCE, *(variant.name for variant in variants)]
    for name, divergence in whole.items():
        assert divergence.kl.shape == (37,)
        assert divergence.nll.shape == (36,)
        torch.testing.assert_close(chunked[name].kl, divergence.kl, rtol=1e-3, atol=1e-8)
        torch.testing.assert_close(chunked[name].nll, divergence.nll, rtol=1e-4, atol=1e-5)
        assert torch.equal(chunked[name].agrees, divergence.agrees)
    assert whole["e5m2"].kl.mean() > 1.5 * whole["tensor"].kl.mean() > 0
