"""`make compile-kernels`: it passes what is good and refuses each kind of bad kernel."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import mutate

ROOT = Path(__file__).parent.parent.parent
TARGETS = ("sm_80", "sm_90", "gfx942")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux only")


def compile_kernels(root, *arguments):
    """Run the script on the kernels under `root`."""
    command = [sys.executable, str(root / "benchmarks" / "compile_kernels.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)


def _rewritten(source, *replacement):
    tree = ast.parse(source)
    mutate(tree, *replacement)
    return ast.unparse(tree)


def _retuned(source, name, old, new):
    table = json.loads(source)
    rows = [row for rows in table.values() for row in rows if row.get(name) in old]
    assert rows, (name, old)
    for row in rows:
        row[name] = new
    return json.dumps(table)


def test_kernels_pass_on_targets_of_every_kind():
    done = compile_kernels(
        ROOT, "--target", *TARGETS, "--variant", "plain-64", "--kernel", "decode", "append_kv"
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    titles = [line.partition(":")[0] for line in lines]
    assert [title for title in titles if title in TARGETS] == list(TARGETS)
    for kernel in ("append_kv", "decode"):
        rows = [line for line in lines if line.startswith(f"{kernel} ")]
        assert [row.split()[-1] for row in rows] == ["ok"] * len(TARGETS), kernel


ROUNDED = "rounded = weights.to(tl.float16)"
WAIT, MAXIMUM = "wait_for_previous(LAYER.overlaps)", "overall = tl.max(maxima, 0)"
TILE = "2048 // triton.next_power_of_2(head_dim)"
# arguments: what is wrong in which file, and what is found
BAD = {
    "--target sm_89 --variant plain-128 --kernel decode append_kv": (
        [
            ("attend.py", ROUNDED, f"{ROUNDED}\neven = even * 2.0"),
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
            ("decode.py", WAIT, "pass"),
            ("decode.py", MAXIMUM, f"{WAIT}\n{MAXIMUM}"),
            ("decode.py", "let_next_start(LAYER.overlaps)", "pass"),
        ],
        [
            "decode_kernel plain-64 sm_90: the reduce cannot start before decode has ended",
            "reduce_kernel plain-64 sm_90: the reduce reads parts before it waits",
        ],
    ),
    "--target sm_100 --variant plain-64 --kernel reduce": (
        [("decode.py", WAIT, "'wait_for_previous('")],
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
        change = _retuned if path.suffix == ".json" else _rewritten
        path.write_text(change(path.read_text(), *replacement))
    done = compile_kernels(tmp_path, *arguments.split())
    assert done.returncode == 1
    for finding in findings:
        assert re.search(f"^{finding}", done.stderr, re.MULTILINE), finding
