"""Headroom by layer, and what is expected of new text."""

import math
from dataclasses import replace
from functools import reduce

import pytest
import torch
from apply_cases import report_of
from command_line import fp8kv, one_line_error, ran
from families import save_model, tiny_model

from calib.capture.loop import calibrate
from calib.data import make_batches
from calib.errors import InputError
from calib.recipe import Recipe
from calib.scales.stats import PER_TOKEN, derive_scales
from calib.scales.stats_file import load_stats, save_stats
from calib.scales.summary import ClippedTokens, clip_chance, clipped_tokens, covered_share
from calib.scales.tail import CLIP_CHANCE, TAIL, Tail, add_ties, count_ties, headroom_for, largest
from calib.scales.text_summary import TextSummary

E4M3 = 448.0


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def stats(model):
    """Of 4,000 random tokens."""
    ids = torch.randint(64, (40, 100), generator=torch.Generator().manual_seed(0)).tolist()
    return calibrate(model, make_batches(ids, 8, pad_id=0), Recipe(device="cpu"))


@pytest.fixture(scope="module")
def first(stats):
    name, layer = next(iter(stats.layers.items()))
    return name, layer, derive_scales(stats, Recipe()).layers[name]


def without(stats, *fields):
    tensors = {at: x for at, x in stats.tensors().items() if at[2] not in fields}
    return stats.replace_tensors(tensors, stats.counts())


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_headroom_by_layer_keeps_the_stated_chance_and_is_one_factor_per_layer(stats, strategy):
    plain = derive_scales(stats, Recipe(strategy=strategy))
    auto = derive_scales(stats, Recipe(strategy=strategy, headroom="auto"))
    for name, layer in stats.layers.items():
        wide, narrow = auto.layers[name], plain.layers[name]
        factors = torch.cat([wide.k / narrow.k, wide.v / narrow.v])
        # two float32 products
        torch.testing.assert_close(factors, factors[:1].expand_as(factors), rtol=1e-6, atol=0)
        assert factors[0] > 1
        assert clip_chance(layer, wide, E4M3) <= CLIP_CHANCE == 1e-6
        assert clip_chance(layer, narrow, E4M3) > CLIP_CHANCE
        tails = layer.tails(strategy)  # a larger chance needs less
        assert headroom_for(tails, 1e-7) > headroom_for(tails) > headroom_for(tails, 1e-5)
    assert covered_share(stats, auto, ahead=4, margin=0) == 1
    assert covered_share(stats, plain, ahead=100, margin=0) == 0
    assert covered_share(stats, plain, ahead=100, margin=1) == 1


def test_one_scale_for_all_heads_has_room_of_its_own(stats):
    heads = {"strategy": "attn_head", "headroom": "auto"}
    reduced = derive_scales(stats, Recipe(**heads, export={"reduce": "max"}))
    whole = derive_scales(stats, Recipe(headroom="auto"))
    assert reduced.strategy == "tensor"
    for name, layer in reduced.layers.items():
        assert torch.equal(layer.k, whole.layers[name].k)
        assert torch.equal(layer.v, whole.layers[name].v)
        assert layer.k < derive_scales(stats, Recipe(**heads)).layers[name].k.max()


def test_the_chance_of_a_layer_is_that_of_any_of_its_groups(stats, first):
    name, layer, plain = first
    own = derive_scales(stats, Recipe(strategy="attn_head")).layers[name]
    misses = [
        1 - float(chance)
        for tail, scale in zip(layer.tails("attn_head"), (own.k, own.v), strict=True)
        for chance in tail.chance_above(scale.double() * E4M3)
    ]
    assert clip_chance(layer, own, E4M3) == pytest.approx(1 - math.prod(misses))
    k, v = (clip_chance(layer, own, E4M3, which) for which in "kv")
    assert (1 - k) * (1 - v) == pytest.approx(math.prod(misses))
    # far below the largest the chance is a share of the tokens seen
    top = layer.k.tail.flatten().sort(descending=True).values
    level = (top[39] + top[40]) / 2  # of the 40 largest tokens
    lower = replace(plain, k=(level / E4M3).view(1).float())
    assert clip_chance(layer, lower, E4M3, "k") == pytest.approx(40 / layer.tokens)


def test_zeros_and_ties_are_no_tails(stats, first):
    """As where every sample starts with the same token, and that one is the largest."""
    name, layer, _ = first
    amax, tail = layer.k.amax.clone(), layer.k.tail.clone()
    amax[0] = tail[0] = 0

    def derived(fields, **options):
        changed = replace(layer, k=replace(layer.k, **fields))
        return changed, derive_scales(replace(stats, layers={name: changed}), Recipe(**options)).layers[name]

    options = {"strategy": "attn_head", "headroom": "auto"}
    (_, alive), (_, dead) = derived({}, **options), derived({"amax": amax, "tail": tail}, **options)
    assert torch.all(dead.v <= alive.v)
    for value in torch.rand(50, generator=torch.Generator().manual_seed(1)).add(1).tolist():
        tied = {field: torch.full_like(getattr(layer.k, field), value) for field in ("amax", "tail")}
        assert clip_chance(*derived(tied), E4M3) is not None  # a rounded scale holds them


