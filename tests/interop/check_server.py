"""Start `vllm serve` on this CPU: what the plugin says, and what `fp8kv verify --served` says.

check_server.py plugin WHEEL [NAME ...]
    Serves hand-made directories with our wheel installed; exit 0 if the line is right for each, and
    only the good ones are served where FP8KV_REQUIRE_SCALES is set; a bad one is where it is not
check_server.py nodes FP8KV WHEEL DIR OTHER
    Serves both with VLLM_PLUGINS=fp8kv: `verify --served --served` finds DIR and OTHER, the same with other
    scales, apart, and DIR and DIR alike; metrics say the same
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from scale_cases import CASES, write_case
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


# ---- the plugin ----


@dataclass(frozen=True)
class Served:
    """A directory, how it is served, and the line that the plugin must write."""

    name: str
    line: str
    change: Callable[[Tensors], Tensors] = dict
    case: str = "one scale per layer, [1]"
    options: tuple[str, ...] = ()
    doubled: str = ""
    required: bool = True  # FP8KV_REQUIRE_SCALES
    serves: bool = False


def without_a_layer(scales: Tensors) -> Tensors:
    """The files have no scales for layer 1."""
    return {name: x for name, x in scales.items() if "layers.1." not in name}


def one_for_both(scales: Tensors) -> Tensors:
    """Layer 1 has one scale for K and V, which vLLM gives to K alone."""
    shared = scales.pop("model.layers.1.self_attn.k_scale")
    del scales["model.layers.1.self_attn.v_scale"]
    return scales | {"model.layers.1.self_attn.kv_scale": shared}


def all_ones(scales: Tensors) -> Tensors:
    """Nobody measured."""
    return {name: torch.ones_like(x) for name, x in scales.items()}


GOOD, NONE = (f"fp8kv: {n} of 4 KV scales in use, FP8 cache" for n in (4, 0))
LACKS = (
    "fp8kv: 2 of 4 KV scales in use, FP8 cache; "
    "K has no scale in the files and is at 1.0 in layer 1; V has no scale"
)
DROPS = (
    "fp8kv: 3 of 4 KV scales in use, FP8 cache; V is at 1.0: the engine dropped the file's scale in layer 1"
)
HALF = "fp8kv: 2 of 2 KV scales in use, FP8 cache"
STAGES = ("--pipeline-parallel-size", "2", "--kv-cache-dtype-skip-layers", "0")
SERVED = [
    Served("good", GOOD, serves=True),
    Served("a layer without scales", LACKS, without_a_layer),
    # one bad directory shows that without the variable a warning is all
    Served("the same, not required", LACKS, without_a_layer, required=False, serves=True),
    Served("a scale that vLLM drops", DROPS, one_for_both),
    Served("doubled", f"{NONE}; K is twice the file's", doubled="all"),
    Served(
        "the numbers doubled that vLLM's kernel for CPUs reads",
        f"{NONE}; K's copy _k_scale_float, which CPU_ATTN reads, is twice the file's",
        doubled="floats",
    ),
    Served(
        "shards of scales per head",
        GOOD,
        case="per head, [H, 1, 1]",
        options=("--tensor-parallel-size", "2"),
        serves=True,
    ),
    Served("two pipeline stages, one of them left in 16 bits", HALF, options=STAGES, serves=True),
    Served("at 1.0", f"{NONE}; K is 1.0 in the files", all_ones),
]


def check_plugin(wheel: str, *names: str) -> Iterator[bool]:
    """Serve every directory, or those of these names."""
    work = Path(tempfile.mkdtemp())
    packages = install(work / "packages", wheel)
    chosen = [served for served in SERVED if served.name in names] or SERVED
    for i, served in enumerate(chosen):
        yield check_line(served, work / f"model-{i}", packages)


def check_line(served: Served, directory: Path, packages: Path) -> bool:
    """Serve a tiny model; whether the line is right and it serves or ends as it must."""
    (made,) = [case for case in CASES if case.name == served.case]
    file = write_case(made, directory) / "scales.safetensors"
    save_file(served.change(load_file(file)), file, {"format": "pt"})
    variables = {"DOUBLED": served.doubled} if served.doubled else {}
    variables["FP8KV_REQUIRE_SCALES"] = "1" if served.required else ""
    options = ["--skip-tokenizer-init", "--max-model-len", "128", "--num-gpu-blocks-override", "8"]
    with serving(directory, packages, *options, *served.options, **variables) as (url, log):
        serves = url is not None
    fingerprint = re.compile(", fingerprint [0-9a-f]{32}")
    said = [fingerprint.sub("", line) for line in log.read_text().splitlines() if "fp8kv: " in line]
    is_right = any(served.line in line for line in said) and serves == served.serves
    print(f"{'ok   ' if is_right else 'WRONG'} {served.name}: serves {serves}; {said}", flush=True)
    return is_right


# ---- verify --served ----


def check_verify(fp8kv: str, twin: str, scaled: str, plain: str) -> Iterator[bool]:
    """Serve three directories, one after the other."""
    packages = install(Path(tempfile.mkdtemp(), "packages"))
    options = ["--kv-cache-dtype", "fp8", "--max-model-len", "512", "--num-gpu-blocks-override", "64"]
    cases = ((scaled, scaled, "scales"), (twin, scaled, "1.0"), (plain, plain, "cannot tell"))
    for directory, scales, expected in cases:
        with serving(Path(directory).resolve(), packages, *options) as (url, log):
            if url is None:
                sys.exit(f"FAILED: vLLM does not serve: {log.read_text()[-2000:]}")
            command = [fp8kv, "verify", scales, "--served", url, "--json"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        answer = json.loads(done.stdout)
        status = 0 if expected == "scales" else 1
        is_right = (answer["nearer"], done.returncode) == (expected, status)
        print(f"{'OK' if is_right else 'FAILED'} {directory}: {answer}", flush=True)
        yield is_right


# ---- two nodes ----


def check_nodes(fp8kv: str, wheel: str, directory: str, other: str) -> Iterator[bool]:
    """Serve two directories at a time."""
    options = ["--max-model-len", "128", "--num-gpu-blocks-override", "8"]
    variables = {"VLLM_PLUGINS": "fp8kv,interop_helper"}
    for second, status in ((directory, 0), (other, 1)):
        packages = [install(Path(tempfile.mkdtemp(), "packages"), wheel) for _ in range(2)]
        with (
            serving(Path(directory).resolve(), packages[0], *options, **variables) as (prefill, log),
            serving(Path(second).resolve(), packages[1], *options, **variables) as (decode, _),
        ):
            if prefill is None or decode is None:
                sys.exit(f"FAILED: vLLM does not serve: {log.read_text()[-2000:]}")
            command = [fp8kv, "verify", directory, "--served", prefill, "--served", decode, "--json"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            with urllib.request.urlopen(f"{prefill}/metrics", timeout=5) as answer:
                metrics = answer.read().decode()
        said = json.loads(done.stdout)
        scales = said["servers"][prefill]
        lines = [f'fp8kv_scales_info{{fingerprint="{scales["fingerprint"]}"}} 1.0']
        lines += [f"fp8kv_scales_in_use {scales['total']}.0", "fp8kv_scales_problems 0.0"]
        is_right = done.returncode == status and scales["total"] > 0 and all(x in metrics for x in lines)
        print(f"{'OK' if is_right else 'FAILED'} {directory} and {second}: {said}", flush=True)
        yield is_right


def main() -> None:
    what, *arguments = sys.argv[1:]
    right = [*{"plugin": check_plugin, "nodes": check_nodes, "verify": check_verify}[what](*arguments)]
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
