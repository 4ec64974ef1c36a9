"""One page of the documentation: its blocks, run from top to bottom in one directory."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import yaml
from doc_blocks import ROOT, Command, commands_of, shows, without_figures
from doc_names import APPS, DIRECTORIES, FILES, invoke

from calib.recipe import Recipe

_TAKEN = re.compile(r"output '(.+)' exists; add --overwrite")
_NAMED = re.compile(r"# (\S+\.ya?ml)\b")
_WRITTEN = re.compile(r"(?:-o|--output)[ =](\S+)")


class Rules(NamedTuple):
    """What does not run, or is not compared; see tests/test_examples.py."""

    not_run: dict[str, str]
    served: tuple[str, ...]
    varies: dict[str, str]
    shown: dict[str, str]
    other_figures: set[str]
    not_compared: dict[str, str]


def starts(command, words):
    return command.words[: len(words.split())] == words.split()


def any_start(command, table):
    return any(starts(command, words) for words in table)


class Page:
    def __init__(self, names, here, monkeypatch, rules):
        self.names, self.here, self.rules = names, here, rules
        self.monkeypatch = monkeypatch
        self.written, self.variables = set(), {"__name__": "__main__"}
        here.mkdir()
        (here / "benchmarks").symlink_to(ROOT / "benchmarks")
        for name, text in FILES.items():
            (here / name).write_text(text)
        monkeypatch.chdir(here)
        # for what only a shell can run
        tools = here.parent / "bin"
        tools.mkdir()
        for name in APPS:
            program = f"from calib.commands.app import {APPS[name]} as run; run()"
            (tools / name).write_text(f"#!{sys.executable}\n{program}\n")
            (tools / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def put_files(self, blocks):
        """Write the files that YAML blocks name in their first line."""
        for block in blocks:
            if named := _NAMED.match(block.text):
                (self.here / named[1]).write_text(block.text)

    def problems(self, block):
        """What is wrong with a block, a line each."""
        kind = getattr(self, f"_{block.language}", None)
        if kind is None:
            return [f"no such language here: '{block.language}'"]
        self._put_names(block.text)
        return [*kind(block)]

    def _put_names(self, text):
        for name in DIRECTORIES:
            named = re.search(rf"(?<![\w/.-]){re.escape(name)}(?!\w)", text)
            if named and name not in self.written:
                self.names.put(name, self.here)

    def _yaml(self, block):
        """A recipe, unless its first line names another file that it is."""
        try:
            document = yaml.safe_load(block.text)
            if not _NAMED.match(block.text):
                Recipe.model_validate(document)
        except (ValueError, yaml.YAMLError) as error:
            yield str(error)

    def _json(self, block):
        try:
            json.loads(block.text)
        except ValueError as error:
            yield str(error)

    def _python(self, block):
        exec(compile(block.text, block.place, "exec"), self.variables)
        return ()

    def _bash(self, block):
        for command in commands_of(block):
            yield from self._run(command)

    def _console(self, block):
        if block.text and not commands_of(block):
            yield "a session has `$ ` before its commands"
        yield from self._bash(block)

    def _text(self, block):
        first = block.first_line
        if first.endswith("/"):
            yield from self._listed(block)
        elif first in self.rules.shown:
            yield from self._printed(block)
        elif first not in self.rules.not_compared:
            yield "nobody knows what prints this: make it a session, ```console with `$ `"

    def _listed(self, block):
        directory, *entries = (line.split()[0] for line in block.text.splitlines())
        for entry in entries:
            if entry != "..." and not (self.here / directory / entry).exists():
                yield f"{entry} is not in {directory}"

    def _printed(self, block):
        first = block.first_line
        command = Command(self.rules.shown[first])
        self._put_names(command.line)
        printed = self.names.printed.get(command.line) or self._result(command)[0]
        shown = block.text
        if first in self.rules.other_figures:
            shown, printed = without_figures(shown), without_figures(printed)
        if not shows(shown, printed, part=True):
            yield f"`{command.line}` prints\n{printed}"

    def _run(self, command):
        if any_start(command, self.rules.not_run):
            for words in self.rules.served:
                if starts(command, words) and not Path(command.words[len(words.split())]).is_dir():
                    yield f"`{command.line}`: there is nothing to serve"
            return
        self.written |= set(_WRITTEN.findall(command.line))
        printed, problem = self._result(command)
        if problem:
            yield problem
        elif not (any_start(command, self.rules.varies) or shows(command.shown or "...", printed)):
            yield f"`{command.line}` prints\n{printed}"

    def _result(self, command):
        """What the command prints; and what is wrong with how it ended, or None."""
        status, printed = self._started(command)
        if status in command.statuses:
            return printed, None
        return printed, f"`{command.line}` ends with {status}:\n{printed[-2000:]}"

    def _started(self, command):
        program, *arguments = command.words
        if program == "cd":
            self.monkeypatch.chdir(*arguments)
            return 0, ""
        if program == "make":  # whether there is such a thing to make
            return in_a_shell(shlex.join(["make", "-n", *arguments]), ROOT)
        if command.needs_a_shell or program not in APPS:
            return in_a_shell(command.line)
        done = invoke(command)
        if taken := _TAKEN.search(done.output):
            shutil.rmtree(taken[1])
            done = invoke(command)
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.output


def in_a_shell(line, directory=None):
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout
