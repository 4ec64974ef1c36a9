"""Show that vLLM serves baked models as it serves their sources, and needs no scales for them.

check_baked.py SOURCE BAKED [SOURCE BAKED ...]

With a 16-bit cache BAKED must find every token likeliest that SOURCE does: powers of two do not
round. With an FP8 cache and no scales in its files it must agree as FP8 caches do.
"""

import sys
from pathlib import Path

from check_quantized import LEAST_SAME, next_tokens
from engine import kernels, start
from outputs import report


def check(source: Path, baked: Path) -> None:
    """Compare the likeliest next tokens of one text."""
    wanted = next_tokens(start(source, kv_cache_dtype="bfloat16"))
    found = {cache: next_tokens(start(baked, kv_cache_dtype=cache)) for cache in ("bfloat16", "fp8")}
    same = {c: sum(a == b for a, b in zip(wanted, x, strict=True)) for c, x in found.items()}
    problems = []
    if same["bfloat16"] < len(wanted):
        problems.append(f"with a 16-bit cache {same['bfloat16']} of {len(wanted)} next tokens")
    if not LEAST_SAME * len(wanted) <= same["fp8"]:
        problems.append(f"with an FP8 cache {same['fp8']} of {len(wanted)} next tokens")
    success = f"all of {len(wanted)} next tokens with a 16-bit cache, {same['fp8']} with FP8 at 1.0"
    report(baked, problems, f"{success}; kernels: {kernels()}")


def main() -> None:
    """Check each pair."""
    given = [*map(Path, sys.argv[1:])]
    for source, baked in zip(given[::2], given[1::2], strict=True):
        check(source, baked)


if __name__ == "__main__":
    main()
