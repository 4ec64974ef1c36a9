"""From a recipe to batches of samples of one source, in an order of the seed alone; a failure is one line."""

import hashlib
import json
import random
import re
import sysconfig
import unicodedata
from collections import Counter
from importlib import import_module
from pathlib import Path
from pydoc_data.topics import topics
from unittest.mock import Mock

import datasets
import pytest
import torch
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HTTPError, LocalEntryNotFoundError
from transformers import GenerationConfig

from calib.data import check_dataset, load_data, make_batches, resolve_batch_size
from calib.data.batches import shared_batch_size
from calib.data.builtin import BUILTIN, LONG_CHARACTERS, builtin_rows
from calib.data.generated import sample_at_random, sample_from_model
from calib.data.hub_rows import find_split, stream_rows
from calib.data.loading import open_source
from calib.errors import InputError
from calib.formats.output import dataset_facts
from calib.recipe import DataRecipe

BOS, EOS, PAD = 0, 1, 99
DOCS = "builtin:python-docs"
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def fingerprint(*samples):
    words = (word for ids in samples for word in (len(ids), *ids))
    return hashlib.sha256(b"".join(word.to_bytes(8, "little") for word in words)).hexdigest()


def test_a_local_file_becomes_samples_with_source_and_warnings(tokenizer, tmp_path):
    mixed = tmp_path / "mixed.jsonl"
    rows = [{"messages": CHAT}, {"prompt": "a", "answer": "b", "input": 3}, {"text": " "}]
    mixed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_data(DataRecipe(dataset=str(mixed), split="x", samples=9), tokenizer, None)
    assert {tokenizer.decode(ids) for ids in loaded.samples} == {"<s><|user|>hi<|assistant|>yo", "<s>a\n\nb"}
    assert (loaded.num_tokens, loaded.source) == (7 + 5, str(mixed))
    assert {*loaded.line.partition("; columns read: ")[2].split(", ")} == {
        "messages (chats)", "prompt (text)", "answer (text)",
    }  # fmt: skip
    assert loaded.fingerprint == fingerprint(*loaded.samples)
    assert loaded.warnings == (
        f"data.split 'x' is ignored: dataset '{mixed}' has none",
        f"9 samples were asked for and dataset '{mixed}' has 2; all 2 are used",
    )


def test_python_docs_fill_64_samples_of_512_tokens(tokenizer):
    settings = {"config": "c", "split": "s", "column": "x"}
    recipe = DataRecipe(dataset=DOCS, samples=64, seq_len=512, **settings)
    loaded = load_data(recipe, tokenizer, None)
    assert [len(sample) for sample in loaded.samples] == [512] * 64
    said = tuple(f"data.{k} '{v}' is ignored: dataset '{DOCS}' has none" for k, v in settings.items())
    assert (loaded.source, loaded.warnings) == (DOCS, said)
    assert load_data(recipe, tokenizer, None) == loaded
    assert load_data(recipe.model_copy(update={"seed": 1}), tokenizer, None).fingerprint != loaded.fingerprint


def test_generated_samples_come_with_a_warning(tokenizer, tiny_llama):
    for dataset, warning in (
        ("self", "'self' is text that the model made up"),
        ("random", "'random' is uniform random token ids, what vLLM's removed on-the-fly"),
    ):
        recipe = DataRecipe(dataset=dataset, column="text", samples=3, seq_len=8)
        loaded = load_data(recipe, tokenizer, lambda: tiny_llama)
        assert (len(loaded.samples), loaded.source) == (3, dataset)
        assert loaded.warnings[0].startswith(f"dataset {warning}")
        assert loaded.warnings[1] == f"data.column 'text' is ignored: dataset '{dataset}' has none"
        assert loaded == load_data(recipe, tokenizer, lambda: tiny_llama)


