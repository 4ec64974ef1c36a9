"""Start `vllm serve` on this CPU: what the plugin says, and what `fp8kv verify --served` says.

check_server.py plugin WHEEL
    Serves hand-made directories with our wheel installed; exit 0 if the line is right for each, and
    only the good ones are served where FP8KV_REQUIRE_SCALES is set; a bad one is where it is not
check_server.py nodes FP8KV WHEEL DIR
    Serves two with VLLM_PLUGINS=fp8kv: `verify --served --served` finds DIR and the same with scales 8 times
    as large apart, and DIR and DIR alike; metrics say the same
check_server.py verify FP8KV TWIN TWIN_CALIBRATED PLAIN_CALIBRATED
    FP8KV is the command, which has an environment of its own. A server of TWIN_CALIBRATED, the twin
    with its scales, must be nearer to them; one of TWIN nearer to 1.0; of PLAIN_CALIBRATED, a model
    that does without, nobody can tell
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from check_live import times_8
from engine import tell
from scale_cases import CASES, write_case
from vllm_process import ENVIRONMENT

Results = Iterator[tuple[str, bool]]
SECONDS = 300
# a plugin of its own: FP8 kernels for CPUs without
HELPER = """
import os, sys
def register():
    sys.path.append(os.environ["INTEROP"])
    import torch_kernels
    if torch_kernels.is_needed():
        torch_kernels.install()
"""
POINTS = "[vllm.general_plugins]\ninterop_helper = interop_helper:register\n"


def install(packages: Path, wheel: str | None = None) -> Path:
    """The helper's plugin, and our wheel without what it depends on."""
    packages.mkdir(parents=True)
    if wheel is not None:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        subprocess.run([*pip, "--target", packages, wheel], check=True)
    (packages / "interop_helper.py").write_text(HELPER)
    # `vllm serve` asks "vllm" for its version and device; the build for CPUs has another name
    for name, entries in (("interop_helper", POINTS), ("vllm", "")):
        about = packages / f"{name}-0.32.0.dist-info"
        about.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0+cpu\n"
        about.joinpath("METADATA").write_text(metadata)
        about.joinpath("entry_points.txt").write_text(entries)
    return packages


