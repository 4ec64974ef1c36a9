"""Fenced blocks of the documentation, and the commands that they show."""

import json
import re
import shlex
from itertools import dropwhile
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.ipynb")),
]

_FENCE = re.compile(r" *(`{3,}|~{3,})([^`]*)")
_INCLUDED = re.compile(r'^ *-+8<-+ "(.+)"\n', re.MULTILINE)
# `# exit 1: why`; with an `if` both are right
_EXIT = re.compile(r"# exit (\d+)(?=$|[:;,])|# .*\bexit (?:status )?(\d+) if ")
_ASSIGNED = re.compile(r"\w+=")


class Block(NamedTuple):
    page: str  # relative to the repository
    line: int
    language: str
    text: str

    @property
    def place(self):
        return f"{self.page}:{self.line}"

    @property
    def first_line(self):
        return self.text.partition("\n")[0]


class Command(NamedTuple):
    line: str
    shown: str | None = None  # what a session says that it prints

    @property
    def words(self):
        """As a shell reads them, without variables before; operators are words of their own."""
        return [*dropwhile(_ASSIGNED.match, self._all_words())]

    @property
    def statuses(self):
        """The exit statuses that are right: 0, unless the comment behind the command says so."""
        if told := _EXIT.search(self.line):
            return {int(told[1])} if told[1] else {0, int(told[2])}
        return {0}

    @property
    def needs_a_shell(self):
        operators = any(not set(word) - set("();<>|&") for word in self._all_words())
        return "$" in self.line or operators or self.words != self._all_words()

    def _all_words(self):
        lexer = shlex.shlex(self.line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        return list(lexer)


def blocks_of(page):
    """Fenced blocks in order; of a notebook, those between its code."""
    lines = enumerate(_prose(page).splitlines(), 1)
    for number, line in lines:
        if opened := _FENCE.fullmatch(line):
            fence, says = opened.groups()
            body = []
            for _, inner in lines:
                if inner.strip() == fence:
                    break
                body.append(f"{inner}\n")
            text = _INCLUDED.sub(lambda file: (ROOT / file[1]).read_text(), dedent("".join(body)))
            language = re.match(r"[{. ]*(\w*)", says)[1]
            yield Block(page.relative_to(ROOT).as_posix(), number, language, text)


def _prose(page):
    if page.suffix == ".md":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def commands_of(block):
    """The commands of a `bash` block, or of a session with `$ ` before each."""
    if block.language == "bash":
        lines = block.text.replace("\\\n", " ").splitlines()
        return [Command(line) for line in lines if Command(line).words]
    sessions = re.split(r"^\$ ", block.text.replace("\\\n", " "), flags=re.MULTILINE)[1:]
    pairs = (session.partition("\n") for session in sessions)
    return [Command(line, shown) for line, _, shown in pairs]


def shows(shown, printed, *, part=False):
    """Whether this was printed. A line `...` stands for any; with `part` there may be more."""
    lines = [r"(?:.*\n)*" if line == "..." else re.escape(f"{line}\n") for line in _lines(shown)]
    text = "".join(f"{line}\n" for line in _lines(printed))
    match = (
        re.compile("".join(lines)).fullmatch
        if not part
        else re.compile("^" + "".join(lines), re.MULTILINE).search
    )
    return match(text) is not None


def without_figures(text):
    """The same without numbers, and as if all columns were as wide."""
    for pattern, one in ((r"\d[\d.]*", "0"), (" +", " "), ("━+", "━"), ("─+", "─")):
        text = re.sub(pattern, one, text)
    return text


def _lines(text):
    return [line.rstrip() for line in text.strip("\n").splitlines()]