def test_local_rows_are_shuffled_by_the_seed_and_files_that_are_not_read_are_a_warning(tmp_path):
    ten_lines = tmp_path / "ten.jsonl"
    ten_lines.write_text("".join(f'"line {i}"\n' for i in range(10)))
    order = list(range(10))
    random.Random(7).shuffle(order)
    name, rows, warnings, folder = open_source(DataRecipe(dataset=str(ten_lines), seed=7, column="x"))
    assert (name, warnings, folder) == (str(ten_lines), (), tmp_path)
    assert list(rows) == [(f"{ten_lines}, line {i + 1}", f"line {i}") for i in order]
    for name in (".DS_Store", ".gitattributes"):
        (tmp_path / name).touch()
    assert open_source(DataRecipe(dataset=str(tmp_path))).warnings == ()
    for name in ("b.csv", *"cdefghij"):
        (tmp_path / name).touch()
    assert open_source(DataRecipe(dataset=str(tmp_path))).warnings == (
        f"dataset '{tmp_path}': not read are b.csv, c, d, e, f, g, ... (9 in all); "
        "supported: .jsonl, .json, .parquet, .txt, directly in it",
    )


@pytest.mark.parametrize(("config", "name"), [(None, "o/d [train]"), ("en", "o/d (en) [train]")])
def test_any_other_name_is_a_dataset_on_the_hub_and_what_was_found_is_recorded(
    monkeypatch, config, name, tokenizer
):
    asked = []

    def load(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.IterableDataset.from_generator(lambda: iter([{"text": "streamed"}]))

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *args: ["test", "train"])
    monkeypatch.setattr(datasets, "load_dataset", load)
    source = open_source(recipe := DataRecipe(dataset="o/d", config=config))
    assert (source.name, list(source.rows)) == (name, [("row 1 as shuffled", {"text": "streamed"})])
    assert asked == [(("o/d", config), {"split": "train", "streaming": True})]
    loaded = load_data(recipe, tokenizer, None)
    facts = dataset_facts(loaded)
    assert (facts["source"], facts["columns"]) == (name, {"text": "text"})
    named = recipe.model_copy(update={"split": "train", "column": "text"})
    assert load_data(named, tokenizer, None) == loaded


def texts(name, seq_len=256):
    return [row for _, row in builtin_rows(f"builtin:{name}", seq_len)]


def test_prose_and_code_are_the_whole_in_order_in_pieces_long_enough(monkeypatch, tmp_path):
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    code = "\n\n".join(file.read_text(errors="replace") for file in files)
    prose = "\n\n".join(topics[name] for name in sorted(topics))
    assert LONG_CHARACTERS == 4 * 2048 * 6
    named = (("code", code, 256 * 6), ("python-docs", prose, 256 * 6), ("long", prose, LONG_CHARACTERS))
    for name, whole, characters in named:
        pieces = texts(name)
        assert whole.startswith("\n\n".join(pieces))
        assert len(whole) - len("\n\n".join(pieces)) < characters + 2
        assert min(map(len, pieces)) >= characters - 2
        assert len(pieces) > 5
    assert texts("long", 1_000_000) == [prose]
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(InputError, match=rf"'{tmp_path}' has no .py file; use another dataset"):
        texts("code")


def test_a_chat_asks_about_a_topic_twice_and_gets_parts_of_it():
    chats = [row["messages"] for row in texts("chat")]
    assert len(chats) > 100
    asked = set()
    for messages in chats:
        assert [m["role"] for m in messages] == ["user", "assistant"] * 2
        question, first, _, second = (m["content"] for m in messages)
        asked.add(topic := question.split("about ")[1].split("?")[0])
        assert f"{first}\n\n{second}" in topics[topic]
    assert asked >= {"for", "with"}


def test_every_script_is_there_in_pieces_without_latin_letters():
    found = Counter()
    for piece in texts("script"):
        kinds = Counter(unicodedata.name(c, "").split()[0] for c in piece if c.isalpha())
        assert kinds["LATIN"] == 0
        # Japanese is written in three scripts
        found["HIRAGANA" if kinds["HIRAGANA"] else kinds.most_common(1)[0][0]] += len(piece)
    assert set(found) == {"ARABIC", "CJK", "CYRILLIC", "DEVANAGARI", "HIRAGANA"}
    assert min(found.values()) > 2000


def test_names_of_datasets_are_checked_without_reading_them(tmp_path):
    for name in ("random", "self", *BUILTIN, "org/chat"):
        check_dataset(name)
    for check in (check_dataset, lambda name: builtin_rows(name, 8)):
        with pytest.raises(InputError, match="no built-in dataset 'builtin:wiki'; built in: builtin:p"):
            check("builtin:wiki")
    with pytest.raises(InputError, match=r"has no \.jsonl, \.json, \.parquet, \.txt file directly in it"):
        check_dataset(str(tmp_path))


