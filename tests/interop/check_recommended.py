"""What `fp8kv recommend --json` says, in vLLM: its parser takes the line, a backend the cache.

check_recommended.py JSON [JSON ...]   of SmolLM2 and its twins, recommended for vLLM and one GPU

The answers differ: they are measured, not the same for every model.
"""

import json
import shlex
import sys
from pathlib import Path

import fake_gpu
from check_backends import backends
from outputs import report


def head_dim(commands: list[str]) -> int:
    """The head size of the model that the first command reads."""
    paths = [Path(word, "config.json") for word in shlex.split(commands[0])]
    config = json.loads(next(path for path in paths if path.exists()).read_text())
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def check(platform, path: Path) -> str:
    """Parse the serve line and ask for its backend on the GPU; returns the cache."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found = json.loads(path.read_text())
    commands, gpu = found["chosen"]["commands"], found["gpu"]
    line, size = commands[-1], head_dim(commands)
    program, verb, *arguments = shlex.split(line)
    assert (program, verb) == ("vllm", "serve"), line
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    problems = []
    if parsed.kv_cache_dtype == "auto":
        problems.append(f"{line}: a 16-bit cache")
    fake_gpu.become(platform, gpu)
    names = {each.get_name() for each in backends(platform, parsed.kv_cache_dtype, size)}
    asked = getattr(parsed, "attention_backend", None)
    wanted = asked and getattr(asked, "name", asked)
    if not names or (wanted and wanted not in names):
        problems.append(f"{line}: on {gpu} there are {sorted(names) or 'no backends'}")
    report(path, problems, f"{line}: on {gpu} served by {', '.join(sorted(names))}")
    return found["chosen"]["cache"]


def main() -> None:
    """Check each answer."""
    platform = fake_gpu.install()
    answers = [check(platform, path) for path in map(Path, sys.argv[1:])]
    same = len(set(answers)) < len(answers)
    report("answers", ["the same for two models"] if same else [], ", ".join(answers))


if __name__ == "__main__":
    main()
