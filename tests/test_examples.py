"""Every fenced block of README, CONTRIBUTING and docs is run, read or compared, and so is the notebook.

Those of a page run from top to bottom in one directory. `# exit 1`: the command fails; `# exit 1 if`: it may.
"""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
import yaml
from doc_blocks import PAGES, ROOT, Command, blocks_of, commands_of, shows, without_figures
from doc_names import APPS, DIRECTORIES, FILES, Names, fake_hub, invoke, make_small
from fake_hub import on, running_hub
from families import tiny_model
from nbclient import NotebookClient

from calib.capture.training import scales_for
from calib.recipe import Recipe

_TAKEN = re.compile(r"'(.+)' (?:exists|is finished, and nothing is left to resume); add --overwrite")
_NAMED = re.compile(r"# (\S+\.ya?ml)\b")
_WRITTEN = re.compile(r"(?:-o|--output)[ =](\S+)")
# what does not run here, by its first words
NOT_RUN = {
    "make": "installs; CI runs `make test`, and tests/test_docs.py compares `make demo`",
    "vllm serve": "needs the engine; `make interop` serves our outputs in it",
    "trtllm-serve": "needs the engine and a GPU",
    "torchrun": "starts eight processes; tests/calib/capture/test_processes.py starts two",
    "accelerate launch": "the same",
    "srun": "the same, on a cluster",
    "python3 -m venv": "makes an environment; `make install-check` does",
    ". fp8kv-env/bin/activate": "the same",
    "pip install": "changes the environment",
    "fp8kv watch http://localhost:8000": "needs a server; `make interop-watch` asks one",
    "fp8kv merge TRAFFIC/dp-0": "needs several engines; tests/calib/watching/test_watch.py merges two",
    "fp8kv-calibrate LISTENER": "a model that listens, and speech; tests/calib/test_pictures.py makes them",
    "fp8kv-calibrate MODEL --draft": "a drafter; tests/calib/capture/test_draft.py makes some",
    "fp8kv-eval MODEL --long": "to its tokenizer all text is alike; tests/calib/evaluate/test_measure.py",
    "fp8kv bench": "takes minutes without a GPU; tests/calib/test_bench.py",
    "fp8kv-eval builtin:smollm2 --seq-len 512": "reads 4,096 tokens of the real model, new to its scales",
    "fp8kv-eval MODEL --tasks hellaswag,gsm8k": "lm-eval fetches these from the Hub itself",
}
# runs, but prints something else on every machine
VARIES = {"fp8kv generate": "words and speed of one machine"}
# text that is a part of what a command prints, by its first line
VERIFY = "fp8kv verify build/demo"
OTHER_FIGURES = "FP8 KV-cache scales, strategy attn_head, largest of each layer"  # those of more text
SHOWN = {
    "build/demo, LlamaForCausalLM, on one GPU": VERIFY,
    OTHER_FIGURES: f"{DIRECTORIES['build/demo']} -o build/demo",
    "LMDeploy 0.10 and newer: it loads no KV scales; its FP8 cache computes with 1.0": VERIFY,
}
# text that nothing here prints
NOT_COMPARED = {
    "fp8kv: 60 of 60 KV scales in use, FP8 cache, fingerprint 637046a600c70accf9b40b1860583ff7": "a log",
    "fp8kv: the checkpoint's config leaves layers 3, 7 in 16 bits; so are they here": "a log",
    "http://localhost:8461: 60 of 60 KV scales in use, fingerprint c28c44471380be50c0df4bb0fcf9765d": "two",
    "calibrate: 12,288 of 71,168 tokens, 1,512 tokens/s, 39 s left": "tests/calib/commands/test_progress.py",
}
BLOCKS = {page.relative_to(ROOT).as_posix(): [*blocks_of(page)] for page in PAGES}


def starts(command, *beginnings):
    return any(command.words[: len(words.split())] == words.split() for words in beginnings)


