"""Start `vllm serve` on this CPU: what the plugin says, and what `fp8kv verify --served` says.

check_server.py plugin WHEEL [NAME ...]
    Hand-made directories with our wheel installed: exit 0 if the line is right for each, and only
    the good are served where FP8KV_REQUIRE_SCALES is set. A bad one is where it is not
check_server.py verify FP8KV TWIN TWIN_CALIBRATED PLAIN_CALIBRATED
    By the command FP8KV of another environment a server of TWIN_CALIBRATED, the twin with its scales,
    is nearer to them, one of TWIN to 1.0; of PLAIN_CALIBRATED, which does without, nobody can tell
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from engine import tell
from safetensors.torch import load_file, save_file
from scale_cases import CASES, write_case
from vllm_process import ENVIRONMENT

# a plugin of its own: FP8 kernels for CPUs without
HELPER = """
import os, sys
def register():
    sys.path.append(os.environ["INTEROP"])
    import torch_kernels
    if torch_kernels.is_needed():
        torch_kernels.install()
"""
METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: 0.32.0+cpu\n"
POINTS = "[vllm.general_plugins]\ninterop_helper = interop_helper:register\n"
Tensors = dict[str, torch.Tensor]


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
        about.joinpath("METADATA").write_text(METADATA.format(name))
        about.joinpath("entry_points.txt").write_text(entries)
    return packages


@contextmanager
def serving(model: Path, packages: Path, *options: str, **variables: str):
    """Serve a model; yields the URL, None if the server ends instead, and its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "INTEROP": str(Path(__file__).parent)}
    own |= {"VLLM_LOGGING_LEVEL": "INFO", "PYTHONPATH": str(packages)}
    vllm = Path(sys.executable).with_name("vllm")
    command = [vllm, "serve", model, "--enforce-eager", *options, "--port", str(port)]
    environment = {**os.environ, **ENVIRONMENT, **own, **variables}
    log = packages / f"{port}.log"
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=packages)
    try:
        url = f"http://127.0.0.1:{port}"
        yield (url if is_healthy(server, url) else None), log
    finally:
        server.terminate()
        server.wait(60)


def is_healthy(server, url: str) -> bool:
    deadline = time.monotonic() + 300
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return True
        except OSError:
            time.sleep(1)
    return False


class Served(NamedTuple):
    name: str
    line: str  # which the plugin must write
    change: Callable[[Tensors], Tensors] = dict
    case: str = "one scale per layer, [1]"
    options: tuple[str, ...] = ()
    required: bool = True  # FP8KV_REQUIRE_SCALES
    serves: bool = False


def one_for_both(scales: Tensors) -> Tensors:
    """Layer 1 has one scale for K and V, which vLLM gives to K alone."""
    shared = scales.pop("model.layers.1.self_attn.k_scale")
    del scales["model.layers.1.self_attn.v_scale"]
    return scales | {"model.layers.1.self_attn.kv_scale": shared}


GOOD, HALF, NONE = (f"fp8kv: {n} KV scales in use, FP8 cache" for n in ("4 of 4", "2 of 2", "0 of 4"))
ABSENT = "K has no scale in the files and is at 1.0 in layer 1; V has no scale"
LACKS = f"fp8kv: 2 of 4 KV scales in use, FP8 cache; {ABSENT}"
DROPPED = "V is at 1.0: the engine dropped the file's scale in layer 1"
DROPS = f"fp8kv: 3 of 4 KV scales in use, FP8 cache; {DROPPED}"
HEADS, RANKS = "per head, [H, 1, 1]", ("--tensor-parallel-size", "2")
STAGES = ("--pipeline-parallel-size", "2", "--kv-cache-dtype-skip-layers", "0")
SERVED = [
    Served("good", GOOD, serves=True),
    Served("a layer without scales", LACKS, lambda s: {n: x for n, x in s.items() if "layers.1." not in n}),
    Served("a scale that vLLM drops", DROPS, one_for_both),
    Served("shards of scales per head", GOOD, case=HEADS, options=RANKS, serves=True),
    Served("two pipeline stages, one of them left in 16 bits", HALF, options=STAGES, serves=True),
    Served("at 1.0", f"{NONE}; K is 1.0 in the files", lambda s: {n: x**0 for n, x in s.items()}),
]
# one bad directory shows that without the variable a warning is all
SERVED.append(SERVED[1]._replace(name="the same, not required", required=False, serves=True))


def check_plugin(wheel: str, *names: str):
    work = Path(tempfile.mkdtemp())
    packages = install(work / "packages", wheel)
    for i, served in enumerate([served for served in SERVED if served.name in names] or SERVED):
        yield check_line(served, work / f"model-{i}", packages)


def check_line(served: Served, directory: Path, packages: Path) -> tuple[str, bool]:
    """Serve a tiny model; whether the line is right and it serves or ends as it must."""
    (made,) = [case for case in CASES if case.name == served.case]
    file = write_case(made, directory) / "scales.safetensors"
    save_file(served.change(load_file(file)), file, {"format": "pt"})
    required = {"FP8KV_REQUIRE_SCALES": "1" if served.required else ""}
    options = ["--skip-tokenizer-init", "--max-model-len", "128", "--num-gpu-blocks-override", "8"]
    with serving(directory, packages, *options, *served.options, **required) as (url, log):
        serves = url is not None
    said = [line for line in log.read_text().splitlines() if "fp8kv: " in line]
    is_right = any(served.line in line for line in said) and serves == served.serves
    return f"{served.name}: serves {serves}; {said}", is_right


def check_verify(fp8kv: str, twin: str, scaled: str, plain: str):
    packages = install(Path(tempfile.mkdtemp(), "packages"))
    options = ["--kv-cache-dtype", "fp8", "--max-model-len", "512", "--num-gpu-blocks-override", "64"]
    cases = ((scaled, scaled, "scales"), (twin, scaled, "1.0"), (plain, plain, "cannot tell"))
    for directory, scales, expected in cases:
        with serving(Path(directory).resolve(), packages, *options) as (url, log):
            if url is None:
                sys.exit(f"FAILED: vLLM does not serve: {log.read_text()[-2000:]}")
            command = [fp8kv, "verify", scales, "--served", url, "--json"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        answer, status = json.loads(done.stdout), 0 if expected == "scales" else 1
        yield f"{directory}: {answer}", (answer["nearer"], done.returncode) == (expected, status)


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    tell({"plugin": check_plugin, "verify": check_verify}[what](*arguments))