def recipe_of(**settings):
    return DataRecipe(**({"samples": 40, "seq_len": 64, "seed": 3, "batch_size": 16} | settings))


def test_self_samples_start_at_bos_and_end_at_eos_or_seq_len_and_depend_on_the_seed(
    tokenizer, tiny_llama, monkeypatch
):
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # of which a model on the CPU needs none
    samples = sample_from_model(recipe_of(), tokenizer, tiny_llama)
    assert torch.equal(torch.rand(3), expected)  # the random state is left alone
    assert len(samples) == 40
    for sample in samples:
        assert sample[0] == BOS
        assert EOS not in sample[1:-1]
        assert len(sample) == 64 or sample[-1] == EOS
    assert min(map(len, samples)) < max(map(len, samples)) == 64
    assert sample_from_model(recipe_of(), tokenizer, tiny_llama) == samples
    assert sample_from_model(recipe_of(seed=4), tokenizer, tiny_llama) != samples


def test_self_draws_from_the_whole_distribution_of_the_model(tokenizer, tiny_llama):
    # nearly uniform whatever came before, but without ties, which top-k would keep
    tiny_llama.lm_head = torch.nn.Linear(16, 200)
    with torch.no_grad():
        tiny_llama.lm_head.weight.zero_()
        tiny_llama.lm_head.bias.copy_(torch.linspace(0, 1e-3, 200))
    samples = sample_from_model(recipe_of(samples=100), tokenizer, tiny_llama)
    counts = torch.bincount(torch.tensor([i for s in samples for i in s[1:]]), minlength=200)
    # about 25 draws of each of 200 ids are expected; 60 would be 7 sigma away
    assert 0 < counts.min() <= counts.max() < 60


def test_self_ignores_how_a_model_prefers_to_be_sampled(tokenizer, tiny_llama):
    few = recipe_of(samples=8, seq_len=32)
    plain = sample_from_model(few, tokenizer, tiny_llama)
    unchanged = tiny_llama.generation_config.to_dict()
    for name, value in {
        "top_k": 2, "top_p": 0.1, "min_p": 0.9, "typical_p": 0.1, "temperature": 0.1, "epsilon_cutoff": 0.05,
        "eta_cutoff": 0.99, "repetition_penalty": 5.0, "no_repeat_ngram_size": 1,
    }.items():  # fmt: skip
        tiny_llama.generation_config = GenerationConfig(**{**unchanged, name: value})
        assert sample_from_model(few, tokenizer, tiny_llama) == plain, name


def test_self_draws_again_when_the_model_ends_at_once_and_gives_up_at_last(tokenizer, tiny_llama):
    tiny_llama.generation_config.eos_token_id = list(range(10, 200))  # 190 of 200 ids end a sample
    samples = sample_from_model(recipe_of(samples=5), tokenizer, tiny_llama)
    assert len(samples) == 5
    assert all(1 < sample[1] < 10 or sample[1] == BOS for sample in samples)
    tiny_llama.generation_config.eos_token_id = list(range(200))
    with pytest.raises(InputError, match="ends every sample at its first token; use real text"):
        sample_from_model(recipe_of(), tokenizer, tiny_llama)


def test_self_without_bos_starts_at_eos_and_without_either_at_random(byte_tokenizer, tiny_llama):
    samples = sample_from_model(recipe_of(), byte_tokenizer(bos_token=None), tiny_llama)
    assert {sample[0] for sample in samples} == {EOS}
    assert min(map(len, samples)) > 1  # the EOS at the start does not end the sample
    neither = byte_tokenizer(bos_token=None, eos_token=None)
    samples = sample_from_model(recipe_of(), neither, tiny_llama)
    assert len({s[0] for s in samples}) > 20
    assert sample_from_model(recipe_of(), neither, tiny_llama) == samples


def test_random_covers_the_whole_vocabulary_and_nothing_else(tokenizer, tiny_llama):
    samples = sample_at_random(recipe_of(samples=100), tokenizer, tiny_llama)
    assert [len(sample) for sample in samples] == [64] * 100
    # the tokenizer knows 261 ids, the model 200
    assert {i for sample in samples for i in sample} == set(range(200))
    assert sample_at_random(recipe_of(samples=100), tokenizer, tiny_llama) == samples
    assert sample_at_random(recipe_of(samples=100, seed=4), tokenizer, tiny_llama) != samples
    tiny_llama.config.vocab_size = 1000  # embeddings that no token has are left out
    samples = sample_at_random(recipe_of(samples=100), tokenizer, tiny_llama)
    assert {i for sample in samples for i in sample} == set(range(len(tokenizer)))


