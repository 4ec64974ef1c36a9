"""Fenced blocks of the documentation, and the commands that they show."""

import json
import re
import shlex
from itertools import dropwhile, takewhile
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "examples").glob("*.ipynb"))
_FENCE = re.compile(r" *(`{3,}|~{3,})([^`]*)")
# `# exit 1: why`; with an `if` both are right
_EXIT = re.compile(r"# exit (\d+)(?=$|[:;,])|# .*\bexit (?:status )?(\d+) if ")


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
        return [*dropwhile(re.compile(r"\w+=").match, self._all_words())]

    @property
    def statuses(self):
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
    prose = page.read_text()
    if page.suffix != ".md":
        cells = json.loads(prose)["cells"]
        prose = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    lines = enumerate(prose.splitlines(), 1)
    for number, line in lines:
        if opened := _FENCE.fullmatch(line):
            fence, says = opened.groups()
            inner = takewhile(lambda line, end=fence: line[1].strip() != end, lines)
            body = [f"{line}\n" for _, line in inner]
            language = re.match(r"[{. ]*(\w*)", says)[1]
            yield Block(page.relative_to(ROOT).as_posix(), number, language, dedent("".join(body)))


def commands_of(block):
    text = block.text.replace("\\\n", " ")
    if block.language == "bash":
        return [Command(line) for line in text.splitlines() if Command(line).words]
    sessions = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    return [Command(*session.partition("\n")[::2]) for session in sessions]


def shows(shown, printed, *, part=False):
    """Whether this was printed. A line `...` stands for any; with `part` there may be more."""
    texts = (text.strip("\n").splitlines() for text in (shown, printed))
    shown, printed = ([f"{line.rstrip()}\n" for line in lines] for lines in texts)
    pattern = "".join(r"(?:.*\n)*" if line == "...\n" else re.escape(line) for line in shown)
    pattern = f"^{pattern}" if part else rf"\A{pattern}\Z"
    return re.search(pattern, "".join(printed), re.MULTILINE) is not None


def without_figures(text):
    for pattern, one in ((r"\d[\d.]*", "0"), (" +", " "), ("━+", "━"), ("─+", "─")):
        text = re.sub(pattern, one, text)
    return text
