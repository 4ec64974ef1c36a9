"""Cases of attention: those that most people have, and a set in which every two settings meet."""

from dataclasses import replace

import torch
from kernel_grid import cover_pairs
from paged import Case

# Of each setting its values, and what they change in a `Case`.
SETTINGS = {
    # three sequences in room for four, one of them empty; parts of several tiles, so that copies
    # run ahead, and of one; more parts than there are tiles
    "lengths": {
        "splits2": {"lengths": (330, 33, 0), "num_splits": 2},
        "splits1": {"lengths": (300, 64, 65), "num_splits": 1},
        "splits16": {"lengths": (600, 1, 129), "num_splits": 16},
        "splits64": {"lengths": (900, 20, 300), "num_splits": 64},
    },
    "head_dim": {f"D{d}": {"head_dim": d} for d in (64, 80, 96, 112, 128, 256)},
    "group": {f"group{g}": {"group": g, "kv_heads": 1 + (g < 7)} for g in (1, 4, 7, 16, 20)},
    "block": {f"block{b}": {"block_size": b} for b in (16, 48, 64, 256)},
    "dtype": {
        "fp16": {"dtype": torch.float16},
        "bf16": {"dtype": torch.bfloat16},
        "fp32": {"dtype": torch.float32},
    },
    "format": {name: {"format": name} for name in ("e4m3fn", "e5m2", "float16")},
    "scales": {s: {"k_scales": s, "v_scales": s} for s in ("head", "tensor", "channel")},
    "center": {"": {}, "center": {"center": True}},
    "query": {"": {}, "q_head": {"q_scale": "head"}, "q_tensor": {"q_scale": "tensor"}},
    "window": {"": {}, "window37": {"window": 37}, "window200": {"window": 200}},
    "softcap": {"": {}, "softcap": {"softcap": 5.0}},
    "sinks": {"": {}, "sinks": {"sinks": True}},
    "padding": {"": {}, "padded": {"starts": (70, 1, 0)}},
}
PLAIN = Case((330, 33, 0), group=4, head_dim=128, block_size=64, num_splits=2)
USUAL = {
    "plain": PLAIN,
    "plain-D64": replace(PLAIN, head_dim=64),
    "plain-bf16-D256": replace(PLAIN, head_dim=256, dtype=torch.bfloat16),
    "plain-q_head": replace(PLAIN, q_scale="head"),
    "plain-float16": replace(PLAIN, format="float16"),
    "plain-channel": replace(PLAIN, k_scales="channel", v_scales="channel"),
    "masked": replace(PLAIN, window=200, softcap=5.0, sinks=True, starts=(3, 7, 0)),
}


def _is_supported(row):
    """Kernels take no FP8 query with K and V in 16 bits, or with scales per channel."""
    return not row["query"] or (row["format"] != "float16" and row["scales"] != "channel")


def _cases():
    for seed, row in enumerate(cover_pairs(SETTINGS, _is_supported, candidates=1000)):
        changes = {}
        for name, value in row.items():
            changes |= SETTINGS[name][value]
        yield "-".join(filter(None, row.values())), Case(**{"lengths": ()} | changes, seed=seed)


CASES = USUAL | dict(_cases())