def samples_of(*lengths):
    return [[i + 1] * length for i, length in enumerate(lengths)]


def test_every_sample_is_in_one_batch_and_masked_padding_on_the_right_stays_below_five_percent():
    (batch,) = make_batches([[1] * 19, [2] * 20, [3] * 20], batch_size=3, pad_id=PAD)
    assert (batch.sample_ids, batch.num_tokens) == ((1, 2, 0), 59)
    expected = torch.tensor([[2] * 20, [3] * 20, [1] * 19 + [PAD]])
    assert torch.equal(batch.input_ids, expected)
    assert torch.equal(batch.attention_mask, (expected != PAD).long())
    assert batch.input_ids.dtype == batch.attention_mask.dtype == torch.int64
    assert make_batches([], batch_size=7, pad_id=PAD) == []
    for short, groups in ((19, [(0, 1)]), (18, [(0,), (1,)])):  # 1/40 and 2/40 = 5 % are padding
        batches = make_batches(samples_of(20, short), batch_size=8, pad_id=PAD)
        assert [batch.sample_ids for batch in batches] == groups
    rng, read = random.Random(0), 0
    samples = samples_of(*(rng.randint(1, 300) for _ in range(200)))
    batches = make_batches(samples, batch_size=7, pad_id=PAD)
    assert sorted(i for batch in batches for i in batch.sample_ids) == list(range(200))
    assert max(len(batch.sample_ids) for batch in batches) == 7
    for batch in batches:
        assert 1 - batch.num_tokens / batch.input_ids.numel() < 0.05
        assert batch.first_token == read
        read += batch.num_tokens
        for row, i in enumerate(batch.sample_ids):
            assert batch.input_ids[row][batch.attention_mask[row].bool()].tolist() == samples[i]


def test_the_largest_batch_is_first_and_the_seed_orders_the_others():
    first, other, again = (
        [batch.sample_ids[0] for batch in make_batches(samples_of(*range(30, 60)), 1, PAD, seed=seed)]
        for seed in (1, 2, 1)
    )
    assert first == again != other
    for order in (first, other):
        assert (order[0], sorted(order)) == (29, [*range(30)])
        assert order[1:] != sorted(order[1:], reverse=True)


def test_samples_that_are_skipped_whole_are_not_read():
    batches = make_batches(samples_of(3, 2, 8, 4), 1, PAD, skip_first=3)
    assert sorted(batch.sample_ids for batch in batches) == [(2,), (3,)]
    assert {batch.skip_first for batch in batches} == {3}
    with pytest.raises(InputError, match=r"data.skip_first 8 leaves nothing.* has 8 tokens; set"):
        make_batches(samples_of(3, 8), 1, PAD, skip_first=8)


@pytest.mark.parametrize("processes", [1, 3, 8, 40])
@pytest.mark.parametrize("lengths", [[512] * 40, [512] * 9, [*range(20, 400, 7)]])
def test_auto_gives_every_process_a_batch_and_is_left_alone_where_it_does(lengths, processes):
    samples, auto = samples_of(*lengths), DataRecipe(seq_len=512)
    size = shared_batch_size(auto, "cpu", samples, processes)
    assert len(make_batches(samples, size, PAD)) >= min(processes, len(samples))
    if len(make_batches(samples, 8, PAD)) >= processes:
        assert size == 8
    assert [resolve_batch_size(DataRecipe(seq_len=n), "cuda") for n in (512, 100_000)] == [32, 1]
    # what the user typed is obeyed, whatever follows from it
    assert shared_batch_size(DataRecipe(batch_size=7), "cpu", samples, processes) == 7


# huggingface_hub 1.x uses httpx, 2.x its successor httpx2
httpx = import_module(HTTPError.__module__.partition(".")[0])

CARD = """---
configs:
- config_name: big
  data_files: [{split: test, path: b.jsonl}, {split: train, path: a.jsonl}]
- config_name: odd
  data_files: [{split: night, path: a.jsonl}, {split: day, path: b.jsonl}]
- config_name: chat
  data_files: [{split: train, path: a.jsonl}, {split: train_sft, path: b.jsonl}]
---
"""