def test_text_that_returns_is_no_evidence_of_what_new_text_holds(model):
    ids = torch.randint(64, (20, 100), generator=torch.Generator().manual_seed(0)).tolist()

    def measured(samples):
        batches = make_batches(samples, 8, pad_id=0)
        return replace(calibrate(model, batches, Recipe(device="cpu")), text=TextSummary.of(samples))

    once, copies = measured(ids), measured(ids * 8)
    chances = [[*clipped_tokens(x, derive_scales(x, Recipe())).by_layer.values()] for x in (once, copies)]
    for one, other in zip(*chances, strict=True):
        assert one / 2 < other < one * 2  # eight times less, if copies counted
    few = measured(ids[:9] * 8)
    assert clipped_tokens(few, derive_scales(few, Recipe())) is None
    with pytest.raises(InputError, match="8.. tokens, without repeated text, are too few"):
        derive_scales(few, Recipe(headroom="auto"))
    assert "899 are new, too few" in few.text.warnings()[0]


def test_layers_of_which_no_chance_is_known_are_named_and_not_left_out(stats, first):
    """Scales that clip more than is known have no chance; K and V are judged together."""
    _, layer, plain = first
    small = replace(plain, k=plain.k / 1000)
    assert clip_chance(layer, small, E4M3) is clip_chance(layer, small, E4M3, "v") is None
    scales = derive_scales(stats, Recipe())
    known, own = clipped_tokens(stats, scales).by_layer, dict(scales.layers)
    for many, name in enumerate(stats.layers, 1):
        own[name] = replace(own[name], k=own[name].k / 1000)
        found = clipped_tokens(stats, replace(scales, layers=own))
        assert found.by_layer == {layer: chance for layer, chance in known.items() if layer >= many}
        assert found.unknown == tuple(range(many))
        assert f"more than can be told in layer{'s' * (many > 1)} 0" in found.line
        assert (" of the other layers" in found.line) == (many < len(own))
    assert ClippedTokens({0: 1e-3, 1: 1e-4, 4: 0.0}).line == (
        "expected clipping in new text like this: 1 token in 10,000 in the median layer, "
        "1 token in 1,000 in the worst, layer 0"
    )
    assert "less than 1 token in 10^12" in ClippedTokens({0: 0.0}).line
    few = "1 token in 1,300 in each"
    assert ClippedTokens({0: 1 / 1313}).line.endswith(f"{few} layer, at most")
    line = ClippedTokens({0: 1 / 1313, 1: 1 / 1313}, (2,)).line
    assert f"{few} of the other layers, at most; more" in line
    channels = derive_scales(stats, Recipe(strategy="channel", export={"formats": ["fp8kv"]}))
    assert clipped_tokens(stats, channels) is None
    old = without(stats, "tail")
    assert clipped_tokens(old, derive_scales(old, Recipe())) is None


def test_the_job_writes_what_the_recipe_asks_and_says_what_to_expect(model, tmp_path):
    directory, out = save_model(model, tmp_path / "tiny"), tmp_path / "out"
    text = ("--dataset", "random", "--samples", 20, "--seq-len", 64)
    done = ran("calibrate", directory, "-o", out, *text, "--headroom", "auto")
    assert "expected clipping in new text like this: 1 token in" in " ".join(done.stdout.split())
    report = report_of(out)
    assert report["recipe"]["headroom"] == "auto"
    assert max(report["clip_chance"].values()) <= CLIP_CHANCE
    old = without(load_stats(out), *PER_TOKEN)  # as those of an engine's cache
    save_stats(old, out / "fp8kv_stats.safetensors")
    again = fp8kv("bake", directory, "--scales", out, "--for", "fp8", "-o", tmp_path / "baked")
    one_line_error(again, "statistics of an engine's cache hold no tails; calibrate for these")


TOKENS = 4096


def of(values):
    return Tail.of(largest(values, values[:, :0]), values.shape[-1], per_head=True)


