"""Cases of attention: a grid of pairs, of which tests run some, and a large grid."""

import random
from dataclasses import replace
from itertools import combinations

import torch
from paged import FORMATS, Case

# every two values of two options meet in one of the cases made of these
PAIRED = {"head_dim": (32, 80, 128), "kv_heads": (2, 1), "group": (1, 3), "block_size": (16, 48, 64)}
PAIRED |= {"dtype": (torch.float16, torch.bfloat16, torch.float32), "format": (*FORMATS, "float16")}
PAIRED |= dict.fromkeys(("k_scales", "v_scales"), ("head", "channel", "tensor"))
PAIRED |= {"center": (False, True), "window": (None, 1, 20), "softcap": (None, 5.0)}
PAIRED |= {"softmax_scale": (None, 0.2), "sinks": (False, True), "q_scale": (None, "head", "tensor")}
PAIRED |= {"starts": (None, (5, 33, 0)), "num_splits": (None, 1, 3)}
PAIRED |= {"query_lens": (None, (3, 1, 0), (0, 9, 0)), "extend_splits": (None, 3)}
LENGTHS = ((70, 33), (31, 64, 0), (1, 65))
# each kills a mutant that those taken before it do not: tests/mutations/kernel_cases.py
KEPT = (0, 1, 3, 5, 7, 8, 10, 16, 21)

# every value of every list occurs, and each meets many of the others
LARGE = {"head_dim": (64, 128, 80, 96, 256, 112, 72, 192), "kv_heads": (2, 1, 3)}
LARGE |= {"group": (1, 4, 2, 7, 3, 8, 16), "block_size": (16, 64, 32, 48, 128, 256)}
LARGE |= {"dtype": (torch.float16, torch.float32, torch.float16, torch.bfloat16), "format": FORMATS}
LARGE |= {"k_scales": ("head", "channel", "tensor"), "v_scales": ("head", "tensor", "channel", "head")}
LARGE |= {"center": (False, True, False, False, True), "window": (None, 1, None, 16, 37, None, 64, 500)}
LARGE |= {"softcap": (None, 5.0, None, None, 30.0), "softmax_scale": (None, None, None, 0.2)}
LARGE |= {"sinks": (False, True, False), "q_scale": (None, "head", None, None, "tensor")}
LARGE |= {"num_splits": (None, 3, 1, 2, 8, 20)}
LARGE_CASES = 80


def paired_cases():
    for number, options in enumerate(cover_pairs(PAIRED, _is_supported)):
        lengths = LENGTHS[number % len(LENGTHS)]
        limited = {name: options[name] for name in ("starts", "query_lens") if options[name]}
        limited = {name: tuple(map(min, values, lengths)) for name, values in limited.items()}
        yield Case(lengths, seed=number, **options | limited)


def cover_pairs(values, is_supported, candidates=100):
    """Yield supported options, a value of each list, such that every two values meet in some."""
    rng = random.Random(0)
    drawn = ({name: rng.choice([*some]) for name, some in values.items()} for _ in range(1000))
    drawn = [options for options in drawn if is_supported(options)]
    missing = set().union(*map(_pairs, drawn))
    while missing:
        some = rng.sample(drawn, min(candidates, len(drawn)))
        options = max(some, key=lambda options: len(missing & _pairs(options)))
        missing -= _pairs(options)
        yield options


def _is_supported(options):
    takes_out = options["k_scales"] != "channel" and options["format"] != "float16"
    splits = options["extend_splits"] is None or options["query_lens"] is not None
    return (takes_out or options["q_scale"] is None) and splits


def _pairs(options):
    return {frozenset(pair) for pair in combinations(options.items(), 2)}


def large_grid():
    """Seeded: each option walks through its own list in an order of its own."""
    rng, columns = random.Random(0), {}
    for name, values in LARGE.items():
        rounds = [rng.sample(values, len(values)) for _ in range(-(-LARGE_CASES // len(values)))]
        columns[name] = [value for row in rounds for value in row][:LARGE_CASES]
    for i in range(LARGE_CASES):
        options = {name: column[i] for name, column in columns.items()}
        if options["q_scale"] is not None and options["k_scales"] == "channel":
            options["k_scales"] = "head"  # a scale per channel cannot be taken out
        yield _with_ragged_lengths(Case((), seed=i, **options), rng, extends=i % 2 == 1)


def _with_ragged_lengths(case, rng, *, extends):
    """Three ragged sequences: empty ones, single tokens, ends just before and after a block."""
    edge = case.block_size * rng.randint(1, max(1, 128 // case.block_size))
    choices = (0, 1, edge - 1, edge, edge + 1, 63, 64, 65, rng.randint(2, 150))
    lengths = tuple(rng.choice(choices) for _ in range(3))
    starts = tuple(rng.randint(0, n) for n in lengths) if rng.random() < 0.4 else None
    # few queries per sequence, because the oracle takes them one by one
    queries = tuple(rng.choice((0, 1, min(n, 9), min(n, 40))) if n else 0 for n in lengths)
    return replace(case, lengths=lengths, starts=starts, query_lens=queries if extends else None)


def name_of(case):
    kind = "decode" if case.query_lens is None else "extend" if case.extend_splits is None else "split"
    return f"{case.seed}-{kind}-D{case.head_dim}-G{case.group}-B{case.block_size}-{case.format}"