@pytest.fixture
def repository(tmp_path):  # `datasets` reads a local directory as it reads a repository
    (tmp_path / "README.md").write_text(CARD)
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "row {i}"}}\n' for i in range(20)))
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
    return str(tmp_path)


def test_the_split_asked_for_or_the_preferred_one(repository):
    for config, split, found in (("big", None, "train"), ("chat", None, "train_sft"), ("odd", "day", "day")):
        assert find_split(DataRecipe(dataset=repository, config=config, split=split)) == found


def test_the_order_of_rows_depends_on_the_seed_alone(repository, tmp_path):
    def texts(seed):
        recipe = DataRecipe(dataset=repository, config="big", seed=seed)
        return [row["text"] for row in stream_rows(recipe, "train")]

    first = texts(seed=1)
    assert sorted(first) == sorted(f"row {i}" for i in range(20))
    assert texts(seed=1) == first != texts(seed=2)
    (tmp_path / "a.jsonl").write_text('{"text": ')
    with pytest.raises(InputError, match=r"cannot be read: .*JSON parse error.*; use another data"):
        texts(seed=1)


def test_an_unknown_split_or_config_lists_the_legal_ones(repository):
    for config, split, message in (
        ("big", "dev", "no split 'dev' in dataset '{}'; splits: test, train; choose one with `--set data.sp"),
        ("odd", None, "cannot choose a split of dataset '{}'; splits: night, day; choose one with"),
        ("no", None, "BuilderConfig 'no' not found. Available: ['big', 'odd', 'chat']; choose one"),
        (None, None, "Config name is missing. Please pick one among the available configs: ['big', "),
        (None, None, "'chat']; choose one with `--set data.config=NAME`"),
    ):
        with pytest.raises(InputError, match=re.escape(message.format(repository))):
            find_split(DataRecipe(dataset=repository, config=config, split=split))


def answer(kind, status):
    response = httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co"))
    return kind(f"{status} answer\n\nof the server", response=response)


LOST = ValueError("no split names")
LOST.__cause__ = ConnectionError("gone")
UNREACHABLE = (
    "the Hugging Face Hub cannot be reached for dataset 'o/d' (",
    "; with no network use `--dataset builtin:python-docs` or a local file",
)
GATED = (
    "dataset 'o/d' is gated: accept its terms on https://huggingface.co/datasets/o/d ",
    "and run `hf auth login`, or use an open dataset",
)
ABSENT = (
    "no dataset 'o/d' on the Hugging Face Hub, or it is private: check the name, ",
    "give the path of a local file, or use `--dataset builtin:python-docs`",
)
QUOTED = "dataset 'o/d' cannot be read: ", "; use another dataset or a local file"


def test_what_the_hub_fails_with_is_one_line_that_says_what_to_do(monkeypatch):
    for error, expected in (
        (ConnectionError("Couldn't reach 'o/d' on the Hub (LocalEntryNotFoundError)"), UNREACHABLE),
        (LocalEntryNotFoundError("not on disk"), UNREACHABLE),
        (FileNotFoundError("Couldn't find any data file at /x. LocalEntryNotFoundError: no"), UNREACHABLE),
        (answer(HfHubHTTPError, 503), UNREACHABLE),
        (LOST, UNREACHABLE),
        (answer(GatedRepoError, 403), GATED),
        (DatasetNotFoundError("Dataset 'o/d' is a gated dataset on the Hub. You must be au"), GATED),
        (DatasetNotFoundError("Dataset 'o/d' doesn't exist on the Hub or cannot be accessed."), ABSENT),
        (FileNotFoundError("Couldn't find any data file at /data/o/d."), ABSENT),
        (RuntimeError("Dataset scripts are no longer supported, but found d.py"), QUOTED),
        (ValueError("page " * 1000), QUOTED),
    ):
        monkeypatch.setattr(datasets, "get_dataset_split_names", Mock(side_effect=error))
        with pytest.raises(InputError) as caught:
            find_split(DataRecipe(dataset="o/d"))
        message, (begins, ends) = str(caught.value), expected
        assert message.startswith(begins)
        assert message.endswith(ends)
        if expected in (GATED, ABSENT):
            assert message == begins + ends
        elif len(str(error)) < 100:
            assert " ".join(str(error).split()) in message
        assert len(message) < 400
