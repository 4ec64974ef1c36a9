"""The recommendation: what is chosen within a budget, and how it is served."""

import shlex
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from command_line import calibrate, fp8kv, one_line_error, ran, succeeded
from families import save_model, tiny_model

from calib.choices import REFERENCE
from calib.engines.cache_support import Offer
from calib.errors import InputError
from calib.evaluate.measure import Measured
from calib.evaluate.recommend import Wish, advised_cache, answer_lines, make_wish, recommend
from calib.evaluate.report import Row
from calib.evaluate.serve_commands import Offers
from calib.evaluate.statistics import Divergence, estimate
from calib.evaluate.variants import Variant
from calib.evaluate.verdict import Judgement
from calib.models.sources import find_model

pytestmark = pytest.mark.xdist_group("caches")
OFFER = Offer("vllm", "1", ("h100",), commands=("x",))
ANYWHERE = SimpleNamespace(find=lambda variant, engine, gpu: OFFER)
NOISE = torch.rand(4, 50, generator=torch.Generator().manual_seed(0))


def figures(name, kl, size, *, kind="cache", baked=False, noise=NOISE):
    """A variant with KL of about `kl` in every one of four documents."""
    documents = [Divergence(kl * (0.9 + 0.2 * row), None, None) for row in noise]
    row = Row.model_construct(
        description=name, kind=kind, is_baked=baked, bytes_per_token=size, measurable=True,
        kl=estimate([each.kl.double().numpy() for each in documents]),
    )  # fmt: skip
    return name, Measured(Variant(name, name, kind), documents), row


def chosen(variants, **wish):
    reference = figures(REFERENCE, 0.0, 200, kind=REFERENCE)
    all_of = [reference, *variants]
    measured = {name: m for name, m, _ in all_of}
    rows = {name: row for name, _, row in all_of}
    return recommend(Judgement(measured, rows), ANYWHERE, Wish(**wish))


FIELD = [
    figures("none", 0.02, 100, kind="fp8"),
    figures("tensor", 0.008, 100, kind="fp8"),
    figures("attn_head", 0.00799, 100, kind="fp8", noise=NOISE.flip(0)),
    figures("int8", 0.001, 106),
    figures("int8, baked", 0.0005, 106, baked=True),
    figures("int4", 0.3, 56),
]


def test_the_cheapest_within_a_budget_of_kl():
    for budget, expected in {
        0.5: "int4",  # the cheapest
        0.03: "none",  # tensor is measurably better, and needs calibrated scales
        0.01: "tensor",
        0.005: "int8",  # as cheap, and needs no baked weights
        0.0007: "int8, baked",
        0.0004: REFERENCE,
    }.items():
        found = chosen(FIELD, kl=budget)
        assert found.chosen.cache == expected, budget
        assert found.chosen.kl.high <= budget
        others = {each.cache for each in found.alternatives}
        assert {expected, *others} == {REFERENCE, *(name for name, *_ in FIELD)}
    # the upper end of the interval counts
    kl = FIELD[3][2].kl
    assert chosen([FIELD[3]], kl=(kl.value + kl.high) / 2).chosen.cache == REFERENCE
    assert chosen([FIELD[3]], kl=kl.high).chosen.cache == "int8"
    # what is better and needs more is named
    found = chosen(FIELD, kl=0.03)
    why = {each.cache: each.why for each in found.alternatives}
    assert why["tensor"] == "measurably better, needs calibrated scales"
    assert why["int8"] == "more bytes"
    line = advised_cache(found)
    assert line.startswith("The cheapest within KL 0.03 is none, which needs nothing")
    assert "(attn_head, tensor: measurably better in as many bytes)" in line
    way = found.chosen.model_copy(update={"commands": ("make", "serve")})
    assert advised_cache(found.model_copy(update={"chosen": way})).endswith(": make && serve")


