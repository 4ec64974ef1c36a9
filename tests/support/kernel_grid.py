"""Cases of attention: a grid of pairs, of which tests run some."""

import random
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
# each kills a mutant that those taken before it do not
KEPT = (0, 1, 3, 5, 7, 8, 10, 16, 21)


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


def name_of(case):
    kind = "decode" if case.query_lens is None else "extend" if case.extend_splits is None else "split"
    return f"{case.seed}-{kind}-D{case.head_dim}-G{case.group}-B{case.block_size}-{case.format}"
