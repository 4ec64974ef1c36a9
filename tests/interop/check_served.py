"""Ask vLLM servers whether they use the scales: `fp8kv verify --served` must be right of each.

check_served.py FP8KV TWIN TWIN_CALIBRATED PLAIN_CALIBRATED

FP8KV is the command, which has an environment of its own. A server of TWIN_CALIBRATED, the twin
with its scales, must be nearer to them; one of TWIN nearer to 1.0; of PLAIN_CALIBRATED, a model
that does without, nobody can tell.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine import ENVIRONMENT

SECONDS = 300
OPTIONS = ["--kv-cache-dtype", "fp8", "--enforce-eager", "--max-model-len", "512"]
# a plugin of vLLM's: FP8 kernels for CPUs without
HELPER = """
import os, sys
def register():
    sys.path.append(os.environ["INTEROP"])
    import torch_kernels
    if torch_kernels.is_needed():
        torch_kernels.install()
"""
POINTS = "[vllm.general_plugins]\ninterop_helper = interop_helper:register\n"


def main() -> None:
    """Serve three directories, one after the other."""
    fp8kv, twin, scaled, plain = sys.argv[1:]
    packages = install(Path(tempfile.mkdtemp()))
    cases = ((scaled, scaled, "scales"), (twin, scaled, "1.0"), (plain, plain, "cannot tell"))
    wrong = 0
    for served, scales, expected in cases:
        with serving(served, packages) as url:
            command = [fp8kv, "verify", scales, "--served", url, "--json"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout)
        status = 0 if expected == "scales" else 1
        is_right = (found["nearer"], done.returncode) == (expected, status)
        wrong += not is_right
        print(f"{'OK' if is_right else 'FAILED'} {served}: {found}", flush=True)
    sys.exit(1 if wrong else 0)


def install(packages: Path) -> Path:
    """The helper's plugin, and the name by which `vllm serve` asks for its version."""
    (packages / "interop_helper.py").write_text(HELPER)
    for name, entries in (("interop_helper", POINTS), ("vllm", "")):
        about = packages / f"{name}-0.32.0.dist-info"
        about.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0+cpu\n"
        about.joinpath("METADATA").write_text(metadata)
        about.joinpath("entry_points.txt").write_text(entries)
    return packages


@contextmanager
def serving(directory: str, packages: Path) -> Iterator[str]:
    """Serve a directory with an FP8 cache; yields the URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "INTEROP": str(Path(__file__).parent)}
    environment = {**os.environ, **ENVIRONMENT, **own, "PYTHONPATH": str(packages)}
    command = [Path(sys.executable).with_name("vllm"), "serve", Path(directory).resolve(), *OPTIONS]
    command += ["--num-gpu-blocks-override", "64", "--port", str(port)]
    with (packages / f"{port}.log").open("w") as log:
        server = subprocess.Popen(
            [*map(str, command)], stdout=log, stderr=log, env=environment, cwd=packages
        )
    try:
        wait(server, port, packages / f"{port}.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def wait(server: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    sys.exit(f"FAILED: vLLM does not serve: {log.read_text()[-2000:]}")


if __name__ == "__main__":
    main()
