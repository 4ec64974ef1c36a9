"""`make compile-kernels` refuses bad kernels; what limits one; a second launch does not go through Triton."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import compiled_before
import pytest
import torch
from kernels.bound import hottest_loop, parse, predict, tiles_in_flight
from kernels.offline import Compiled
from kernels.processors import PROCESSORS
from mutants import mutate

from fp8kv_runtime.storage import KVBlocks

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux only")


def compile_kernels(root, *arguments):
    command = [sys.executable, str(root / "benchmarks" / "compile_kernels.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)


def _change(path, what, old, *new):
    """A module as `mutate` does, or rows of a table: `what` that is one of `old`."""
    source = path.read_text()
    if path.suffix == ".py":
        path.write_text(mutate(source, (what, old)))
        return
    table = json.loads(source)
    rows = [row for rows in table.values() for row in rows if row.get(what) in old]
    assert rows, (what, old)
    for row in rows:
        (row[what],) = new
    path.write_text(json.dumps(table))


def test_kernels_pass_on_targets_of_every_kind():
    targets = ["sm_80", "sm_90", "gfx942"]
    chosen = ("--target", *targets, "--variant", "plain-64", "--kernel", "decode", "append_kv")
    done = compile_kernels(ROOT, *chosen)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [title for line in lines if (title := line.partition(":")[0]) in targets] == targets
    for kernel in ("append_kv", "decode"):
        assert [line.split()[-1] for line in lines if line.startswith(f"{kernel} ")] == ["ok"] * 3, kernel


ROUNDED = "rounded = weights.to(tl.float16)"
WAIT, MAXIMUM = "wait_for_previous(LAYER.overlaps)", "overall = tl.max(maxima, 0)"
TILE = "2048 // next_power_of_2(head_dim)"
# arguments: what is wrong in which file, and what is found
BAD = {
    "--target sm_89 --variant plain-128 --kernel decode append_kv": (
        [
            ("attend.py", ROUNDED, f"{ROUNDED}; even = even * 2.0"),
            ("tuning.json", "num_stages", [5], 33),  # more tiles in flight than an L4 has room for
            ("launch.py", "blocks.format in target.decoded", "False"),
            ("launch.py", "blocks.format in target.encoded", "True"),  # it rounds twice on this target
        ],
        [
            "decode_kernel plain-128 sm_89: K or V is multiplied in the loop: arith.mulf",
            "decode_kernel plain-128 sm_89: [0-9]+ bytes of shared memory; .*101376",
            "decode_kernel plain-128 sm_89: no instruction to decode e4m3fn",
            "append_kv_kernel plain-128 sm_89: cvt.* to encode e4m3fn",
        ],
    ),
    "--target sm_90 gfx950 --variant plain-24 plain-32 --kernel decode append_kv": (
        [
            ("variants.py", "(64, 80, 96, 128, 256)", "(24, 32)"),  # rows that are no multiple of 16 bytes
            ("tuning.py", TILE, TILE.replace("2048", "512")),  # threads with less than 16 codes to store
        ],
        [
            r"decode_kernel plain-24 sm_90: load of K or V of \d bytes; allowed: 16",
            r"decode_kernel plain-24 gfx950: load of K or V of \d bytes; allowed: 16",
            r"append_kv_kernel plain-32 sm_90: store of K or V of \d bytes; allowed: 16",
            r"append_kv_kernel plain-32 gfx950: store of K or V of \d bytes; allowed: 16",
        ],
    ),
    "--target sm_80 gfx942 --variant plain-64 --kernel extend": (
        [("tuning.json", "rows", [64, 128], 512)],  # accumulators that no register file holds
        [
            r"extend_kernel plain-64 sm_80: spills \d+ accesses to the stack in a loop",
            r"extend_kernel plain-64 gfx942: spills \d+ vector registers",
        ],
    ),
    "--target sm_90 --variant plain-64 --kernel decode reduce": (
        [  # the parts' maxima read too early, and nothing that lets the reduce start
            ("attention.py", WAIT, "pass"),
            ("attention.py", MAXIMUM, f"{WAIT}; {MAXIMUM}"),
            ("attention.py", "let_next_start(LAYER.overlaps and not WHOLE)", "pass"),
        ],
        [
            "decode_kernel plain-64 sm_90: the reduce cannot start before decode has ended",
            "reduce_kernel plain-64 sm_90: the reduce reads parts before it waits",
        ],
    ),
    "--target sm_100 --variant plain-64 --kernel reduce": (
        [("attention.py", WAIT, "'wait_for_previous('")],
        ["reduce_kernel plain-64 sm_100: the reduce does not wait for decode"],
    ),
    "--target sm_80 --variant plain-64 --kernel decode": (
        [("attend.py", ROUNDED, "rounded = missing")],
        ["decode_kernel plain-64 sm_80: does not compile: .*missing"],
    ),
}


@pytest.mark.nightly  # each compiles in a process of its own
@pytest.mark.parametrize("arguments", BAD)
def test_slow_kernels_are_refused(arguments, tmp_path):
    replacements, findings = BAD[arguments]
    for package in ("fp8kv_runtime", "benchmarks"):
        shutil.copytree(ROOT / package, tmp_path / package)
    for file, *replacement in replacements:
        (path,) = tmp_path.glob(f"*/kernels/{file}")
        _change(path, *replacement)
    done = compile_kernels(tmp_path, *arguments.split())
    assert done.returncode == 1
    for finding in findings:
        assert re.search(f"^{finding}", done.stderr, re.MULTILINE), finding


# code whose numbers are known
SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E R2, [R4.64] ;
        /*0020*/                   LDGSTS.E.BYPASS.LTC128B.128 [R3], [R6.64] ;
        /*0030*/                   F2FP.F16.E4M3.UNPACK_B R9, R8 ;
        /*0040*/                   HMMA.16816.F32 R12, R8, R10, R12 ;
        /*0050*/              @!P0 BRA 0x20 ;
        /*0060*/                   STG.E.64 [R4.64], R12 ;
        /*0070*/                   BRA 0x70 ;
"""
PTX = """
$L__BB0_2:
 cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
 cp.async.commit_group;
 cp.async.commit_group;
 cp.async.wait_group 4;
 @%p3 bra $L__BB0_2;
"""
GCN = """
	s_load_dwordx4 s[0:3], s[4:5], 0x0
.LBB0_1:
	buffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen
	v_cvt_pk_f32_fp8_e32 v[6:7], v0
	v_mfma_f32_16x16x16_f16 a[0:3], v[0:1], v[2:3], a[0:3]
	s_cbranch_scc1 .LBB0_1
	s_endpgm
"""