def test_the_best_within_a_budget_of_bytes_and_never_what_is_no_number():
    for share, expected in {0.3: "int4", 0.5: "tensor", 0.53: "int8, baked"}.items():
        assert chosen(FIELD, kl=None, share=share).chosen.cache == expected, share
    # 16 bits may be within the budget as well
    for share, words in ((1.0, "nothing that can be served has a lower KL"), (0.2, "nothing else")):
        found = chosen(FIELD, kl=None, share=share)
        assert found.chosen.cache == REFERENCE
        assert answer_lines(found)[0].startswith(f"16 bits: {words}")
    broken = figures("lmdeploy_int8", float("nan"), 50)
    assert chosen([broken], kl=1.0).chosen.cache == REFERENCE
    found = chosen([broken, FIELD[3]], kl=None, share=0.6)
    assert found.chosen.cache == "int8"
    assert found.alternatives[0].why == "its KL is not a finite number"
    assert "with a finite KL" in answer_lines(chosen([broken], kl=None, share=0.6))[0]


def test_what_does_not_differ_measurably_goes_to_the_simpler():
    same = [
        # documents in another order: which one is worse differs from one to the next
        figures("int8, baked", 1e-3, 106, baked=True, noise=NOISE.flip(0)),
        figures("attn_head", 1.0001e-3, 106, kind="fp8", noise=NOISE.roll(1, 0)),
        figures("tensor", 1.0002e-3, 106, kind="fp8", noise=NOISE.roll(2, 0)),
        figures("int8", 1.0003e-3, 106),
    ]
    for wish in ({"kl": 0.01}, {"kl": None, "share": 0.6}):
        for given in (same, same[::-1]):
            found = chosen(given, **wish)
            assert (found.chosen.cache, found.chosen.needs) == ("int8", "nothing")
            why = {each.cache: each.why for each in found.alternatives}
            assert why["int8, baked"] == "not measurably better, needs baked weights"
            assert why["tensor"] == "not measurably better, needs calibrated scales"
    assert chosen(same[:3], kl=0.01).chosen.cache == "tensor"
    assert chosen(same[:2], kl=0.01).chosen.cache == "attn_head"


def test_every_answer_can_be_served(caches_evaluation, caches_report, caches_directory):
    assert caches_report.recommended.chosen.cache in caches_report.advice[-1]
    assert caches_report.recommended.chosen.commands[-1] in caches_report.advice[-1]
    judgement = Judgement(caches_evaluation.measured, caches_report.variants, caches_report.noise_floor)
    trusting = replace(caches_evaluation.offers, trust_remote_code=True)
    for place in product([None, "vllm", "sglang", "lmdeploy"], [None, "a100", "h100", "b200"]):
        engine, gpu = place
        found = recommend(judgement, caches_evaluation.offers, Wish(kl=1.0, engine=engine, gpu=gpu))
        served = [found.chosen.cache, *(each.cache for each in found.alternatives)]
        assert set(served) | set(found.not_served) == {
            name for name, row in caches_report.variants.items() if row.kind != "control"
        }
        for name in served:
            variant = caches_evaluation.measured[name].variant
            offer = caches_evaluation.offers.find(variant, engine, gpu)
            trusted = trusting.find(variant, engine, gpu).commands
            assert trusted == tuple(f"{each} --trust-remote-code" for each in offer.commands)
            assert engine in (None, offer.engine), place
            assert gpu is None or name == REFERENCE or gpu in offer.gpus, place
            needs = [shlex.split(command)[:2] for command in offer.commands[:-1]]
            made = shlex.split(offer.commands[-2])[-1] if needs else str(caches_directory)
            assert made in shlex.split(offer.commands[-1]), (place, name)
            calibration = ["fp8kv-calibrate", str(caches_directory)]
            if name.endswith("baked"):
                assert needs == [calibration, ["fp8kv", "bake"]]
            elif name in ("tensor", "attn_head"):
                assert needs == [calibration]
                assert offer.engine != "lmdeploy"
            else:
                assert needs == []
        has_heads = engine in (None, "vllm") and gpu in (None, "h100", "b200")
        assert ("attn_head" in served) == has_heads, place
        # on an A100 vLLM has FP8 for larger heads than these
        has_no_tensor = engine == "lmdeploy" or place == ("vllm", "a100")
        assert ("tensor" in served) != has_no_tensor, place


