"""What the documentation's names stand for where its examples run, and what is made smaller."""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import datasets
import pytest
from coded_forms import FORMS
from command_line import CliRunner
from doc_blocks import ROOT, Command
from families import tiny_model
from seeing import save_seeing, write_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import calib.commands.app as programs
from calib.data import builtin, loading
from calib.evaluate import inputs
from calib.evaluate.report import Suite
from calib.models import sources

# as in pyproject.toml
APPS = {"fp8kv": "main", "fp8kv-calibrate": "calibrate_main", "fp8kv-eval": "eval_main"}
PROMPTS = "".join(f'{{"prompt": "Count to {i}, please, and say what comes after {i}."}}\n' for i in range(40))
FILES = {
    "prompts.jsonl": PROMPTS,
    "mine.jsonl": PROMPTS,
    "mine.yaml": "strategy: attn_head\ndata: {samples: 8}\nevaluation: {fail_if: ['kl>100']}\n",
    "capitals.jsonl": '{"country": "France", "cities": ["Paris", "Rome"]}\n',
}
# directories by the commands that make them, in this order
_SMALL = "--dataset prompts.jsonl --samples 4"
DIRECTORIES = {
    **dict.fromkeys(("MODEL", "QUANTISED_MODEL", "MODEL_DIRECTORY", "path/to/model", "TRAFFIC")),
    **dict.fromkeys(("VLM", "photos")),
    **dict.fromkeys(("OUTPUT", "RUN_A", "A"), f"fp8kv-calibrate MODEL {_SMALL}"),
    **dict.fromkeys(("DIR", "B"), f"fp8kv-calibrate MODEL {_SMALL} --set headroom=1.25"),
    "RUN_B": f"fp8kv-calibrate MODEL {_SMALL} --seed 1",
    **dict.fromkeys(("REPORT_A", "REPORT_B"), "fp8kv-eval MODEL --variants none,tensor"),
    "build/demo": "fp8kv-calibrate builtin:smollm2 --dataset builtin:python-docs "
    "--strategy attn_head --dtype float32 --samples 8",
}
_CARD = """---
configs: [{config_name: default, data_files: [{split: train_sft, path: a.jsonl}]}]
---
"""
_CHAT = '{"messages": [{"role": "user", "content": "Hello, number %d. How are you today?"}]}\n'


class Names:
    def __init__(self, home):
        self.home, self.printed = home, {}  # by commands
        for name, text in FILES.items():
            (home / name).write_text(text)

    def put(self, name, here):
        shutil.rmtree(here / name, ignore_errors=True)
        shutil.copytree(self.made(name), here / name, copy_function=_copy)

    def made(self, name):
        path = self.home / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._make(name, path)
        return path

    def _make(self, name, path):
        if command := DIRECTORIES[name]:
            self.made("MODEL")
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(self.home)
                done = invoke(Command(f"{command} -o {name}"))
            assert done.exit_code == 0, done.output
            self.printed[f"{command} -o {name}"] = done.output
        elif name == "path/to/model":  # that build/demo is made from
            path.symlink_to(sources.builtin_model("builtin:smollm2"))
        elif name == "TRAFFIC":  # that a running engine wrote
            shutil.copytree(self.made("OUTPUT"), path)
            head = {"tokens": [500], "clipped": [0], "saturated": [0], "zero": [0]}
            layer = {"layer": 0, "tokens": 500, "channels": 16, "edge": 432.0, "k": head, "v": head}
            facts = {"fp8kv_watch": 1, "engine": "vLLM 0.32.0", "model": "DIR", "fingerprint": "7"}
            facts |= {"since": "2026-11-27T12:00:00+00:00", "written": "2026-11-27T13:00:00+00:00"}
            facts |= {"tokens": 500, "layers": [layer]}
            (path / "fp8kv_watch.json").write_text(json.dumps(facts))
        elif name == "VLM":
            save_seeing("llava", path)
        elif name == "photos":
            path.mkdir()
            write_rows(path)
        elif name == "QUANTISED_MODEL":
            FORMS["compressed-fp8-channel"].quantised(self.made("MODEL"), path)
        else:
            save_model(path)


def _copy(source, target):  # what is large is only linked: no command writes into a weight file
    copy = os.link if Path(source).stat().st_size > 2**20 else shutil.copy
    copy(source, target)


def invoke(command):
    return CliRunner().invoke(getattr(programs, APPS[command.words[0]]), command.words[1:])


def save_model(directory):
    # eight GPUs can share its heads
    sizes = {"vocab_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 16}
    tiny_model("llama", **sizes, max_position_embeddings=2048).save_pretrained(directory)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    alphabet = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=[*special.values()], **alphabet)
    texts = [text for _, text in builtin.builtin_rows(builtin.PYTHON_DOCS, 32)]
    tokenizer.train_from_iterator(texts, trainer)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)
    whole.save_pretrained(directory)


def make_small(monkeypatch):
    whole = builtin.builtin_rows

    def few_rows(dataset, seq_len):
        return [(at, row[:100] if isinstance(row, str) else row) for at, row in whole(dataset, seq_len)[:24]]

    monkeypatch.setattr(loading, "builtin_rows", few_rows)
    for name in inputs.SUITES:
        monkeypatch.setitem(inputs.SUITES, name, Suite(4, 8, 32, 1, 2, (), (), 1))


def fake_hub(monkeypatch, names, home):
    """Every model of the Hub is MODEL, or a config of `benchmarks/`; every dataset a few chats."""

    def config(repo, file):
        known = ROOT / "benchmarks/configs" / f"{repo.partition('/')[2].lower()}.json"
        return str(known if known.exists() else names.made("MODEL") / file)

    monkeypatch.setattr(sources, "snapshot_download", lambda repo, **_: str(names.made("MODEL")))
    monkeypatch.setattr(sources, "hf_hub_download", config)
    (chats := home / "chats").mkdir()
    (chats / "README.md").write_text(_CARD)
    (chats / "a.jsonl").write_text("".join(_CHAT % i for i in range(96)))

    def of_chats(function, path, *arguments, **options):
        is_of_hub = "/" in path and not Path(path).exists()
        return function(str(chats) if is_of_hub else path, *arguments, **options)

    for name in ("get_dataset_split_names", "load_dataset"):
        monkeypatch.setattr(datasets, name, partial(of_chats, getattr(datasets, name)))