def compiled(code, asm="", registers=80, shared_memory=0, num_warps=4):
    return Compiled(asm, code, "", num_warps, shared_memory, registers, {})


def test_bytes_cycles_matrix_products_and_loops_are_read():
    code = parse(compiled(SASS))
    assert [each.moved for each in code] == [0, 4, 16, 0, 0, 0, 8, 0]
    assert [each.cycles for each in code] == [1, 1, 1, 2, 1, 1, 1, 1]
    assert [each.flops for each in code] == [0] * 4 + [2 * 16 * 8 * 16] + [0] * 3
    assert [each.jumps_to for each in code] == [None] * 5 + [2, None, None]
    assert hottest_loop(code) == code[2:6]
    without = parse(compiled(SASS.replace("0x20", "0x60")))
    assert hottest_loop(without) == without, "code without a loop counts whole"
    code = parse(compiled(GCN))
    assert [each.moved for each in code] == [0, 16, 0, 0, 0, 0]
    assert [each.cycles for each in code] == [1, 1, 4, 1, 1, 1]
    assert (code[3].flops, hottest_loop(code)) == (2 * 16**3, code[1:5])
    assert (tiles_in_flight(PTX), tiles_in_flight("")) == (2, 1), "groups that are waited for last"


def test_the_slowest_of_four_is_the_limit():
    h200 = PROCESSORS["sm_90"]
    # an iteration of a warp moves 512 bytes and takes five cycles: far less than memory does
    bound = predict(compiled(SASS, PTX), h200)
    assert (bound.programs, bound.kb_in_flight) == (6, 6 * 4 * 512 * 2 / 1024)
    assert bound.cycles_per_kb == 1024 * 5 / 4 / 512
    assert bound.kb_needed == pytest.approx(4.8e12 * 0.8e-6 / 132 / 1024)
    assert (bound.limit, bound.of_memory) == ("latency", bound.kb_in_flight / bound.kb_needed)
    # two hundred conversions more
    conversions = "".join(f"        /*1{i:03x}*/ F2FP R1, R1 ;\n" for i in range(200))
    busy = SASS.replace("        /*0040*/", conversions + "        /*0040*/")
    bound = predict(compiled(busy, PTX), h200)
    assert bound.limit == "issue"
    memory, issue = 512 / h200.bytes_per_cycle, (5 + 400) / 4
    assert bound.of_memory == pytest.approx(memory / issue)


