"""Pictures for light pages and for dark ones, from an SVG whose colours are the report's variables."""

import re
from pathlib import Path

from calib.evaluate.page import charts

ROOT = Path(__file__).parents[1]


def write_schemes(svg: str, name: str) -> None:
    """Write docs/NAME-light.svg and docs/NAME-dark.svg, with the colours of the report's page."""
    css = Path(charts.__file__).parent.joinpath("templates/report.css").read_text()
    light, dark = css.split("@media screen and (prefers-color-scheme: dark)")
    for scheme, part in (("light", light), ("dark", dark)):
        colors = dict(re.findall(r"--(\w+): (#\w{6})", part))
        colors["c0"] = colors["ink"]
        text = svg
        for variable, color in colors.items():
            text = text.replace(f"var(--{variable})", color)
        (ROOT / f"docs/{name}-{scheme}.svg").write_text(text)