@contextmanager
def serving(model: Path, packages: Path, *options: str, **environ: str) -> Iterator[tuple[str | None, Path]]:
    """Serve a model; yields the URL, None if the server ends instead, and its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "INTEROP": str(Path(__file__).parent)}
    own |= {"VLLM_LOGGING_LEVEL": "INFO", "PYTHONPATH": str(packages)}
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--enforce-eager"]
    log = packages / f"{port}.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [*command, *options, "--port", str(port)],
            stdout=out, stderr=out, env={**os.environ, **ENVIRONMENT, **own, **environ},
            cwd=packages,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        yield (url if is_healthy(server, url) else None), log
    finally:
        server.terminate()
        server.wait(60)


def is_healthy(server: "subprocess.Popen[bytes]", url: str) -> bool:
    """Wait until the server answers, or has ended."""
    deadline = time.monotonic() + SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    return False


@dataclass(frozen=True)
class Served:
    """A directory, how it is served, and the line that the plugin must write."""

    name: str
    line: str
    case: str = "one scale per layer, [1]"
    options: tuple[str, ...] = ()
    required: bool = True  # FP8KV_REQUIRE_SCALES
    serves: bool = False


GOOD = "fp8kv: 4 of 4 KV scales in use, FP8 cache"
LACKS = "fp8kv: 2 of 4 KV scales in use, FP8 cache; K has no scale in the files and is at 1.0 in layer 1; V"
HALF = "fp8kv: 2 of 2 KV scales in use, FP8 cache"
PART, SHARDS = "a layer without scales", ("--tensor-parallel-size", "2")
STAGES = ("--pipeline-parallel-size", "2", "--kv-cache-dtype-skip-layers", "0")
SERVED = [
    Served("good", GOOD, serves=True),
    Served("bad", LACKS, PART),
    # one bad directory shows that without the variable a warning is all
    Served("bad, not required", LACKS, PART, required=False, serves=True),
    Served("shards of scales per head", GOOD, "per head, [H, 1, 1]", SHARDS, serves=True),
    Served("two pipeline stages, one of them left in 16 bits", HALF, options=STAGES, serves=True),
]


def check_plugin(wheel: str) -> Results:
    work = Path(tempfile.mkdtemp())
    packages, fingerprint = install(work / "packages", wheel), re.compile(", fingerprint [0-9a-f]{32}")
    small = ["--skip-tokenizer-init", "--max-model-len", "128", "--num-gpu-blocks-override", "8"]
    for i, served in enumerate(SERVED):
        (made,) = [case for case in CASES if case.name == served.case]
        directory, required = write_case(made, work / f"model-{i}"), "1" if served.required else ""
        options = {"FP8KV_REQUIRE_SCALES": required}
        with serving(directory, packages, *small, *served.options, **options) as (url, log):
            serves = url is not None
        said = [fingerprint.sub("", line) for line in log.read_text().splitlines() if "fp8kv: " in line]
        is_right = any(served.line in line for line in said) and serves == served.serves
        yield f"{served.name}: serves {serves}; {said}", is_right


def verify(fp8kv: str, directory: str, *servers: tuple[str | None, Path]) -> tuple[dict, int]:
    """What `verify --served` says of running servers, and its exit status."""
    command = [fp8kv, "verify", directory, "--json"]
    for url, log in servers:
        if url is None:
            sys.exit(f"FAILED: vLLM does not serve: {log.read_text()[-2000:]}")
        command += ["--served", url]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout), done.returncode


def check_verify(fp8kv: str, twin: str, scaled: str, plain: str) -> Results:
    """Serve three directories, one after the other."""
    packages = install(Path(tempfile.mkdtemp(), "packages"))
    options = ["--kv-cache-dtype", "fp8", "--max-model-len", "512", "--num-gpu-blocks-override", "64"]
    cases = ((scaled, scaled, "scales", 0), (twin, scaled, "1.0", 1), (plain, plain, "cannot tell", 1))
    for directory, scales, *expected in cases:
        with serving(Path(directory).resolve(), packages, *options) as server:
            answer, status = verify(fp8kv, scales, server)
        yield f"{directory}: {answer}", [answer["nearer"], status] == expected


def check_nodes(fp8kv: str, wheel: str, directory: str) -> Results:
    """Serve two directories at a time."""
    options = ["--max-model-len", "128", "--num-gpu-blocks-override", "8"]
    variables = {"VLLM_PLUGINS": "fp8kv,interop_helper"}
    for second, expected in ((directory, 0), (times_8(Path(directory)), 1)):
        packages = [install(Path(tempfile.mkdtemp(), "packages"), wheel) for _ in range(2)]
        with (
            serving(Path(directory).resolve(), packages[0], *options, **variables) as prefill,
            serving(Path(second).resolve(), packages[1], *options, **variables) as decode,
        ):
            said, status = verify(fp8kv, directory, prefill, decode)
            with urllib.request.urlopen(f"{prefill[0]}/metrics", timeout=5) as answer:
                metrics = answer.read().decode()
        scales = said["servers"][prefill[0]]
        lines = [f'fp8kv_scales_info{{fingerprint="{scales["fingerprint"]}"}} 1.0']
        lines += [f"fp8kv_scales_in_use {scales['total']}.0", "fp8kv_scales_problems 0.0"]
        is_right = status == expected and scales["total"] > 0 and all(x in metrics for x in lines)
        yield f"{directory} and {second}: {said}", is_right


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    tell({"plugin": check_plugin, "nodes": check_nodes, "verify": check_verify}[what](*arguments))
