"""Ask vLLM servers whether they use the scales: `fp8kv verify --served` must be right of each.

check_served.py FP8KV TWIN TWIN_CALIBRATED PLAIN_CALIBRATED

FP8KV is the command, which has an environment of its own. A server of TWIN_CALIBRATED, the twin
with its scales, must be nearer to them; one of TWIN nearer to 1.0; of PLAIN_CALIBRATED, a model
that does without, nobody can tell.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from vllm_server import install, serving

OPTIONS = ["--kv-cache-dtype", "fp8", "--max-model-len", "512", "--num-gpu-blocks-override", "64"]


def main() -> None:
    """Serve three directories, one after the other."""
    fp8kv, twin, scaled, plain = sys.argv[1:]
    packages = install(Path(tempfile.mkdtemp(), "packages"))
    cases = ((scaled, scaled, "scales"), (twin, scaled, "1.0"), (plain, plain, "cannot tell"))
    wrong = 0
    for served, scales, expected in cases:
        with serving(Path(served).resolve(), packages, *OPTIONS) as (url, log):
            if url is None:
                sys.exit(f"FAILED: vLLM does not serve: {log.read_text()[-2000:]}")
            command = [fp8kv, "verify", scales, "--served", url, "--json"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout)
        status = 0 if expected == "scales" else 1
        is_right = (found["nearer"], done.returncode) == (expected, status)
        wrong += not is_right
        print(f"{'OK' if is_right else 'FAILED'} {served}: {found}", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