def exponential(groups=400, tokens=TOKENS, seed=0):
    uniform = torch.rand(groups, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return 5 - uniform.log()


def test_the_largest_of_parts_are_those_of_the_whole_in_any_order():
    values = exponential(3)
    expected = values.sort(descending=True).values[:, :TAIL]
    parts = values.split([1, 5, 1000, TOKENS - 1006], dim=-1)
    for order in ((0, 1, 2, 3), (3, 0, 2, 1)):
        held = values[:, :0]
        for i in order:
            held = largest(held, parts[i])
        assert torch.equal(held, expected)
    whole = Tail.of(expected, TOKENS, per_head=False)  # one group of all heads has the largest of them
    assert torch.equal(whole.top[0], values.flatten().sort(descending=True).values[:TAIL])
    # fewer values than a tail holds are filled up with zeros
    held = largest(torch.tensor([[3.0, 7.0]]), torch.tensor([[5.0]]))
    assert (held.shape, held[0, :4].tolist()) == ((1, TAIL), [7.0, 5.0, 3.0, 0.0])


def test_tokens_that_tie_for_the_largest_are_all_counted_in_any_order():
    """Values that bfloat16 tells apart are no ties; others, of float32, are."""
    values = torch.rand(3, 5000, generator=torch.Generator().manual_seed(0)) * 6
    values[0, ::7] = 7.0 * (1 + 1e-5 * torch.rand(715, generator=torch.Generator().manual_seed(1)))
    values[1, 100:400] = values[2, 9] = 7.0
    values[1, 4000] = 7.0 * (1 + 2**-7)
    counts = [715, 1, 1]
    parts = values.split([150, 850, 3000, 1000], dim=-1)
    for order in ((0, 1, 2, 3), (3, 0, 2, 1)):
        ties = reduce(add_ties, (count_ties(parts[i]) for i in order))
        assert torch.equal(ties, count_ties(values))
        assert ties[:, 1].tolist() == counts
        assert (ties[0, 0].int() << 16).view(torch.float32) == 7.0
    assert torch.equal(count_ties(values.t().contiguous().t()), ties)
    assert count_ties(values.bfloat16())[0].tolist() == ties[0].tolist()


def test_the_chance_is_that_of_an_exponential_distribution_within_its_error():
    tail = of(exponential())
    truth = torch.exp(5 - tail.largest)

    def within_a_factor_of_3(chance):
        return float(((chance / truth).log().abs() < torch.tensor(3.0).log()).double().mean())

    # the count alone says the same of every sample; a largest value's chance varies by e**1.28
    assert within_a_factor_of_3(torch.tensor(1 / TOKENS)) < 0.7
    assert within_a_factor_of_3(tail.chance) > 0.85
    values = exponential(tokens=5 * TOKENS)
    tail, true = of(values[:, :TOKENS]), values[:, TOKENS:].amax(-1)
    reached = tail.reached_in(4 * TOKENS)
    assert torch.all(reached >= tail.largest)
    assert torch.all(tail.reached_in(100 * TOKENS) > reached)
    # the largest of so many is within 1.3 of its mode by one standard deviation
    assert (reached - true).mean().abs() < 0.5
    assert (tail.largest - true).mean() < -1


def test_the_chance_is_counted_below_the_largest_and_falls_by_the_decay_beyond_it():
    tail = of(exponential(5))
    assert (tail.chance_above((tail.top[:, 9] + tail.top[:, 10]) / 2) * TOKENS).tolist() == [10] * 5
    assert torch.all(tail.chance_above(tail.top[:, -1] / 4) <= 1)
    further = tail.chance_above(tail.largest + tail.decay)
    generalised_pareto = (1 + 0.2) ** (-1 / 0.2)  # two roundings of a scale are between both levels
    torch.testing.assert_close(further, tail.chance * generalised_pareto, rtol=1e-4, atol=0)
    # a value that returns is an end: the slope becomes flatter, and the root of nine is taken off
    values = exponential(1)
    tied = values.clone()
    tied[:, :9] = values.amax()
    assert float(of(tied).decay / of(values).decay) > 1
    assert float(of(tied).chance / of(values).chance) < 0.7
    zeros = of(torch.zeros(1, TOKENS, dtype=torch.float64))
    assert (zeros.chance_above(torch.ones(1)).tolist(), zeros.reached_in(TOKENS).tolist()) == ([0], [0])


def test_headroom_is_the_smallest_that_keeps_the_chance_or_refused():
    tails = [of(exponential(3, seed=1)), of(exponential(2, seed=2))]

    def clipped(factor):
        return sum(float(t.chance_above(t.largest * factor).sum()) for t in tails)

    for chance in (1e-4, 1e-6):
        factor = headroom_for(tails, chance)
        assert clipped(factor) <= chance < clipped(factor - 2e-4)
    assert headroom_for([of(exponential(1))], 0.1) == 1.0
    with pytest.raises(InputError, match="1,023 tokens, without .* 1,024 or more"):
        of(exponential(1, tokens=1023))
    of(exponential(1, tokens=1024))
    with pytest.raises(InputError, match="headroom over 16 .* give --headroom a number"):
        headroom_for([Tail.of(torch.linspace(1, 1000, TAIL).flip(0)[None], 2000, per_head=True)], 1e-300)
