"""The recommendation: what is chosen within a budget, and how it is served."""

import json
import shlex
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from command_line import calibrate, fp8kv, one_line_error
from evaluations import caches_recipe
from families import save_model, tiny_model

from calib.choices import REFERENCE
from calib.engines.cache_support import Offer
from calib.evaluate.measure import Measured
from calib.evaluate.recommend import Wish, advised_cache, answer_lines, recommend
from calib.evaluate.report import Row, Suite
from calib.evaluate.run import evaluate
from calib.evaluate.serve_commands import Offers
from calib.evaluate.statistics import Divergence, estimate
from calib.evaluate.summarize import summarize
from calib.evaluate.variants import Variant
from calib.evaluate.verdict import Judgement
from calib.models.sources import find_model

OFFER = Offer("vllm", "1", ("h100",), commands=("x",))
ANYWHERE = SimpleNamespace(find=lambda variant, engine, gpu: OFFER)
PLACES = [*product([None, "vllm", "sglang", "lmdeploy"], [None, "a100", "h100", "b200"])]
RECIPE = caches_recipe("none", "tensor", "attn_head")
NOISE = torch.rand(4, 50, generator=torch.Generator().manual_seed(0))


def figures(name, kl, size, *, kind="cache", baked=False, noise=None):
    """A variant with KL of about `kl` in every one of four documents."""
    noise = NOISE if noise is None else noise
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


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (0.5, "int4"),  # the cheapest
        (0.03, "none"),  # tensor is measurably better, and needs calibrated scales
        (0.01, "tensor"),
        (0.005, "int8"),  # as cheap, and needs no baked weights
        (0.0007, "int8, baked"),
        (0.0004, REFERENCE),
        (1e-9, REFERENCE),
    ],
)
def test_the_cheapest_within_a_budget(budget, expected):
    found = chosen(FIELD, kl=budget)
    assert found.chosen.cache == expected
    assert found.chosen.kl.high <= budget
    assert {each.cache for each in found.alternatives} == {
        name for name, *_ in [(REFERENCE,), *FIELD] if name != expected
    }


def test_what_is_better_and_needs_more_is_named():
    why = {each.cache: each.why for each in chosen(FIELD, kl=0.03).alternatives}
    assert why["tensor"] == "measurably better, needs calibrated scales"
    assert why["int8"] == "more bytes"


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
            why = {each.cache: each.why for each in found.alternatives}
            assert why["int8, baked"] == "not measurably better, needs baked weights"
            assert why["tensor"] == "not measurably better, needs calibrated scales"
    assert chosen(same[:3], kl=0.01).chosen.cache == "tensor"
    assert chosen(same[:2], kl=0.01).chosen.cache == "attn_head"


def test_no_number_is_never_chosen():
    broken = figures("lmdeploy_int8", float("nan"), 50)
    assert chosen([broken], kl=1.0).chosen.cache == REFERENCE
    found = chosen([broken, FIELD[3]], kl=None, share=0.6)
    assert found.chosen.cache == "int8"
    assert found.alternatives[0].why == "its KL is not a finite number"
    assert "with a finite KL" in answer_lines(chosen([broken], kl=None, share=0.6))[0]


def test_16_bits_may_be_within_the_budget_as_well():
    for share, words in ((1.0, "nothing that can be served has a lower KL"), (0.2, "nothing else")):
        assert answer_lines(chosen(FIELD, kl=None, share=share))[0].startswith(f"16 bits: {words}")


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
    judgement = Judgement(evaluation.measured, report.variants, report.noise_floor)
    found = recommend(judgement, evaluation.offers, wish)
    served = [found.chosen.cache, *(each.cache for each in found.alternatives)]
    assert set(served) | set(found.not_served) == {
        name for name, row in report.variants.items() if row.kind != "control"
    }
    for name in served:
        offer = evaluation.offers.find(evaluation.measured[name].variant, engine, gpu)
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
    assert ("attn_head" in served) == (engine in (None, "vllm") and gpu in (None, "h100", "b200"))
    # on an A100 vLLM has FP8 for larger heads than these
    has_no_tensor = engine == "lmdeploy" or (engine, gpu) == ("vllm", "a100")
    assert ("tensor" in served) != has_no_tensor