def test_what_became_worse_is_found(tmp_path):
    file = tmp_path / "compiled.json"
    assert compiled_before.read(file) == {}
    good, fewer = (predict(compiled(SASS, PTX, registers=n), PROCESSORS["sm_90"]) for n in (80, 128))
    compiled_before.write({"decode": vars(good)}, file)
    before = compiled_before.read(file)
    assert compiled_before.worse("decode", good, before) == []
    assert compiled_before.worse("another", good, before) == []
    found = compiled_before.worse("decode", fewer, before)
    assert [each.found for each in found] == ["4 programs at once", "56% left by latency"]
    # by another compiler: nothing is compared
    file.write_text(json.dumps(json.loads(file.read_text()) | {"triton": "0"}))
    assert compiled_before.read(file) == {}


KERNELS = ["decode_kernel", "reduce_kernel", "decode_kernel", "append_kv_kernel"]


@pytest.fixture(scope="module")
def found():
    """What `absent_gpus.py` found, by the names of its functions."""
    command = [sys.executable, str(ROOT / "tests/support/absent_gpus.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_second_launch_is_the_first_and_one_of_other_alignment_has_a_kernel_of_its_own(found):
    assert {*found["twice"]} == {"plain-64", "float16-64"}
    for variant in found["twice"].values():
        calls = variant["launched"]
        first, second, third = (calls[4 * i : 4 * i + 4] for i in range(3))
        assert ([name for name, *_ in first], second) == (KERNELS, first)
        assert [arguments for *_, arguments in third] == [arguments for *_, arguments in first]
        # the first time, and what the third needs: reduce does not read the query
        assert variant["by triton"] == [*KERNELS, "decode_kernel", "decode_kernel"]
        differ = [before[1] != after[1] for before, after in zip(second, third, strict=True)]
        assert differ == [True, False, True, False]


def test_layers_that_need_other_kernels_are_told_apart():
    def told_apart(block_size=4, **others):
        one = torch.ones(1)
        shape = {"num_kv_heads": 1, "head_dim": 8, "k_scale": one, "v_scale": one}
        return KVBlocks.empty(1, block_size, **shape, **others).specialization

    assert told_apart() == told_apart(block_size=8)
    assert told_apart() != told_apart(block_size=3), "V has another alignment than K"
    for changes in ({"k_center": torch.zeros(1, 8)}, {"count": True}, {"dtype": torch.float16}):
        assert told_apart() != told_apart(**changes), changes


def test_every_gpu_is_current_where_its_query_is_and_has_kernels_of_its_own(found):
    calls = found["on_devices"]  # with tensors on the current GPU, on another, and on that when it is current
    for call, gpu in zip(calls, (0, 1, 1), strict=True):
        assert {name for name, *_ in call["seen"]} == {*KERNELS, "empty", "empty_like"}
        assert {at for _, at, *_ in call["seen"]} == {gpu}
        assert {stream for _, _, stream, _ in (e for e in call["seen"] if len(e) == 4)} == {gpu}
    # only where it differs, and then back: three launchers twice, of which one in two ways; a refused call
    assert [call["entered"] for call in calls] == [[], [1] * 9, []]
    assert [call["after"] for call in calls] == [0, 0, 1]
    first, second, again = ({e[3] for e in call["seen"] if len(e) == 4} for call in calls)
    assert len(first) == len(second) == 6  # decode and reduce for extend in parts too
    assert not first & second
    assert again == second


def test_growing_batches_and_tables_compile_little(found):
    # for 1, up to 32 and more sequences: extend in parts, and decode but for one tile, which is no parts
    counts = {name: each["compiled"] for name, each in found["growing"].items()}
    assert counts == dict(zip(KERNELS, (7, 5, 7, 1), strict=True))
    assert all(each["asked"] == each["compiled"] for each in found["growing"].values())
