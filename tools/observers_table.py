"""Write the table of observers in docs/guide.md from `OBSERVERS`: `make pages`."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from calib.choices import OBSERVERS

PAGE = Path(__file__).parents[1] / "docs" / "guide.md"
_TABLE = re.compile(r"^\| `--observer` \|.*?\n\n", re.DOTALL | re.MULTILINE)


def page() -> str:
    """Return the page with the table as `OBSERVERS` has it now."""
    rows = "".join(f"| `{name}` | {entry.amax} |\n" for name, entry in OBSERVERS.items())
    table = f"| `--observer` | the amax it derives |\n|---|---|\n{rows}\n"
    return _TABLE.sub(lambda _: table, PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
