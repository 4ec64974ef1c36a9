"""Each mistake below is one that a test must see: the check passes, and fails on the mutant."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cache_model import run_history
from checks import INTERPRETED, assert_attention, assert_rounded, assert_stored
from mutants import SOURCE, copied, mutate
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
SPLIT_EXTEND = {"query_lens": (6, 3), "extend_splits": 3}
EXTEND = {"query_lens": (6, 9), "extend_splits": 1}
KINDS = {"decode": {}, "extend": EXTEND, "split": SPLIT_EXTEND, "dense": EXTEND | {"extend_splits": None}}
CHECKS = {
    f"{kind} {name} {by}": partial(assert_attention, replace(case, **changes), "cpu", (by,))
    for name, case in CASES.items()
    for kind, changes in KINDS.items()
    for by in ("kernel", "reference")
} | {
    "nothing seen": partial(assert_attention, Case((70, 0))),
    "stored": partial(assert_stored, Case((), head_dim=80, center=True, dtype=torch.float32)),
    "rounded": partial(assert_rounded, "e4m3fn"),
    "history": partial(run_history, 1, steps=300),
    "growing history": partial(run_history, 3, steps=300, can_grow=True),
}
ATTEND, DECODE, DENSE = (f"kernels/{name}.py" for name in ("attend", "attention", "dense"))
APPEND, CODEC, TUNING, SPLIT = (f"kernels/{name}.py" for name in ("append_kv", "codec", "tuning", "split"))
REFERENCE, CACHE, STORAGE = "reference.py", "cache.py", "storage.py"
STORED_WHOLE = "tl.store(pointers, out.to(out_ptr.dtype.element_ty),"
LOADED_SLOTS = "tl.load(slot_mapping_ptr + tokens, mask=tokens < num_tokens, other=-1)"
# what is wrong: who sees it, and the file with texts and what replaces each
MUTATIONS = {
    "drops K's scale": ("decode plain kernel", ATTEND,
        ("factor *= tl.load(k_scale_ptr + kv_head * LAYER.k_scales)", "factor *= 1.0")),
    "swaps K and V": ("decode plain kernel", STORAGE,
        ("self.codes.view(torch.int16)", "self.codes.view(torch.int16).flip(0)")),
    "leaves a token of a sequence unwritten": ("extend plain kernel", DECODE,
        (f"{STORED_WHOLE} mask=valid)", f"{STORED_WHOLE} mask=valid & (tokens > 0)[:, None])")),
    "leaves a joined token unwritten": ("split plain kernel", DECODE,
        ("cu_seqlens_ptr + seq + 1):", "cu_seqlens_ptr + seq + 1) - 1:")),
    "leaves the zeros of a sequence without tokens unwritten": ("nothing seen", DECODE,
        (f"{STORED_WHOLE} mask=valid)", f"{STORED_WHOLE} mask=valid & (running_sum > 0)[:, None])")),
    "reads slots of no one": ("decode all kernel", ATTEND,
        ("inside[:, None] & (columns < LAYER.head_dim // 2)[None, :]",
         "(inside | True)[:, None] & (columns < LAYER.head_dim // 2)[None, :]")),
    "reference: ignores left padding": ("extend all reference", REFERENCE,
        ("(columns <= rows) & (columns >= first)", "columns <= rows")),
    "forgets the head group": ("decode plain kernel", DECODE,
        ("heads = kv_head * LAYER.group + rows", "heads = kv_head + rows * LAYER.num_kv_heads")),
    "the centre's score of the unrounded query": ("decode fp8 kernel", ATTEND,
        ("q = decode(codes, LAYER.format, LAYER.hardware).to(tl.float32)", "pass"),
        ("q *= (q_scale * decode_unit(LAYER.format, LAYER.hardware))[:, None]", "pass")),
    "the sink's weight beside others' 2^14": ("decode all kernel", ATTEND,
        ("tl.exp2(WEIGHT_EXPONENT)", "1.0")),
    "forgets the parts' maxima": ("decode plain kernel", DECODE,
        ("partial * tl.exp2(some_maxima - overall)[:, None]", "partial")),
    "parts that leave tiles over": ("decode plain kernel", SPLIT,
        ("tl.cdiv(own_tiles, own_parts)", "own_tiles // own_parts")),
    "parts of one query's window": ("split all kernel", DECODE,
        ("seq_len - query_len + 1 - LAYER.window", "seq_len - LAYER.window")),
    "every query's parts in one place": ("split plain kernel", DECODE,
        ("part_at * max_query_len + tokens", "part_at * max_query_len")),
    "the first head's scale for all": ("dense plain kernel", DENSE,
        ("softmax_scale * scale for", "softmax_scale * scales[0] for")),
    "gathers K for V": ("dense plain kernel", DENSE, ("rows += part * num_blocks", "rows += 0 * num_blocks")),
    "rounds an fp32 query": ("decode fp32 kernel", TUNING,
        ("blocks.k_scales < 2 and dtype != torch.float32", "True")),
    "rounds the weights of an fp32 query": ("extend fp32 kernel", ATTEND,
        ("LAYER.splits_weights", "False")),
    "a token without a slot goes to slot 0": ("stored", APPEND,
        (LOADED_SLOTS, f"tl.where(tokens < num_tokens, tl.maximum({LOADED_SLOTS}, 0), -1)")),
    "rounds halves away from zero": ("rounded", CODEC,
        ("a_bits + ((1 << (SHIFT - 1)) - 1) + ((a_bits >> SHIFT) & 1)",
         "a_bits + (1 << (SHIFT - 1))")),
    "does not saturate": ("rounded", CODEC,
        ("tl.minimum(magnitude.to(tl.float32, bitcast=True), MAX)",
         "magnitude.to(tl.float32, bitcast=True)"),
        ("tl.minimum(tl.where(a < 2.0 ** (1 - BIAS), subnormal, normal), MAX_CODE)",
         "tl.where(a < 2.0 ** (1 - BIAS), subnormal, normal)")),
    "a fork's hashes are its parent's": ("history", CACHE,
        ("list(sequence.digests)", "sequence.digests")),
    "offers tokens after a gap": ("history", CACHE,
        ("tokens is not None and token_ids is not None and len(tokens) == start",
         "tokens is not None and token_ids is not None")),
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
    changed = {file: mutate((SOURCE / file).read_text(), *replacements)}
    with copied(tmp_path, changed) as runtime, pytest.raises(AssertionError):
        CHECKS[check](runtime=runtime)
