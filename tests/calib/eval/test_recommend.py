"""The recommendation: what is chosen within a budget, and how it is served."""

import shlex
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from command_line import fp8kv, one_line_error
from families import save_model, tiny_model

from calib.choices import REFERENCE
from calib.eval.advice import simplest
from calib.eval.offers import Offer, Offers
from calib.eval.reader import Measured
from calib.eval.recommend import Wish, answer_lines, recommend
from calib.eval.run import evaluate
from calib.eval.schema import Row, Suite
from calib.eval.statistics import Divergence, estimate
from calib.eval.summarize import summarize
from calib.eval.variants import UNCHANGED, Variant
from calib.recipe import load_recipe

OFFER = Offer("vllm", "1", ("h100",), (), ("x",))
ANYWHERE = SimpleNamespace(of=lambda variant, engine, gpu: OFFER)
PLACES = [*product([None, "vllm", "sglang", "lmdeploy"], [None, "a100", "h100", "b200"])]
RECIPE = load_recipe(
    None,
    {
        "data.dataset": "random",
        "device": "cpu",
        "dtype": "float32",
        "evaluation.caches": ["all"],
        "evaluation.variants": ["none", "tensor", "attn_head"],
    },
)
NOISE = torch.rand(4, 50, generator=torch.Generator().manual_seed(0))


def figures(name, kl, size, *, kind="cache", baked=False, noise=None):
    """A variant with KL of about `kl` in every one of four documents."""
    noise = NOISE if noise is None else noise
    documents = [Divergence(kl * (0.9 + 0.2 * row), None, None) for row in noise]
    row = Row.model_construct(
        what=name, kind=kind, is_baked=baked, bytes_per_token=size,
        kl=estimate([each.kl.double().numpy() for each in documents]),
    )  # fmt: skip
    return name, Measured(Variant(name, name, kind), documents), row


def chosen(variants, **wish):
    reference = figures(REFERENCE, 0.0, 200, kind=REFERENCE)
    all_of = [reference, *variants]
    measured = {name: m for name, m, _ in all_of}
    rows = {name: row for name, _, row in all_of}
    return recommend(measured, rows, ANYWHERE, Wish(**wish))


FIELD = [
    figures("none", 0.02, 100, kind="fp8"),
    figures("tensor", 0.008, 100, kind="fp8"),
    figures("attn_head", 0.00799, 100, kind="fp8", noise=NOISE.flip(0)),
    figures("int8", 0.001, 106),
    figures("int8, baked", 0.0005, 106, baked=True),
    figures("int4", 0.3, 56),
]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (0.5, "int4"),  # the cheapest
        (0.03, "tensor"),  # none is within as well, as cheap, and measurably worse
        (0.01, "tensor"),
        (0.005, "int8, baked"),
        (0.0004, REFERENCE),
        (1e-9, REFERENCE),
    ],
)
def test_the_cheapest_within_a_budget(budget, expected):
    found = chosen(FIELD, kl=budget)
    assert found.chosen.cache == expected
    assert found.chosen.kl.high <= budget
    assert {each.cache for each in found.passed} == {
        name for name, *_ in [(REFERENCE,), *FIELD] if name != expected
    }


def test_the_upper_end_of_the_interval_counts():
    _, _, row = FIELD[3]
    assert row.kl.value < row.kl.high
    between = (row.kl.value + row.kl.high) / 2
    assert chosen([FIELD[3]], kl=between).chosen.cache == REFERENCE
    assert chosen([FIELD[3]], kl=row.kl.high).chosen.cache == "int8"


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.2, REFERENCE), (0.3, "int4"), (0.5, "tensor"), (0.53, "int8, baked"), (1.0, REFERENCE)],
)
def test_the_best_within_a_budget_of_bytes(share, expected):
    assert chosen(FIELD, kl=None, share=share).chosen.cache == expected


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
            assert found.chosen.cache == "int8"
            assert found.chosen.needs == "nothing"
            why = {each.cache: each.why for each in found.passed}
            assert why["int8, baked"] == "not measurably better, needs baked weights"
            assert why["tensor"] == "not measurably better, needs calibrated scales"
    assert chosen(same[:3], kl=0.01).chosen.cache == "tensor"
    assert chosen(same[:2], kl=0.01).chosen.cache == "attn_head"


def test_no_number_is_never_chosen():
    broken = figures("lmdeploy_int8", float("nan"), 50)
    assert chosen([broken], kl=1.0).chosen.cache == REFERENCE
    assert chosen([broken, FIELD[3]], kl=None, share=0.6).chosen.cache == "int8"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_model(tiny_model("llama"), tmp_path_factory.mktemp("m") / "it's tiny")


@pytest.fixture(scope="module")
def evaluation(directory):
    return evaluate(str(directory), RECIPE, suite=Suite(4, 3, 32, 0, 0, (), (), 0))


