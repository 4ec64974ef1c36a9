"""Long documents: pairs that can be found, margins as of plain transformers, and everywhere in a report."""

import re
from itertools import pairwise

import pytest
import torch
from command_line import fp8kv, one_line_error
from fake_quant import fake_quantized
from families import save_model, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from calib.evaluate.page.page import render_html, render_markdown
from calib.evaluate.page.tables import printed_tables
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.summarize import summarize
from calib.recipe import load_recipe

LENGTH = 700


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model that reads bytes, with positions for a long document."""
    model = tiny_model("llama", vocab_size=260, max_position_embeddings=1024)
    path = save_model(model, tmp_path_factory.mktemp("model") / "bytes")
    letters = {x: i for i, x in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def evaluation(directory):
    choices = {"data.dataset": "random", "dtype": "float32", "evaluation.caches": ["int8_per_token_head"]}
    recipe = load_recipe(None, choices | {"evaluation.variants": ["none", "tensor", "k only"]})
    return evaluate(str(directory), recipe, suite=Suite(3, 2, 64, 0, 0, (), (), 1, LENGTH, 3))


def test_every_pair_is_spread_over_the_text_and_asked_for_once_at_its_end(evaluation):
    decode, orders = evaluation.setup.tokenizer.decode, set()
    for document in evaluation.text.long_documents:
        ids, text = document.token_ids, decode(document.token_ids)
        found = [*re.finditer(r"\n(\w+): (\w+)\n", text)]
        pairs = [each.groups() for each in found]
        assert sorted(pairs[:16]) == sorted({*pairs}) == sorted(pairs[16:])
        gaps = [b.start() - a.start() for a, b in pairwise(found[:17])]
        assert max(gaps) < 2 * min(gaps)
        assert (len(ids), found[-1].end()) == (LENGTH, len(text))
        assert torch.equal(ids[document.questions + 1], document.answers[:, 0])
        assert [decode(row[0]) for row in document.answers] == [word[0] for _, word in pairs[16:]]
        assert all(len({*row.tolist()}) == 16 for row in document.answers)
        orders.add(tuple(pairs))
    assert len(orders) == 3


@torch.inference_mode()
def test_margins_and_figures_by_position_are_those_of_plain_transformers(evaluation, directory):
    model, rows = (
        AutoModelForCausalLM.from_pretrained(directory).float().eval(),
        summarize(evaluation).variants,
    )
    scales, margins, last = evaluation.measured["tensor"].variant.scales, [], []
    for document in evaluation.text.long_documents:
        own = model(document.token_ids[None]).logits[0].log_softmax(-1)
        with fake_quantized(model, scales):
            rounded = model(document.token_ids[None]).logits[0].log_softmax(-1)
        words = [x[document.questions].gather(1, document.answers) for x in (own, rounded)]
        margins.append(torch.stack([each[:, 0] - each[:, 1:].max(1).values for each in words]))
        kl = (own.exp() * (own - rounded)).sum(-1)
        last.append(torch.stack([kl, own.argmax(-1) == rounded.argmax(-1)])[:, 512:])
    (own, rounded), (kl, top1), long = torch.cat(margins, 1), torch.cat(last, 1), rows["tensor"].long
    for found, want in (
        (long.margin, rounded),
        (long.margin_change, rounded - own),
        (long.margin_moved, (rounded - own).abs()),
        (long.retrieved, (rounded > 0).float()),
        (long.kl_by_position[-1], kl),
        (long.kl_by_position[-1].top1, top1),
    ):
        assert found.value == pytest.approx(want.mean().item(), rel=0.02, abs=1e-6)
    assert [each.to for each in long.kl_by_position][-3:] == [256, 512, LENGTH]
    assert 0 < rows["int8_per_token_head"].long.margin_moved.value < long.margin_moved.value
    assert {name for name, row in rows.items() if row.long is None} == {"bf16", "eager", "k only"}


def test_every_form_of_the_report_has_them(evaluation):
    report = summarize(evaluation)
    long = report.variants[report.subject].long
    shown = f"{long.margin_moved.value:.3f}", f"{long.kl_by_position[-1].top1.value:.1%}"
    printed = "\n".join(" ".join(line) for table in printed_tables(report) for line in table.lines)
    for text in (printed, render_markdown(report), render_html(report)):
        assert all(figure in text for figure in shown)
    assert "2,100 tokens in 3 long documents" in render_html(report)


def test_what_cannot_be_asked_is_refused(directory, tmp_path):
    small = ("--dataset", "random", "--samples", "2", "--seq-len", "32", "--variants", "none", "--long")
    one_line_error(fp8kv("eval", directory, *small, "1025"), "--long 1025 is longer than the model's 1024")
    one_line_error(fp8kv("eval", directory, *small, "300"), "--long 300 has no room for 16 pairs", "give 4")
    words = save_model(tiny_model("llama", max_position_embeddings=1024), tmp_path / "words")
    one_line_error(
        fp8kv("eval", words, *small, "900"), "--long: this tokenizer does not tell the words apart"
    )
