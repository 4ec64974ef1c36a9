"""Every fenced block of README, CONTRIBUTING and docs is run, read or compared, page by page.

Blocks of a page run from top to bottom in one directory, in which what they name is there:
`doc_names` says what `MODEL` and `OUTPUT` are, and what is made smaller than the commands ask for.
Commands with the same output are alternatives: what was there goes. `# exit 1` behind a command
says that it is to fail, `# exit 1 if ...` that it may.
"""

import pytest
from doc_blocks import PAGES, ROOT, blocks_of, commands_of
from doc_names import DIRECTORIES, Names, fake_hub, make_small
from doc_page import Page, Rules, starts
from fake_hub import on, running_hub

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
    "fp8kv bench": "takes minutes without a GPU; tests/calib/test_bench.py",
    "fp8kv-eval MODEL --tasks hellaswag,gsm8k": "lm-eval fetches these from the Hub itself",
}
SERVED = ("vllm serve", "trtllm-serve")
# runs, but prints something else on every machine
VARIES = {"fp8kv generate": "words and speed of one machine"}
# text that is a part of what a command prints, by its first line; figures are those of more text
SHOWN = {
    "build/demo, LlamaForCausalLM, on one GPU": "fp8kv verify build/demo",
    "FP8 KV-cache scales, strategy attn_head": f"{DIRECTORIES['build/demo']} -o build/demo",
    "LMDeploy 0.10 and newer: it loads no KV scales; its FP8 cache computes with 1.0": (
        "fp8kv verify build/demo"
    ),
}
OTHER_FIGURES = {"FP8 KV-cache scales, strategy attn_head"}
# text that nothing here prints
NOT_COMPARED = {
    "fp8kv: 60 of 60 KV scales in use, FP8 cache": "an engine's log; tests/calib/serving",
    "calibrate: 12,288 of 71,168 tokens, 1,512 tokens/s, 39 s left": (
        "one machine's speed; tests/calib/commands/test_progress.py"
    ),
}

BLOCKS = {page.relative_to(ROOT).as_posix(): [*blocks_of(page)] for page in PAGES}
COMMANDS = [
    command
    for blocks in BLOCKS.values()
    for b in blocks
    if b.language in ("bash", "console")
    for command in commands_of(b)
]


@pytest.fixture(scope="session")
def names(tmp_path_factory):
    return Names(tmp_path_factory.mktemp("names"))


@pytest.mark.parametrize("page", [page for page, blocks in BLOCKS.items() if blocks])
def test_a_page(page, names, tmp_path, monkeypatch):
    make_small(monkeypatch)
    fake_hub(monkeypatch, names, tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    rules = Rules(NOT_RUN, SERVED, VARIES, SHOWN, OTHER_FIGURES, NOT_COMPARED)
    there = Page(names, tmp_path / "there", monkeypatch, rules)
    there.put_files(BLOCKS[page])
    with running_hub() as hub, on(hub, tmp_path / "hub", monkeypatch):
        found = [(block.place, there.problems(block)) for block in BLOCKS[page]]
    problems = [f"{place}: {problem}" for place, several in found for problem in several]
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize("table", [NOT_RUN, VARIES])
def test_every_command_that_is_excused_is_in_a_page(table):
    assert [start for start in table if not any(starts(c, start) for c in COMMANDS)] == []


def test_every_text_that_is_excused_is_in_a_page():
    first_lines = {block.first_line for blocks in BLOCKS.values() for block in blocks}
    assert {*SHOWN, *OTHER_FIGURES, *NOT_COMPARED} <= first_lines
