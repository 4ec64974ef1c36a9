"""Show that vLLM serves baked models as it serves their sources, and needs no scales for them.

check_baked.py SOURCE BAKED [SOURCE BAKED ...]

With a 16-bit cache BAKED must write the tokens that SOURCE writes, all of them: powers of two do
not round. So it must with an FP8 cache and no scales in its files, on a text of which the model is
sure: FP8 rounds, and where two tokens are as likely texts part.
"""

import sys
from pathlib import Path

from check_stress import NEW_TOKENS, in_new_process, same_tokens
from engine import kernels
from outputs import report

SURE = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, " * 3


def check(source: Path, baked: Path) -> None:
    """Compare the texts."""
    wanted = in_new_process(source, "auto", SURE)
    problems = []
    for cache in ("auto", "fp8"):
        found = in_new_process(baked, cache, SURE)
        same = same_tokens(wanted, found)
        if same < NEW_TOKENS:
            problems.append(
                f"cache {cache}: only {same} of {NEW_TOKENS} tokens are the source's: "
                f"{found['text']!r} for {wanted['text']!r}"
            )
    report(baked, problems, f"without scales the source's {wanted['text']!r}; {kernels()}")


def main() -> None:
    """Check each pair."""
    given = [*map(Path, sys.argv[1:])]
    for source, baked in zip(given[::2], given[1::2], strict=True):
        check(source, baked)


if __name__ == "__main__":
    main()
