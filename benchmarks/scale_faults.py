"""Calibrations killed at random moments: what they leave behind, and whether they can go on."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scale_child import digest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from calib.models.sources import builtin_model

# (signal, phase it arrives in) -> how often
FAULTS = {
    (signal.SIGKILL, "calibrating"): 20,
    (signal.SIGKILL, "writing"): 10,
    (signal.SIGTERM, "calibrating"): 6,
    (signal.SIGTERM, "writing"): 4,
}
# seconds after the phase has begun: shorter than the phase
WITHIN = {"calibrating": 1.0, "writing": 0.2}
DATA = ("--dataset", "builtin:python-docs", "--samples", "96", "--seq-len", "64")
FLAGS = (*DATA, "--batch-size", "1", "--device", "cpu", "--set", "save_minutes=0")
# weights that are copied, so that writing takes a while
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}  # two run at a time
COMMAND = (sys.executable, "-m", "calib", "calibrate", "--weights", "copy", *FLAGS, "--quiet")


def measure_faults(scratch: Path) -> dict[str, Any]:
    """Kill, look, resume and compare; two at a time."""
    model = _make_model(scratch / "small")
    source = _hash(model)
    whole = scratch / "whole"
    subprocess.run([*COMMAND, str(model), "-o", str(whole)], check=True, env=ENVIRONMENT)
    expected = digest(whole), _names(whole)
    order = [kind for kind, count in FAULTS.items() for _ in range(count)]
    delays = random.Random(0)
    moments = [(*kind, delays.uniform(0, WITHIN[kind[1]])) for kind in order]
    with ThreadPoolExecutor(2) as pool:
        seen = [*pool.map(lambda i: _fault(scratch, model, i, *moments[i], expected), range(40))]
    totals = {key: sum(fault[key] for fault in seen) for key in seen[0]}
    changed = int(_hash(model) != source)
    bad = ("partial_outputs", "wrong_after_resume", "left_behind")
    comparison = {
        **totals,
        "sources_changed": changed,
        "faults_met": not changed and not any(totals[key] for key in bad),
    }
    kinds = {f"{kind[0].name} while {kind[1]}": count for kind, count in FAULTS.items()}
    return {"faults": kinds, "flags": FLAGS, "comparison": comparison}


def _make_model(directory: Path) -> Path:
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=49152, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).to(config.dtype).save_pretrained(directory)
    AutoTokenizer.from_pretrained(builtin_model("builtin:smollm2")).save_pretrained(directory)
    return directory


def _fault(
    scratch: Path,
    model: Path,
    number: int,
    sent: signal.Signals,
    phase: str,
    delay: float,
    expected: tuple[str, set[str]],
) -> dict[str, int]:
    out = scratch / f"fault-{number}" / "out"
    out.parent.mkdir()
    command = [*COMMAND, str(model), "-o", str(out)]
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    _wait_for(phase, out, running)
    time.sleep(delay)
    ended_before = running.poll() is not None
    running.send_signal(sent)
    running.wait()
    # before the rename there is no output, after it there is all of it
    partial = out.exists() and (digest(out), _names(out)) != expected
    if not out.exists():
        subprocess.run([*command, "--resume"], check=True, env=ENVIRONMENT)
    wrong = (digest(out), _names(out)) != expected
    left = [path.name for path in out.parent.iterdir() if path != out]
    return {
        "killed": int(not ended_before),
        "partial_outputs": int(partial),
        "wrong_after_resume": int(wrong),
        "left_behind": len(left),
    }


def _wait_for(phase: str, out: Path, running: "subprocess.Popen[bytes]") -> None:
    pattern = f".{out.name}.rank0.progress" if phase == "calibrating" else f".{out.name}.*.partial"
    while running.poll() is None and not any(out.parent.glob(pattern)):
        time.sleep(0.002)


def _names(directory: Path) -> set[str]:
    return {f"{path.name} {path.stat().st_size}" for path in directory.glob("*.safetensors")}


def _hash(directory: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()