def test_fp8_that_ends_at_240(caches_evaluation):
    """It is given scales that the engine doubles there, and never 1.0, which clips."""
    offers, of = caches_evaluation.offers, {n: m.variant for n, m in caches_evaluation.measured.items()}
    for engine, name in (("vllm", "modelopt"), ("sglang", "sglang")):
        offer = offers.find(of["tensor"], engine, "mi300x")
        assert offer.gpus == ("mi300x",)
        assert f"--format {name} " in offer.commands[0]
        for at_1 in ("none", "fp8, baked"):
            assert "ends at 240" in offers.find(of[at_1], engine, "mi300x")
            assert "mi300x" not in offers.find(of[at_1], engine, None).gpus
    assert offers.find(of["int8_per_token_head"], "vllm", "mi300x").gpus == ("mi300x",)


@pytest.mark.parametrize("format_name", ["vllm", "vllm-nvfp4"])
def test_scales_in_the_checkpoint_are_not_1(format_name, caches_evaluation, caches_directory, tmp_path):
    succeeded(calibrate(caches_directory, "-o", tmp_path / "out", "--format", format_name))
    checkpoint = find_model(str(tmp_path / "out"))
    shapes = [(2, 128, 128)]
    before = replace(caches_evaluation.offers, shapes=shapes)
    after = Offers("m", checkpoint, "", shapes)
    for name in ("none", "fp8, baked", "nvfp4", "nvfp4_4over6"):
        variant = caches_evaluation.measured[name].variant
        assert not isinstance(before.find(variant, None, None), str)
        refusal = after.find(variant, None, None)
        assert "has KV scales of its own" in refusal
        assert "fp8kv strip" in refusal
    for name in (REFERENCE, "int8_per_token_head"):
        assert not isinstance(after.find(caches_evaluation.measured[name].variant, None, None), str)


def test_wishes_that_cannot_be_meant():
    for flags, problem in (
        (("0", None, None, None), "--budget-kl takes a number above 0 .*got '0'"),
        (("nan", None, None, None), "got 'nan'"),
        (("much", None, None, None), "got 'much'"),
        ((None, "-1", None, None), "--budget-bytes takes a number above 0"),
        ((None, "2", None, None), "--budget-bytes 2 is more than 1"),
        (("1", "0.5", None, None), "give one of them"),
        ((None, None, "llama.cpp", None), "--engine 'llama.cpp'.* vllm, sglang, lmdeploy"),
        ((None, None, None, "tpu"), "--gpu 'tpu'.* a100.* mi300x"),
        ((None, None, "lmdeploy", "mi300x"), "lmdeploy on mi300x"),
    ):
        with pytest.raises(InputError, match=problem):
            make_wish(*flags)


def test_the_command_line(tmp_path):
    # no model is needed to refuse flags
    one_line_error(fp8kv("recommend", "gone", "--budget-kl", "-1"), "--budget-kl takes a number above 0")
    # NVFP4 is not for heads of this size
    directory = save_model(tiny_model("llama", head_dim=24, num_hidden_layers=2), tmp_path / "24")
    few = ("--dataset", "random", "--samples", "3", "--seq-len", "16", "--device", "cpu")
    done = ran("recommend", directory, "--budget-kl", "1", "--engine", "vllm", "--gpu", "h100", *few)
    assert any("nvfp4: head size 24" in each for each in done.stderr.splitlines())
    assert "not chosen" in done.stdout
    assert "speed was not measured" in done.stdout
    for name in ("int4_per_token_head, baked", "int8_per_token_head", "tensor"):
        assert f" {name} │" in done.stdout
    assert "vllm serve" in done.stdout.splitlines()[-1]
    refused = [line.split(" does not have")[0] for line in done.stdout.splitlines() if "cannot be" in line]
    types = [f"lmdeploy_{bits}{baked}" for bits in ("int8", "int4") for baked in ("", ", baked")]
    assert refused == [f"{name} cannot be served: vllm" for name in types]
