"""Serve hand-made directories with `vllm serve`, our wheel installed; read what the plugin says.

check_plugin.py WHEEL   exit 0 if the line is right for each directory, and only the good one is
                        served where FP8KV_REQUIRE_SCALES is set; a bad one is where it is not
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch
from engine import ENVIRONMENT
from safetensors.torch import load_file, save_file
from scale_cases import CASES, write_case

SECONDS = 240
# a plugin of its own: FP8 kernels for CPUs without, and a fault: all scales twice as large
HELPER = """
import os, sys
def register():
    sys.path.append(os.environ["INTEROP"])
    import torch_kernels
    if torch_kernels.is_needed():
        torch_kernels.install()
    if os.environ.get("DOUBLED"):
        from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
        method = compressed_tensors.CompressedTensorsKVCacheMethod
        process = method.process_weights_after_loading
        def doubled(self, layer):
            process(self, layer)
            layer._k_scale.mul_(2)
            layer._v_scale.mul_(2)
        method.process_weights_after_loading = doubled
"""
Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
DIRECTORIES: dict[str, tuple[Change, str]] = {
    "good": (lambda scales: scales, "fp8kv: 4 of 4 KV scales in use, FP8 cache"),
    "a layer dropped": (
        lambda scales: {name: x for name, x in scales.items() if "layers.1." not in name},
        "fp8kv: 2 of 4 KV scales in use, FP8 cache; K has no scale in the files and is at 1.0 "
        "in layer 1; V has no scale",
    ),
    "doubled": (lambda scales: scales, "0 of 4 KV scales in use, FP8 cache; K is twice the file's"),
    "at 1.0": (
        lambda scales: {name: torch.ones_like(x) for name, x in scales.items()},
        "0 of 4 KV scales in use, FP8 cache; K is 1.0 in the files",
    ),
}


def main() -> None:
    """Serve every directory."""
    work = Path(tempfile.mkdtemp())
    packages = install(Path(sys.argv[1]), work / "packages")
    wrong = 0
    for number, (name, (change, line)) in enumerate(DIRECTORIES.items()):
        directory = write(change, work / f"model-{number}")
        # one bad directory shows that without the variable a warning is all
        for required in (False, True) if name == "a layer dropped" else (True,):
            serves, log = serve(directory, packages, name == "doubled", required)
            is_right = line in log and serves == (name == "good" or not required)
            wrong += not is_right
            kind = "with FP8KV_REQUIRE_SCALES" if required else "without"
            said = next((x for x in log.splitlines() if "fp8kv: " in x), "nothing")
            print(f"{'ok   ' if is_right else 'WRONG'} {name}, {kind}: serves {serves}; {said}")
    sys.exit(1 if wrong else 0)


def install(wheel: Path, packages: Path) -> Path:
    """Our wheel without what it depends on, and the helper's plugin beside it."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--target", packages, wheel], check=True)
    (packages / "interop_helper.py").write_text(HELPER)
    points = "[vllm.general_plugins]\ninterop_helper = interop_helper:register\n"
    # `vllm serve` asks "vllm" for its version and device; the build for CPUs has another name
    for name, entries in (("interop_helper", points), ("vllm", "")):
        about = packages / f"{name}-0.32.0.dist-info"
        about.mkdir()
        about.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0+cpu\n"
        )
        about.joinpath("entry_points.txt").write_text(entries)
    return packages


def write(change: Change, directory: Path) -> Path:
    """A tiny model whose scales are changed."""
    (case,) = [case for case in CASES if case.name == "one scale per layer, [1]"]
    file = write_case(case, directory) / "scales.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return directory


def serve(directory: Path, packages: Path, doubled: bool, required: bool) -> tuple[bool, str]:
    """Start a server; say whether it serves, and what it printed until then."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "PYTHONPATH": str(packages),
        "INTEROP": str(Path(__file__).parent),
        "DOUBLED": "1" if doubled else "",
        "FP8KV_REQUIRE_SCALES": "1" if required else "",
    }
    options = ["--skip-tokenizer-init", "--enforce-eager", "--max-model-len", "128"]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(directory), *options]
    log = directory.with_suffix(f".{required}.log")
    with log.open("w") as out:
        server = subprocess.Popen(
            [*command, "--num-gpu-blocks-override", "8", "--port", str(port)],
            stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=packages,
        )  # fmt: skip
    try:
        return is_healthy(server, port), log.read_text()
    finally:
        server.terminate()
        server.wait(60)


def is_healthy(server: "subprocess.Popen[bytes]", port: int) -> bool:
    """Wait until the server answers, or has ended."""
    deadline = time.monotonic() + SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    return False


if __name__ == "__main__":
    main()