@pytest.mark.parametrize(("engine", "name"), [("vllm", "modelopt"), ("sglang", "sglang")])
def test_fp8_that_ends_at_240(engine, name, evaluation):
    """It is given scales that the engine doubles there, and never 1.0, which clips."""
    of = {key: m.variant for key, m in evaluation.measured.items()}
    offer = evaluation.offers.find(of["tensor"], engine, "mi300x")
    assert offer.gpus == ("mi300x",)
    assert f"--format {name} " in offer.commands[0]
    for at_1 in ("none", "fp8, baked"):
        assert "ends at 240" in evaluation.offers.find(of[at_1], engine, "mi300x")
        assert "mi300x" not in evaluation.offers.find(of[at_1], engine, None).gpus
    assert evaluation.offers.find(of["int8_per_token_head"], "vllm", "mi300x").gpus == ("mi300x",)


def test_what_is_made_is_what_is_served(evaluation):
    for name, measured in evaluation.measured.items():
        offer = evaluation.offers.find(measured.variant, None, None)
        if not isinstance(offer, str) and len(offer.commands) > 1:
            made = shlex.split(offer.commands[-2])[-1]
            assert made in shlex.split(offer.commands[-1]), name


def test_the_report_advises_the_same(evaluation, report):
    assert report.recommended.chosen.cache in report.advice[-1]
    assert report.recommended.chosen.commands[-1] in report.advice[-1]


def test_advice_has_every_command():
    found = chosen([FIELD[3]], kl=1.0)
    way = found.chosen.model_copy(update={"commands": ("make", "serve")})
    line = advised_cache(found.model_copy(update={"chosen": way}))
    assert line.endswith(": make && serve")


def test_advice_within_a_budget_names_what_is_better():
    line = advised_cache(chosen(FIELD, kl=0.03))
    assert line.startswith("The cheapest within KL 0.03 is none, which needs nothing")
    assert "(attn_head, tensor: measurably better in as many bytes)" in line


def test_trust_is_asked_of_every_command(evaluation):
    offers = replace(evaluation.offers, trust_remote_code=True)
    for name in ("tensor", "fp8, baked", REFERENCE):
        commands = offers.find(evaluation.measured[name].variant, None, None).commands
        assert all(each.endswith(" --trust-remote-code") for each in commands)
        untold = evaluation.offers.find(evaluation.measured[name].variant, None, None)
        assert not any("--trust-remote-code" in each for each in untold.commands)
        assert len(commands) == {"tensor": 2, "fp8, baked": 3, REFERENCE: 1}[name]


@pytest.mark.parametrize("format_name", ["vllm", "vllm-nvfp4"])
def test_scales_in_the_checkpoint_are_not_1(format_name, evaluation, directory, tmp_path):
    done = calibrate(directory, "-o", tmp_path / "out", "--format", format_name)
    assert done.exit_code == 0, done.stderr
    checkpoint = find_model(str(tmp_path / "out"))
    shapes = [(2, 128, 128)]
    before, after = replace(evaluation.offers, shapes=shapes), Offers("m", checkpoint, "", shapes)
    for name in ("none", "fp8, baked", "nvfp4", "nvfp4_4over6"):
        variant = evaluation.measured[name].variant
        assert not isinstance(before.find(variant, None, None), str)
        refusal = after.find(variant, None, None)
        assert "has KV scales of its own" in refusal
        assert "fp8kv strip" in refusal
    for name in (REFERENCE, "int8_per_token_head"):
        assert not isinstance(after.find(evaluation.measured[name].variant, None, None), str)


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
    assert "lmdeploy_int4 cannot be served: vllm does not have lmdeploy_int4" in done.stdout
    none = fp8kv("recommend", directory, "--budget-kl", "1e-30", *flags)
    assert none.exit_code == 0, none.stderr
    assert none.stdout.splitlines()[-2].startswith("16 bits: nothing else")


def test_a_head_size_that_a_type_does_not_allow(tmp_path):
    directory = save_model(tiny_model("llama", head_dim=24), tmp_path / "24")
    flags = ("--dataset", "random", "--samples", "3", "--seq-len", "16", "--device", "cpu")
    done = fp8kv("recommend", directory, *flags, "--engine", "vllm", "--gpu", "h100", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert any("nvfp4: head size 24" in each for each in found["warnings"])
    measured = {found["chosen"]["cache"], *(each["cache"] for each in found["passed"])}
    assert {"int8_per_token_head", "tensor"} <= measured
    assert set(found["not_served"]) == {"lmdeploy_int8", "lmdeploy_int4"} | {
        f"lmdeploy_{each}, baked" for each in ("int8", "int4")
    }
