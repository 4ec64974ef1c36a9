"""What is measured on a document does not depend on chunks; a search skips as few layers as any could."""

from itertools import combinations

import pytest
import torch
from evaluations import variants_of
from families import FAMILIES, save_model, tiny_model, tiny_vision_language_model

from calib.evaluate import measure
from calib.evaluate.measure import _only, compare_variants, search_layers
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.variants import REFERENCE, Setup
from calib.evaluate.verdict import _search_line, skip_argument
from calib.recipe import load_recipe


def document(seed, length):
    return torch.randint(1, 90, (length,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def test_chunks_give_what_one_pass_gives(monkeypatch):
    # float64, where chunks differ by what attention does in float32 alone; a document of which no K or V lies
    # so near the middle of two codes that this decides
    model, tokens = tiny_model("gemma3_text", **FAMILIES["gemma3_text"]).double(), document(1, 37)
    variants = [*variants_of(model, tokens).values()]
    setup = Setup(model, None, "torch")
    whole = compare_variants(setup, tokens, variants)
    monkeypatch.setattr(measure, "_TOKENS", 10)
    chunked = compare_variants(setup, tokens, variants)
    assert list(whole) == [REFERENCE, *(variant.name for variant in variants)]
    for name, divergence in whole.items():
        assert (divergence.kl.shape, divergence.nll.shape) == ((37,), (36,))
        torch.testing.assert_close(chunked[name].kl, divergence.kl, rtol=1e-3, atol=1e-8)
        torch.testing.assert_close(chunked[name].nll, divergence.nll, rtol=1e-4, atol=1e-5)
        assert torch.equal(chunked[name].agrees, divergence.agrees)
    assert whole["e5m2"].kl.mean() > 1.5 * whole["tensor"].kl.mean() > 0


@torch.inference_mode()
def test_the_kernels_give_the_same_figures():
    model, tokens = tiny_model("llama", num_hidden_layers=1), document(1, 8)
    tensor = [variants_of(model, tokens)["tensor"]]
    plain, kernels = (
        compare_variants(Setup(model, None, backend), tokens, tensor)["tensor"]
        for backend in ("torch", "triton")
    )
    assert not torch.equal(kernels.kl, plain.kl)  # they add in another order
    torch.testing.assert_close(kernels.kl, plain.kl, rtol=1e-3, atol=1e-8)


@torch.inference_mode()
def test_no_other_choice_of_layers_is_smaller():
    documents = [document(30, 30), document(20, 20)]
    model = tiny_model("llama", num_hidden_layers=4).eval()
    setup, variant = Setup(model, None, "torch"), variants_of(model, *documents)["tensor"]

    def mean_kl(skipped):
        only = _only(variant, set(range(4)) - set(skipped))
        kl = [compare_variants(setup, each, [only])[only.name].kl for each in documents]
        return torch.cat(kl).double().mean().item()

    kl_of = {skipped: mean_kl(skipped) for n in range(4) for skipped in combinations(range(4), n)}
    kl_of[0, 1, 2, 3] = 0.0
    for share in (0.0, 0.1, 0.3, 0.6, 1.5):
        budget = share * kl_of[()]
        found = search_layers(setup, [variant], documents, budget)
        assert len(found.skipped) == min(len(skipped) for skipped, kl in kl_of.items() if kl <= budget)
        assert found.kl == pytest.approx(kl_of[found.skipped], rel=1e-6)
        assert found.kl <= budget
        assert found.kl_of_all == pytest.approx(kl_of[()], rel=1e-6)
        for layer, kl in found.kl_alone.items():
            others = tuple(i for i in range(4) if i != layer)
            assert kl == pytest.approx(kl_of[others], rel=1e-6)
        if found.skipped:  # in vLLM's words, at the end of its line so that it can be copied
            assert _search_line(found).endswith(f" {skip_argument(found.skipped)}")
    assert skip_argument([3, 11]) == "--kv-cache-dtype-skip-layers 3 11"


@pytest.mark.parametrize("family", ["gpt_oss", "paligemma"])
def test_a_model_with_one_attention_implementation_has_one_control(family, tmp_path):
    options = FAMILIES.get(family)
    model = tiny_model(family, **options) if options else tiny_vision_language_model(family)
    choices = {"data.dataset": "random", "dtype": "float32", "evaluation.variants": ("tensor",)}
    recipe, path = load_recipe(None, choices), save_model(model, tmp_path / "model")
    found = evaluate(str(path), recipe, suite=Suite(3, 2, 24, 0, 5, (), (), 1))
    assert [name for name, m in found.measured.items() if m.variant.kind == "control"] == ["bf16"]
    assert any("one attention implementation" in line for line in found.warnings)
