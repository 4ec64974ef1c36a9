"""Show that vLLM uses our scales: a twin that needs them, without them and with them.

check_stress.py SOURCE TWIN CALIBRATED

SOURCE writes a text with a bfloat16 cache. TWIN, its `fp8kv stress`, must write another one with an
FP8 cache and no scales; CALIBRATED, the twin's `fp8kv calibrate`, the source's. So must its `fp8kv
bake`, without scales.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from engine import kernels, start
from outputs import report

PROMPT = "Question: What is the capital of France? Answer: The capital of France is"
# FP8 rounds K and V, so texts part sooner or later; on this prompt not within these
NEW_TOKENS = 16


def generate(directory: Path, cache_dtype: str, prompt: str) -> dict:
    """Continue the prompt greedily: the new tokens, and their text."""
    llm = start(directory, kv_cache_dtype=cache_dtype)
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    made = llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0]
    return {"tokens": list(made.token_ids), "text": made.text}


def in_new_process(directory: Path, cache_dtype: str, prompt: str) -> dict:
    """The same; an engine keeps its memory until its process ends."""
    flags = ["--cache-dtype", cache_dtype, "--prompt", prompt]
    command = [sys.executable, __file__, str(directory), *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def same_tokens(first: dict, second: dict) -> int:
    """Tokens before the two first differ."""
    pairs = enumerate(zip(first["tokens"], second["tokens"], strict=True))
    return next((i for i, (a, b) in pairs if a != b), NEW_TOKENS)


def check(source: Path, twin: Path, calibrated: Path, prompt: str) -> None:
    """Compare the three texts."""
    wanted = in_new_process(source, "auto", prompt)
    garbage, restored = (in_new_process(each, "fp8", prompt) for each in (twin, calibrated))
    without, with_scales = same_tokens(wanted, garbage), same_tokens(wanted, restored)
    problems = []
    if without > NEW_TOKENS // 4:
        problems.append(f"without scales {without} of {NEW_TOKENS} tokens are the source's")
    if with_scales < NEW_TOKENS:
        problems.append(
            f"with scales only {with_scales} of {NEW_TOKENS} tokens are the source's: "
            f"{restored['text']!r} for {wanted['text']!r}"
        )
    success = (
        f"with scales the source's {restored['text']!r}, without {garbage['text']!r}; kernels: {kernels()}"
    )
    report(calibrated, problems, success)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directories", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--cache-dtype", help="generate with one DIR and print the tokens")
    parser.add_argument("--prompt", default=PROMPT)
    given = parser.parse_args()
    if given.cache_dtype:
        print(json.dumps(generate(*given.directories, given.cache_dtype, given.prompt)))
    else:
        check(*given.directories, given.prompt)


if __name__ == "__main__":
    main()
