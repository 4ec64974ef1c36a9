"""Each mistake below is one that a test must see: the check passes, and fails on the mutant."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cache_model import run_history
from checks import INTERPRETED, assert_attention, assert_rounded, assert_stored
from mutants import copied, mutated
from paged import Case

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="a GPU has instructions for part of what is mutated"),
    # NaN and Inf are among the inputs
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

# the longest sequence first: a mutant that takes its block table for another's reads what exists
PLAIN = Case((70, 33), group=3, head_dim=80, num_splits=3)
ALL = replace(PLAIN, window=40, softcap=5.0, sinks=True, starts=(3, 7), center=True, block_size=64)
CASES = {
    "plain": PLAIN,
    "all": ALL,
    "fp8": replace(ALL, q_scale="head", window=None),
    "channel": replace(PLAIN, k_scales="channel", v_scales="channel"),
    "fp32": replace(PLAIN, dtype=torch.float32),
    "float16": replace(ALL, format="float16"),
}
EXTEND = {"query_lens": (6, 9)}
SPLIT_EXTEND = {"query_lens": (6, 3), "extend_splits": 3}


def attention_checks():
    for name, case in CASES.items():
        for kind, changes in (("decode", {}), ("extend", EXTEND), ("split", SPLIT_EXTEND)):
            for implementation in ("kernel", "reference"):
                yield (
                    f"{kind} {name} {implementation}",
                    partial(assert_attention, replace(case, **changes), "cpu", (implementation,)),
                )


STORED = Case((), head_dim=80, center=True, dtype=torch.float32)
CHECKS = {
    **dict(attention_checks()),
    "stored": partial(assert_stored, STORED),
    "rounded": partial(assert_rounded, "e4m3fn"),
    "rounded fnuz": partial(assert_rounded, "e4m3fnuz"),
    "history": partial(run_history, 1, steps=300),
    "growing history": partial(run_history, 3, steps=300, can_grow=True),
}

ATTEND, DECODE, EXTEND_PY = (f"kernels/{name}.py" for name in ("attend", "decode", "extend"))
APPEND, CODEC, TUNING = (f"kernels/{name}.py" for name in ("append_kv", "codec", "tuning"))
SPLIT = "kernels/split.py"
REFERENCE, CACHE, STORAGE = "reference.py", "cache.py", "storage.py"
NO_Q_ROUNDING = (
    ("q = decode(codes, LAYER.format, LAYER.hardware).to(tl.float32)", "pass"),
    ("q *= (q_scale * decode_unit(LAYER.format, LAYER.hardware))[:, None]", "pass"),
)
STORED_OUTPUT = "tl.store(out_ptr + out_at + channels, out.to(out_ptr.dtype.element_ty), mask={})"
LOADED_SLOTS = "tl.load(slot_mapping_ptr + tokens, mask=tokens < num_tokens, other=-1)"

# what is wrong: who sees it, and the file with expressions or statements and what replaces each,
# as syntax trees; a third name says in which function
MUTATIONS = {
    # scales
    "drops K's scale": ("decode plain kernel", ATTEND,
        ("factor *= tl.load(k_scale_ptr + kv_head * LAYER.k_scales)", "factor *= 1.0")),
    "one K scale for all heads": ("extend plain kernel", ATTEND,
        ("tl.load(k_scale_ptr + kv_head * LAYER.k_scales)", "tl.load(k_scale_ptr)")),
    "drops K's channel scales": ("decode channel kernel", ATTEND,
        ("q = q * scale[None, :]", "q = q * 1.0")),
    "drops V's scale in extend": ("extend channel kernel", EXTEND_PY,
        ("(scale * decode_unit(LAYER.format, LAYER.hardware))",
         "(scale * 0 + decode_unit(LAYER.format, LAYER.hardware))")),
    "V's scale of another head": ("decode plain kernel", DECODE,
        ("head // LAYER.group", "head % (LAYER.num_heads // LAYER.group)")),
    "V has K's scale": ("decode plain kernel", DECODE,
        ("blocks.v_scale", "blocks.k_scale")),
    "one query scale for all heads": ("decode fp8 kernel", ATTEND,
        ("q_scale_ptr + heads * LAYER.q_scales", "q_scale_ptr + heads * 0")),
    "forgets the decode unit of Q Kᵀ": ("decode plain kernel", ATTEND,
        ("factor *= power_of_two(exponent) * decode_unit(LAYER.format, LAYER.hardware)",
         "factor *= power_of_two(exponent)")),
    "swaps K and V": ("decode plain kernel", STORAGE,
        ("codes[0], codes[1]", "codes[1], codes[0]", "loaded")),
    "reference: V has K's scale": ("decode plain reference", STORAGE,
        ("value.expand(shape)", "key.expand(shape)")),
    # what is visible
    "window one too short": ("decode all kernel", DECODE,
        ("seq_len - query_len + 1 - LAYER.window", "seq_len - query_len + 2 - LAYER.window")),
    "causal mask one too late": ("extend plain kernel", ATTEND,
        ("(positions[None, :] <= rows_at[:, None])",
         "(positions[None, :] <= rows_at[:, None] + 1)")),
    "queries at the beginning": ("extend plain kernel", EXTEND_PY,
        ("rows_at = seq_len - query_len + tokens", "rows_at = tokens")),
    "skips the last partial block": ("decode plain kernel", DECODE,
        ("tl.minimum(seq_len, origin + (split + 1) * part)",
         "tl.minimum(seq_len // LAYER.block_size * LAYER.block_size, origin + (split + 1) * part)")),
    "ignores left padding in decode": ("decode all kernel", DECODE,
        ("first = tl.load(seq_starts_ptr + seq)", "first = 0")),
    "ignores left padding in extend": ("extend all kernel", EXTEND_PY,
        ("first = tl.load(seq_starts_ptr + seq)", "first = 0")),
    "reads slots of no one": ("decode all kernel", ATTEND,
        ("inside[:, None] & (columns < LAYER.head_dim // 2)[None, :]",
         "(inside | True)[:, None] & (columns < LAYER.head_dim // 2)[None, :]")),
    "reads slots of no one, in float16": ("decode float16 kernel", ATTEND,
        ("inside[:, None] & (columns < LAYER.head_dim)[None, :]",
         "(inside | True)[:, None] & (columns < LAYER.head_dim)[None, :]")),
    "float16: the lower channels twice": ("extend float16 kernel", ATTEND,
        ("ptr + at + LAYER.block_d // 2", "ptr + at")),
    "float16: channels past the head": ("decode float16 kernel", ATTEND,
        ("columns < LAYER.head_dim - LAYER.block_d // 2", "columns < LAYER.head_dim")),
    "float16: halves in the wrong place": ("extend float16 kernel", ATTEND,
        ("both = tl.permute(tl.join(first, second), [0, 2, 1])",
         "both = tl.permute(tl.join(second, first), [0, 2, 1])")),
    "reference: ignores left padding": ("extend all reference", REFERENCE,
        ("(columns <= rows) & (columns >= first)", "columns <= rows")),
    # which block, which head
    "the block before": ("decode plain kernel", ATTEND,
        ("block_table_ptr + positions // LAYER.block_size",
         "block_table_ptr + tl.maximum(positions - 1, 0) // LAYER.block_size")),
    "always the first block": ("decode all kernel", ATTEND,
        ("tl.load(block_table_ptr + start // LAYER.block_size)", "tl.load(block_table_ptr)")),
    "the first sequence's blocks": ("extend plain kernel", EXTEND_PY,
        ("block_tables_ptr + seq * stride_block_tables", "block_tables_ptr")),
    "forgets the head group": ("decode plain kernel", DECODE,
        ("heads = kv_head * LAYER.group + rows", "heads = kv_head + rows * LAYER.num_kv_heads")),
    "forgets the head group in extend": ("extend plain kernel", ATTEND,
        ("kv_head * LAYER.group + pairs % LAYER.group", "kv_head + pairs % LAYER.group")),
    "reference: forgets the head group": ("decode plain reference", REFERENCE,
        ("x.repeat_interleave(group, 0)", "x.repeat(group, 1, 1)")),
    # softmax
    "drops the sink": ("decode all kernel", DECODE,
        ("split == 0", "split < 0")),
    "counts the sink in every part": ("decode all kernel", DECODE,
        ("split == 0", "split >= 0")),
    "the centre's score of the unrounded query": ("decode fp8 kernel", ATTEND, *NO_Q_ROUNDING),
    "the sink's weight beside others' 2^14": ("decode all kernel", ATTEND,
        ("tl.exp2(WEIGHT_EXPONENT)", "1.0")),
    "forgets to correct the sum": ("decode plain kernel", ATTEND,
        ("running_sum * correction", "running_sum")),
    "forgets to correct odd channels": ("extend plain kernel", ATTEND,
        ("odd_acc * correction[:, None]", "odd_acc")),
    "forgets the parts' maxima": ("decode plain kernel", DECODE,
        ("partial * tl.exp2(some_maxima - overall)[:, None]", "partial")),
    "forgets the last part": ("decode plain kernel", DECODE,
        ("inside = some < num_parts", "inside = some < num_parts - 1")),
    "parts that leave tiles over": ("decode plain kernel", SPLIT,
        ("tl.cdiv(own_tiles, own_parts)", "own_tiles // own_parts")),
    "parts of one query's window": ("split all kernel", DECODE,
        ("seq_len - query_len + 1 - LAYER.window", "seq_len - LAYER.window")),
    "the part before the window of a tile's last query": ("split all kernel", DECODE,
        ("tl.min(rows_at, 0) - LAYER.window + 1", "tl.max(rows_at, 0) - LAYER.window + 1")),
    "queries of a part at the beginning": ("split plain kernel", DECODE,
        ("rows_at = seq_len - query_len + tokens", "rows_at = tokens")),
    "every query's parts in one place": ("split plain kernel", DECODE,
        ("part_at * max_query_len + tokens", "part_at * max_query_len")),
    "joins the first query's parts": ("split plain kernel", DECODE,
        ("at * rows + token", "at * rows")),
    "joins parts of other queries": ("split plain kernel", DECODE,
        ("stride = rows * LAYER.num_heads", "stride = LAYER.num_heads")),
    "rounds an fp32 query": ("decode fp32 kernel", TUNING,
        ("blocks.k_scales < 2 and dtype != torch.float32", "True")),
    "rounds the weights of an fp32 query": ("extend fp32 kernel", ATTEND,
        ("LAYER.splits_weights", "False")),
    "leaves a channel unwritten": ("decode plain kernel", DECODE,
        (STORED_OUTPUT.format("in_head"), STORED_OUTPUT.format("in_head & (channels != 7)"))),
    # storing
    "a token without a slot goes to slot 0": ("stored", APPEND,
        (LOADED_SLOTS, f"tl.where(tokens < num_tokens, tl.maximum({LOADED_SLOTS}, 0), -1)")),
    "reference: a token without a slot goes to the last": ("stored", REFERENCE,
        ("(slot_mapping < 0).any()", "False")),
    "stores K without its centre": ("stored", APPEND, ("x - center[None, :]", "x")),
    "reference: stores K without its centre": ("stored", REFERENCE,
        ("x[0] -= blocks.k_center", "x[0] -= 0")),
    "counts zeros as underflowed": ("stored", APPEND,
        ("(tl.abs(scaled) <= half_smallest(FORMAT)) & (x != 0)",
         "tl.abs(scaled) <= half_smallest(FORMAT)")),
    "counts what is not finite as saturated": ("stored", APPEND,
        ("(both & 0xFFFF) - not_finite", "(both & 0xFFFF)")),
    "rounds halves away from zero": ("rounded", CODEC,
        ("a_bits + ((1 << (SHIFT - 1)) - 1) + ((a_bits >> SHIFT) & 1)",
         "a_bits + (1 << (SHIFT - 1))")),
    "does not saturate": ("rounded", CODEC,
        ("tl.minimum(magnitude.to(tl.float32, bitcast=True), MAX)",
         "magnitude.to(tl.float32, bitcast=True)"),
        ("tl.minimum(tl.where(a < 2.0 ** (1 - BIAS), subnormal, normal), MAX_CODE)",
         "tl.where(a < 2.0 ** (1 - BIAS), subnormal, normal)")),
    "no subnormals": ("rounded", CODEC,
        ("tl.where(a < 2.0 ** (1 - BIAS), subnormal, normal)",
         "tl.where(a < 2.0 ** (1 - BIAS), 0, normal)")),
    "NaN becomes 0": ("rounded", CODEC,
        ("code = tl.where(is_nan, 0x7F, code) | sign", "code = code | sign")),
    "negative zero where there is none": ("rounded fnuz", CODEC,
        ("tl.where(code == 0, 0, code | sign)", "code | sign")),
    # the cache
    "copies K only": ("history", STORAGE,
        ("codes[:, target] = codes[:, source]", "codes[0, target] = codes[0, source]")),
    "hashes ignore the past": ("history", CACHE, ("digest + block", "block")),
    "a fork's hashes are its parent's": ("history", CACHE,
        ("list(sequence.digests)", "sequence.digests")),
    "leaves no token to run": ("history", CACHE, ("(token_ids or [])[:-1]", "(token_ids or [])")),
    "offers tokens after a gap": ("history", CACHE,
        ("tokens is not None and token_ids is not None and len(tokens) == start",
         "tokens is not None and token_ids is not None")),
    "runs out half-way": ("history", CACHE, ("sum(needed) + copies", "0")),
    "loses V when it grows": ("growing history", STORAGE,
        ("new[:, : self.num_blocks] = old", "new[0, : self.num_blocks] = old[0]")),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({mutation[0] for mutation in MUTATIONS.values()}))
def test_the_check_passes_on_a_copy_without_a_mutation(name, tmp_path):
    with copied(tmp_path) as runtime:
        CHECKS[name](runtime=runtime)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_check_fails_on_the_mutant(name, tmp_path):
    check, file, *replacements = MUTATIONS[name]
    changed = {file: mutated(file, *replacements)}
    with copied(tmp_path, changed) as runtime, pytest.raises(AssertionError):
        CHECKS[check](runtime=runtime)