class Page:
    """One page, whose blocks run from top to bottom in the directory `here`."""

    def __init__(self, names, here, monkeypatch):
        self.names, self.here, self.monkeypatch = names, here, monkeypatch
        self.written, self.variables = set(), {"__name__": "page"}
        here.mkdir()
        (here / "benchmarks").symlink_to(ROOT / "benchmarks")
        for name, text in FILES.items():
            (here / name).write_text(text)
        monkeypatch.chdir(here)
        tools = here.parent / "bin"  # for what only a shell can run
        tools.mkdir()
        for name in APPS:
            program = f"from calib.commands.app import {APPS[name]} as run; run()"
            (tools / name).write_text(f"#!{sys.executable}\n{program}\n")
            (tools / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def problems(self, block):
        """What is wrong with a block, a line each."""
        self._put_names(block.text)
        return [*getattr(self, f"_{block.language}")(block)]

    def _put_names(self, text):
        for name in DIRECTORIES:
            named = re.search(rf"(?<![\w/.-]){re.escape(name)}(?!\w)", text)
            if named and name not in self.written:
                self.names.put(name, self.here)

    def _yaml(self, block):
        """A recipe, unless its first line names another file that it is."""
        document = yaml.safe_load(block.text)
        if not _NAMED.match(block.text):
            Recipe.model_validate(document)
        return ()

    def _json(self, block):
        json.loads(block.text)
        return ()

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
            directory, *entries = (line.split()[0] for line in block.text.splitlines())
            for entry in entries:
                if entry != "..." and not (self.here / directory / entry).exists():
                    yield f"{entry} is not in {directory}"
        elif first in SHOWN:
            yield from self._printed(block.text, Command(SHOWN[first]), first == OTHER_FIGURES)
        elif first not in NOT_COMPARED:
            yield "nobody knows what prints this: make it a session, ```console with `$ `"

    def _printed(self, shown, command, has_other_figures):
        self._put_names(command.line)
        printed = self.names.printed.get(command.line) or self._result(command)[0]
        if has_other_figures:
            shown, printed = without_figures(shown), without_figures(printed)
        if not shows(shown, printed, part=True):
            yield f"`{command.line}` prints\n{printed}"

    def _run(self, command):
        if starts(command, *NOT_RUN):
            for words in ("vllm serve", "trtllm-serve"):
                if starts(command, words) and not Path(command.words[len(words.split())]).is_dir():
                    yield f"`{command.line}`: there is nothing to serve"
            return
        self.written |= set(_WRITTEN.findall(command.line))
        printed, problem = self._result(command)
        if problem:
            yield problem
        elif not (starts(command, *VARIES) or shows(command.shown or "...", printed)):
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
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(["bash", "-c", line], cwd=directory, timeout=120, **pipes)
    return done.returncode, done.stdout


@pytest.fixture(scope="session")
def names(tmp_path_factory):
    return Names(tmp_path_factory.mktemp("names"))


@pytest.mark.parametrize("page", [page for page, blocks in BLOCKS.items() if blocks])
def test_a_page(page, names, tmp_path, monkeypatch):
    make_small(monkeypatch)
    fake_hub(monkeypatch, names, tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    there = Page(names, tmp_path / "there", monkeypatch)
    for block in BLOCKS[page]:
        if named := _NAMED.match(block.text):
            (there.here / named[1]).write_text(block.text)
    with running_hub() as hub, on(hub, tmp_path / "hub", monkeypatch):
        found = [(block.place, there.problems(block)) for block in BLOCKS[page]]
    problems = [f"{place}: {problem}" for place, several in found for problem in several]
    assert not problems, "\n" + "\n".join(problems)


def test_everything_that_is_excused_is_in_a_page():
    blocks = [block for page in BLOCKS.values() for block in page]
    commands = [c for b in blocks if b.language in ("bash", "console") for c in commands_of(b)]
    assert [words for words in NOT_RUN | VARIES if not any(starts(c, words) for c in commands)] == []
    assert {*SHOWN, *NOT_COMPARED} <= {block.first_line for block in blocks}


def test_the_notebook_shows_tables_and_pictures_and_is_committed_without_them(smollm2_directory, tmp_path):
    notebook = nbformat.read(ROOT / "examples" / "calibration.ipynb", as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    cells = NotebookClient(notebook, timeout=None, resources={"metadata": {"path": tmp_path}}).execute().cells
    outputs = {cell.id: cell.outputs for cell in cells if cell.cell_type == "code"}
    assert not any(each.get("name") == "stderr" for several in outputs.values() for each in several)
    html, png = ("run", "stats", "scales"), ("plot-heads", "plot-scales", "plot-both")
    for kind, names in (("text/html", html), ("image/png", png)):
        for name in names:
            assert any(kind in each.get("data", ()) for each in outputs[name]), name


def test_the_training_loop_trains_and_without_vllm_it_asks_for_it(monkeypatch):
    script, model = str(ROOT / "examples" / "training_loop.py"), tiny_model("llama")
    (shown,) = [block.text for block in BLOCKS["docs/howto/training-loop.md"]]
    assert shown == Path(script).read_text()
    batch = torch.randint(3, 128, (8, 128), generator=torch.Generator().manual_seed(1))
    before = scales_for(model, [batch])
    losses = [*runpy.run_path(script)["updates"](model, batch)]
    assert (len(losses), losses) == (3, sorted(losses, reverse=True))
    assert scales_for(model, [batch]) != before
    monkeypatch.setitem(sys.modules, "vllm", None)  # as where it is not installed
    with pytest.raises(SystemExit, match=r"needs vLLM .*: pip install vllm$"):
        runpy.run_path(script, run_name="__main__")
