"""`fp8kv bake` where norms of Q and K multiply by 1 + weight, as Gemma's do: (1 + w) * f - 1 is rounded."""

import json

import pytest
import torch
from baking import OTHERS, bake, calibrated, scales_of, seen
from command_line import SMALL, one_line_error, ran, succeeded
from families import FAMILIES, edit_tensors, save_model, tiny_model
from safetensors.torch import load_file

from calib.rescale import one_plus, pipeline
from calib.rescale.one_plus import is_held, nearest_powers
from calib.rescale.weight_changes import WeightChange


def gemma(path, model_type, dtype=torch.bfloat16, size=1.0):
    """A model of another size of K than its norms are made with."""
    model = tiny_model(model_type, **(FAMILIES | OTHERS)[model_type])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "k_norm" in name:
                weight.copy_(((1 + weight) * size - 1).bfloat16())
    return save_model(model.to(dtype), path)


@pytest.fixture(scope="module")
def small_gemma(tmp_path_factory):
    source = gemma(tmp_path_factory.mktemp("gemma") / "source", "gemma3_text")
    return source, calibrated(source, source.with_name("scales"), "--format", "fp8kv")


@pytest.mark.parametrize("size", [1.0, 64.0])  # K inside FP8, and far beyond
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3_next"])
def test_both_purposes_in_both_dtypes(model_type, dtype, size, tmp_path):
    source = gemma(tmp_path / "source", model_type, dtype, size)
    flags = ("--strategy", "attn_head", "--format", "fp8kv")
    scales = calibrated(source, tmp_path / "scales", *flags)
    (logits, _), old = seen(source), load_file(source / "model.safetensors")
    for purpose in ("fp8", "int8"):
        out = tmp_path / purpose
        done = succeeded(bake(source, scales, out, "--for", purpose))
        said = json.loads((out / "fp8kv_bake.json").read_text())
        k = [torch.tensor(each["k"])[0].log2() for each in said["factors"].values()]
        octaves = [each if each.dim() else each.expand(24) for each in k]
        assert any(bool(each.any()) for each in octaves)
        assert all(torch.equal(each, each.round()) for each in octaves)
        assert torch.equal(logits, seen(out)[0]) == said["exact"] == (said["rounded"] == [])
        shown, card = " ".join(done.stdout.split()), (out / "README.md").read_text()
        assert ("bit for bit" in shown) == ("bit for bit" in card) == said["exact"]
        assert ("are rounded, as" in shown) == (not said["exact"])
        assert all("_norm.weight" in name for name in said["rounded"])
        new = load_file(out / "model.safetensors")
        # what rounding does to the product that scores see, in float64
        for name, powers in zip((name for name in old if "k_norm" in name), octaves, strict=True):
            products, off = [], 0
            for each, sign in ((name, 1), (name.replace("k_norm", "q_norm"), -1)):
                was, became = (1 + weights[each].float() for weights in (old, new))
                wanted = was.double() * (sign * powers).exp2()
                error = (became.double() - wanted).abs()
                assert bool(error.any()) == (each in said["rounded"])
                off, products = off + error / wanted, [*products, was.double()]
            product = products[0] * products[1]
            # all channels together: one rounding each of Q and of K, to bfloat16
            assert (off * product).square().sum() <= 2 * (product * 2**-8).square().sum()
        if purpose == "fp8":
            assert scales_of(calibrated(out, tmp_path / "after", *flags)).max() <= 1


def test_the_recommendation_knows_it(small_gemma, tmp_path):
    done = ran("eval", small_gemma[0], "-o", tmp_path / "page", "--caches", "int8_per_token_head", *SMALL)
    assert "int8_per_token_head, baked" in (tmp_path / "page" / "report.json").read_text()
    said = " ".join((done.stdout + done.stderr).split())
    assert "no rows on weights baked" not in said
    assert "leave out that `bake` rounds 6 weights of norms: a KL of " in said


def test_a_rounding_that_scores_would_notice_is_not_held():
    def norm(which, factor):
        return WeightChange("attention", f"{which}_norm.weight", torch.full((4,), factor), True)

    def held_by(dtype, weight, factor):
        return is_held([(norm("q", 1 / factor), weight.to(dtype)), (norm("k", factor), weight.to(dtype))])

    weight = torch.tensor([0.25, 0.3, -0.3, 0.0]).bfloat16()
    assert held_by(torch.bfloat16, weight, 1.0).all()
    assert held_by(torch.bfloat16, weight, 2.0)[:2].all()
    # 1.3 / 64 - 1 to eight bits; 1.25 and 1 fit
    assert held_by(torch.bfloat16, weight, 64.0).tolist() == [True, False, False, True]
    assert held_by(torch.float32, weight, 64.0).all()
    # weights of float32's own are held to float32's rounding
    assert not held_by(torch.float32, torch.tensor([0.1, 1e-6, 0.2, 0.3]), 64.0)[1]
    table = torch.zeros(len(one_plus._POWERS), 2, dtype=torch.bool)
    assert nearest_powers(table, torch.tensor([0, 1]))[0] == float("inf")
    table[16] = True
    assert nearest_powers(table, torch.tensor([0, 1]))[1].tolist() == [0, 0]


def test_a_rounded_norm_that_is_written_otherwise_is_seen(small_gemma, tmp_path, monkeypatch):
    write = pipeline.write_weights

    def write_another(checkpoint, edits, out, *more):
        write(checkpoint, edits, out, *more)
        norm = next(name for name in edits if name.endswith("k_norm.weight"))
        edit_tensors(out, lambda tensors: tensors[norm][0].mul_(1.0625))

    monkeypatch.setattr(pipeline, "write_weights", write_another)
    done = bake(*small_gemma, tmp_path / "out", "--for", "int8")
    one_line_error(done, "k_norm.weight' was not written as it was rounded")
    assert not (tmp_path / "out").exists()
