"""What `fp8kv recommend --json` says, in vLLM: its parser takes the line, a backend the cache.

check_recommended.py JSON [JSON ...]   of SmolLM2 and its twins, recommended for vLLM and one GPU
"""

import json
import shlex
import sys
from pathlib import Path

import fake_gpu
from check_backends import backends
from outputs import report

HEAD_DIM = 64  # of SmolLM2


def check(platform, path: Path) -> None:
    """Parse the serve line and ask for its backend on the GPU."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found = json.loads(path.read_text())
    line, gpu = found["chosen"]["commands"][-1], found["gpu"]
    program, verb, *arguments = shlex.split(line)
    assert (program, verb) == ("vllm", "serve"), line
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    problems = []
    if parsed.kv_cache_dtype == "auto":
        problems.append(f"{line}: a 16-bit cache")
    fake_gpu.become(platform, gpu)
    names = {each.get_name() for each in backends(platform, parsed.kv_cache_dtype, HEAD_DIM)}
    asked = getattr(parsed, "attention_backend", None)
    wanted = asked and getattr(asked, "name", asked)
    if not names or (wanted and wanted not in names):
        problems.append(f"{line}: on {gpu} there are {sorted(names) or 'no backends'}")
    report(path, problems, f"{line}: on {gpu} served by {', '.join(sorted(names))}")


def main() -> None:
    """Check each answer."""
    platform = fake_gpu.install()
    for path in map(Path, sys.argv[1:]):
        check(platform, path)


if __name__ == "__main__":
    main()
