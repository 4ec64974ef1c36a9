"""KL, agreement, intervals and conditions, against values worked out by hand or in float64."""

import math

import numpy as np
import pytest
import torch

from calib.divergence import ReferenceLogits, divergence
from calib.errors import InputError
from calib.evaluate.report import Figure, Report, Row
from calib.evaluate.statistics import compare, estimate, quantile
from calib.evaluate.verdict import failures
from calib.files.text import parse_condition


def test_divergence_of_two_small_distributions():
    reference = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]]).log()
    variant = torch.tensor([[0.25, 0.75], [0.9, 0.1], [0.6, 0.4]]).log()
    found = compare(ReferenceLogits(reference), variant, torch.tensor([1, 0]))
    expected = [
        0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75),
        0.0,
        0.2 * math.log(0.2 / 0.6) + 0.8 * math.log(0.8 / 0.4),
    ]
    # the logits themselves are rounded
    torch.testing.assert_close(found.kl.float(), torch.tensor(expected), rtol=1e-6, atol=1e-7)
    assert found.agrees.tolist() == [False, True, False]
    # the first distribution is of the second token, the second of the third
    torch.testing.assert_close(found.nll.float(), -torch.tensor([0.75, 0.9]).log())


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
def test_divergence_in_chunks_is_that_of_the_whole(tokens):
    torch.manual_seed(0)
    reference, variant = torch.randn(2, tokens, 50)
    ids = torch.randint(50, (tokens,))
    found = compare(ReferenceLogits(reference), variant, ids[1:])
    p, q = (x.double().log_softmax(-1) for x in (reference, variant))
    torch.testing.assert_close(found.kl, (p.exp() * (p - q)).sum(-1), rtol=1e-9, atol=0)
    expected = -q[:-1].gather(1, ids[1:, None]).squeeze(1)
    torch.testing.assert_close(found.nll, expected, rtol=1e-9, atol=0)


def test_differences_far_below_float32_are_seen():
    torch.manual_seed(0)
    reference = torch.randn(3, 50_000) * 3
    for size in (1e-2, 1e-3, 1e-4):
        variant = reference + size * torch.randn_like(reference) + 5.0  # a shift changes nothing
        p, q = (x.double().log_softmax(-1) for x in (reference, variant))
        expected = (p.exp() * (p - q)).sum(-1)
        assert expected.max() < 2 * size**2
        found = divergence(reference, variant)
        # what is expected is the less exact of the two: it subtracts logarithms
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_a_distribution_does_not_differ_from_itself():
    logits = torch.randn(70, 300) * 8
    found = compare(ReferenceLogits(logits), logits, torch.zeros(69, dtype=torch.long))
    assert (found.kl == 0).all()
    assert found.agrees.all()


def test_the_interval_covers_the_mean_19_times_in_20():
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        # 40 documents that differ in level: tokens of one are alike
        documents = [rng.normal(rng.normal(3.0, 1.0), 0.1, size=30) for _ in range(40)]
        found = estimate(documents, seed=trial)
        covered += found.low <= 3.0 <= found.high
    # binomial: 190 expected, standard deviation 3; a bootstrap of 40 is a little narrow
    assert 178 <= covered <= 199


def test_tokens_of_one_document_do_not_count_as_independent():
    rng = np.random.default_rng(0)
    documents = [np.full(500, level) for level in rng.normal(size=10)]
    found = estimate(documents)
    naive = 1.96 * np.concatenate(documents).std() / math.sqrt(5000)
    assert found.high - found.low > 10 * naive


def test_quantiles_are_of_all_tokens():
    documents = [np.arange(50.0), np.arange(50.0, 101.0)]
    assert estimate(documents, quantile(0.99)).value == 99.0


def report(**variants):
    """A report of nothing but these values."""
    rows = {
        name: Row.model_construct(**{metric: Figure(value=x, low=x, high=x) for metric, x in metrics.items()})
        for name, metrics in variants.items()
    }
    return Report.model_construct(variants=rows)


REPORT = report(
    reference={"kl": 0.0},
    tensor={"kl": 0.03, "top1": 0.9},
    attn_head={"kl": 0.01, "top1": 0.97},
)


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ("kl>0.02", ["tensor"]),
        ("kl_mean>0.02", ["tensor"]),
        ("kl > 0.005", ["tensor", "attn_head"]),
        ("top1<0.95", ["tensor"]),
        ("top1<=0.97", ["tensor", "attn_head"]),
        ("attn_head:kl>=0.01", ["attn_head"]),
        ("attn_head:kl>0.01", []),
    ],
)
def test_conditions(text, failed):
    lines = failures(parse_condition(text), REPORT, ["tensor", "attn_head"])
    assert [line.split(":")[0] for line in lines] == failed


@pytest.mark.parametrize(
    "text", ["kl", "speed>3", "kl>", "kl>much", "kl=1", "", "kl>nan", "kl<-inf", "top1<1e999"]
)
def test_what_is_no_condition(text):
    with pytest.raises(InputError, match="METRIC one of kl, kl_p99") as caught:
        parse_condition(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["kl>0.02", "kl<0.02", "tensor:kl>=1e9"])
def test_what_is_not_a_number_fails_every_condition(text):
    lost = report(tensor={"kl": math.nan})
    assert failures(parse_condition(text), lost, ["tensor"]) == [
        f"tensor: kl is not a finite number ({text})"
    ]


def test_conditions_on_what_was_not_measured():
    with pytest.raises(InputError, match="no variant 'channel'; there are tensor, attn_head"):
        failures(parse_condition("channel:kl>1"), REPORT, [])
    with pytest.raises(InputError, match="'kl>1' names no variant, and none was measured"):
        failures(parse_condition("kl>1"), REPORT, [])
    with pytest.raises(InputError, match="passkey was not measured for 'tensor'"):
        failures(parse_condition("tensor:passkey<1"), REPORT, [])
