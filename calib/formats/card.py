"""README cards of outputs, baked models, stress twins and packs, from templates in `cards/`."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from calib import __version__
from calib.choices import FormatName, Reduce, Strategy
from calib.files.names import CARD_FILE
from calib.files.text import plain
from calib.formats import FORMATS

_MARKUP = re.compile(r"([\\`*_\[\]<>|#])")
NO_WEIGHTS = "No weights are here: put the source's weight files beside these before serving."


def render_card(template: str, **facts: Any) -> str:
    """Render `cards/<template>.md.j2`; text of others cannot steer a terminal, or begin a line."""
    environment = Environment(
        loader=PackageLoader("calib.formats", "cards"),
        finalize=lambda fact: plain(str(fact)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = lambda text: _MARKUP.sub(r"\\\1", str(text))
    return environment.get_template(f"{template}.md.j2").render(facts)


def front_matter(card: str) -> str:
    """Return the head of a card, in YAML between two lines of dashes; empty without one."""
    head = re.match(r"---\n.*?\n---\n", card, re.DOTALL)
    return head.group() if head else ""


def prepend_card(source: Path | None, ours: str, out: Path) -> None:
    """Write the README of `out`: the front matter of the one in `source`, `ours`, and its text under a line.

    Without a source the front matter is that of `out`'s own, whose text is ours and goes.
    """
    card = (source or out) / CARD_FILE
    text = card.read_text(errors="replace") if card.exists() else ""
    head = front_matter(text)
    body = text[len(head) :] if source else ""
    line = (
        "---\n\n*The README of the model that this was made from, about that model:*\n"
        if body.strip()
        else ""
    )
    (out / CARD_FILE).write_text("\n".join(filter(None, [head, ours, line, body])))


def format_card(
    model: str,
    name: FormatName,
    path: Path,
    strategy: Strategy,
    flags: str = "",
    warnings: Sequence[str] = (),
    report: dict[str, Any] | None = None,
) -> str:
    """Return the card of scales in one format: of a calibration's `report`, or converted without one."""
    facts = {"model": model, "name": name, "format": FORMATS[name], "strategy": strategy, "report": report}
    command = serve_command(name, path, strategy, flags, (report or {}).get("drafts_for"))
    facts |= {"engine": engine_of(name, flags), "serve": command, "note": FORMATS[name].note_on(strategy)}
    facts |= {"version": __version__, "warnings": warnings, "no_weights": NO_WEIGHTS}
    return render_card("output", **facts)


def engine_of(name: FormatName, flags: str = "") -> str:
    """Return who serves a format; `flags` that serving needs besides are vLLM's alone."""
    return "vLLM" if flags else FORMATS[name].engine


def serve_command(
    name: FormatName, path: Path, strategy: Strategy, flags: str = "", drafts_for: Any = None
) -> str:
    """Return the command that serves a directory, or ""; `drafts_for`: a drafter's model, and its method."""
    target, place = FORMATS[name], shlex.quote(str(path))
    if drafts_for and target.rules:
        model, method = drafts_for
        in_json = json.dumps(str(path), ensure_ascii=False, allow_nan=False)[1:-1]
        paths = ((word, in_json if "{{" in word else path) for word in shlex.split(target.rules.draft_flag))
        words = (word.format(path=x, method=method, METHOD=method.upper()) for word, x in paths)
        place = shlex.join([model, *words])
    per_head_flag = target.rules.per_head_flag if target.rules and strategy == "attn_head" else ""
    return " ".join(filter(None, (target.serve.format(path=place), per_head_flag, flags)))


def backup_line(model: Path, backup: Path) -> str:
    """Say where the files of `model` that were replaced are, and which backup has the originals."""
    first, line = f"{model.name}.before-fp8kv", f"the files that were replaced are in {backup}"
    if backup.name == first:
        return line
    return f"{line}; each file's original is in the first backup that has it"


def written_strategy(strategy: Strategy, reduce: Reduce) -> Strategy:
    """Return the strategy of scales in a file, after `--reduce`."""
    return "tensor" if reduce == "max" else strategy