@pytest.fixture(scope="module")
def report(evaluation):
    return summarize(evaluation)


@pytest.mark.parametrize(("engine", "gpu"), PLACES)
def test_every_answer_can_be_served(engine, gpu, evaluation, report, directory):
    wish = Wish(kl=1.0, engine=engine, gpu=gpu)
    found = recommend(evaluation.measured, report.variants, evaluation.offers, wish)
    served = [found.chosen.cache, *(each.cache for each in found.passed)]
    assert set(served) | set(found.not_served) == {
        name for name, row in report.variants.items() if row.kind != "control"
    }
    for name in served:
        offer = evaluation.offers.of(evaluation.measured[name].variant, engine, gpu)
        assert engine in (None, offer.engine)
        assert gpu is None or name == REFERENCE or gpu in offer.gpus
        needs = [shlex.split(command)[:2] for command in offer.commands[:-1]]
        if name.endswith("baked"):
            assert needs == [["fp8kv-calibrate", str(directory)], ["fp8kv", "bake"]]
        elif name in ("tensor", "attn_head"):
            assert needs == [["fp8kv-calibrate", str(directory)]]
            assert offer.engine != "lmdeploy"
        else:
            assert needs == []
            assert str(directory) in shlex.split(offer.commands[-1])
    if engine in ("sglang", "lmdeploy"):
        assert "attn_head" in found.not_served


def test_what_is_made_is_what_is_served(evaluation):
    for name, measured in evaluation.measured.items():
        offer = evaluation.offers.of(measured.variant, None, None)
        if not isinstance(offer, str) and len(offer.commands) > 1:
            made = shlex.split(offer.commands[-2])[-1]
            assert made in shlex.split(offer.commands[-1]), name


def test_the_report_advises_the_same(evaluation, report):
    asked = recommend(evaluation.measured, report.variants, evaluation.offers, Wish())
    assert report.recommended == asked
    assert report.recommended.chosen.cache in report.advice[-1]
    assert report.recommended.chosen.commands[-1] in report.advice[-1]
    assert answer_lines(asked)[0].startswith(report.recommended.chosen.cache)


def test_advised_scales_and_the_recommendation_are_one_rule(evaluation, report):
    names = [name for name in ("none", "tensor", "attn_head") if name in report.variants]
    assert report.advised == simplest(names, evaluation.measured, report.variants)


def test_scales_in_the_checkpoint_are_not_1(evaluation, directory, tmp_path):
    from command_line import calibrate

    from calib.model.find import find_checkpoint

    assert calibrate(directory, "-o", tmp_path / "out").exit_code == 0
    checkpoint = find_checkpoint(str(tmp_path / "out"))
    offers = Offers("m", checkpoint, "random", [(2, 16, 16)])
    refusal = offers.of(evaluation.measured["none"].variant, None, None)
    assert "has KV scales" in refusal
    assert not isinstance(offers.of(UNCHANGED, None, None), str)


@pytest.mark.parametrize(
    ("flags", "phrases"),
    [
        (["--budget-kl", "0"], ["--budget-kl takes a number above 0", "got '0'"]),
        (["--budget-kl", "-1"], ["--budget-kl takes a number above 0"]),
        (["--budget-kl", "nan"], ["got 'nan'"]),
        (["--budget-kl", "much"], ["got 'much'"]),
        (["--budget-bytes", "0"], ["--budget-bytes takes a number above 0"]),
        (["--budget-bytes", "2"], ["--budget-bytes 2 is more than 1"]),
        (["--budget-kl", "1", "--budget-bytes", "0.5"], ["give one of them"]),
        (["--engine", "llama.cpp"], ["--engine 'llama.cpp'", "vllm, sglang, lmdeploy"]),
        (["--gpu", "tpu"], ["--gpu 'tpu'", "a100", "mi300x"]),
        (["--engine", "lmdeploy", "--gpu", "mi300x"], ["lmdeploy on mi300x"]),
    ],
)
def test_bad_flags_are_one_line(flags, phrases):
    # no model is needed to refuse them
    one_line_error(fp8kv("recommend", "gone", *flags), *phrases)


def test_the_command_line(directory):
    flags = ("--dataset", "random", "--samples", "3", "--seq-len", "16", "--device", "cpu")
    done = fp8kv("recommend", directory, "--budget-kl", "1", "--engine", "vllm", *flags)
    assert done.exit_code == 0, done.stderr
    assert "not chosen" in done.stdout
    assert "speed was not measured" in done.stdout
    assert "int4_per_token_head" in done.stdout
    assert "vllm serve" in done.stdout.splitlines()[-1]
    none = fp8kv("recommend", directory, "--budget-kl", "1e-30", *flags)
    assert none.exit_code == 0, none.stderr
    assert none.stdout.splitlines()[-2].startswith("16 bits: nothing else")
