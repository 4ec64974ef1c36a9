"""Calibration on pictures: what is measured where, what is warned of, and what is refused."""

import base64
import json

import pyarrow
import pytest
import torch
from evaluations import plain_comparison
from fake_quant import fake_quantized
from families import save_model, tiny_model
from PIL import Image
from pyarrow import parquet
from seeing import IMAGE, PLACES, save_seeing, seeing_model, seeing_smollm2, write_rows
from transformers import AutoModelForImageTextToText, AutoProcessor

from calib.capture.attention import map_attention
from calib.data.builtin import MORE_PICTURES, PICTURES, PYTHON_DOCS
from calib.errors import Fp8kvError
from calib.evaluate.inputs import SUITES, complete_recipe
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.summarize import summarize
from calib.evaluate.verdict import failures
from calib.files.text import parse_condition
from calib.job import run
from calib.models import load
from calib.recipe import Recipe, load_recipe
from calib.scales.stats_file import load_stats
from calib.scales.summary import TEXT_ALONE
from calib.transfer.merge import merge

FEW = {"device": "cpu", "dtype": "float32", "data.seq_len": 256, "data.allow_few_tokens": True}
TEXT = {"data.dataset": "builtin:python-docs", "data.samples": 2}
ASKED = "Which colour is this, and why?"


def calibrated(model, output, **settings):
    return run(str(model), load_recipe(None, FEW | settings), output, overwrite=True)


def evaluated(model, settings, *scales):
    suite = Suite(1, 3, 96, 0, 0, (), (), 1)
    return summarize(evaluate(str(model), load_recipe(None, FEW | settings), scales=scales, suite=suite))


def report(home):
    return json.loads((home / "out" / "fp8kv_calibration.json").read_text())


def of_rows(home, file="rows.jsonl", column="shown"):
    return {"data.dataset": str(home / file), "data.images": column}


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    home = tmp_path_factory.mktemp("llava")
    save_seeing("llava", home / "model")
    write_rows(home)
    return home


@pytest.mark.parametrize("family", PLACES)
def test_amax_and_kl_by_modality_are_those_of_the_whole_model(family, tmp_path):
    model, expected, kl = save_seeing(family, tmp_path / "model"), {}, ([], [])
    whole = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(model)
    for row in write_rows(tmp_path):
        text = f"user: {PLACES[family] * len(row['shown'])}{row['question']}\n"
        images = [[Image.open(tmp_path / name) for name in row["shown"]]]
        inputs = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
        is_picture = inputs["input_ids"][0] == IMAGE
        with torch.inference_mode():
            layers = whole(**inputs, use_cache=True).past_key_values.layers
        pair = plain_comparison(whole, fake_quantized(whole, map_attention(whole).unit_scales()), **inputs)
        for place, tokens in zip(kl, (~is_picture, is_picture), strict=True):
            place.append(torch.stack(pair)[:, tokens])
        for i, layer in enumerate(layers):
            tokens = torch.stack([layer.keys[0], layer.values[0]]).abs().amax(-1)
            table = torch.stack([tokens[..., ~is_picture].amax(-1), tokens[..., is_picture].amax(-1)], -1)
            expected[i] = torch.maximum(expected.get(i, table), table)
    calibrated(model, tmp_path / "out", **of_rows(tmp_path))
    for layer in load_stats(tmp_path / "out").layers.values():
        assert torch.equal(torch.stack([layer.k.modalities, layer.v.modalities]), expected[layer.layer_idx])
    said = report(tmp_path)
    assert [x["pictures"] for x in said["modalities"][2:4]] == expected[1][..., 1].tolist()
    tokens = {"llava": 4, "gemma3": 1, "idefics3": 5}[family]
    assert [said["dataset"][x] for x in ("pictures", "picture_tokens")] == [4, 4 * tokens]
    measured = evaluated(model, of_rows(tmp_path) | {"evaluation.variants": ["none"]})
    for row, parts in zip(measured.other_texts[0].variants["none"].modalities.values(), kl, strict=True):
        figures = torch.cat(parts, 1)
        assert row.tokens == figures.shape[1]
        assert [row.kl.value, row.top1.value] == pytest.approx(figures.mean(1).tolist(), rel=1e-4)
    alone = evaluated(model, TEXT | {"evaluation.variants": ["none"]})
    warned = [any("measured on text alone" in line for line in x.warnings) for x in (measured, alone)]
    assert (alone.other_texts, warned) == ([], [False, True])


def test_scales_of_text_alone_are_warned_of_and_fail_a_gate(smollm2_directory, tmp_path):
    model = save_seeing("idefics3", tmp_path / "model", *seeing_smollm2(smollm2_directory))
    text = calibrated(model, tmp_path / "text", **TEXT)
    pictures = calibrated(model, tmp_path / "out", **TEXT | {"data.dataset": PICTURES, "data.samples": 4})
    both = merge([text.output, pictures.output], tmp_path / "both")
    assert [TEXT_ALONE in result.warnings for result in (text, pictures, both)] == [True, False, False]
    assert any(note.startswith("pictures raise V of layer 3 ") for note in pictures.notes)
    stats = [[*load_stats(result.output).layers.values()][3].v for result in (text, pictures, both)]
    text_amax = torch.maximum(stats[0].amax.amax(1), stats[1].modalities[:, 0])
    assert torch.equal(stats[2].modalities, torch.stack([text_amax, stats[1].modalities[:, 1]], 1))
    few = {"data.dataset": PICTURES, "evaluation.variants": []}
    measured = evaluated(model, few, text.output, both.output)
    lines = failures(parse_condition("kl>0.05"), measured, measured.subjects)
    failed = [f"text: kl on the {x} of {MORE_PICTURES}" for x in ("text", "pictures")]
    assert [line.split(" is ")[0] for line in lines] == failed


def test_pictures_are_read_beside_text():
    shown = {"dataset": "a.json", "images": "x"}
    for data, evaluation, text, also in (
        ({"dataset": PICTURES}, {}, PYTHON_DOCS, [MORE_PICTURES]),
        (shown, {"also": ["all"]}, PYTHON_DOCS, ["a.json", "all"]),
        (shown, {"dataset": "a.txt"}, "a.txt", ["a.json"]),
        ({"dataset": PYTHON_DOCS, "images": "x"}, {"dataset": "a.json"}, PYTHON_DOCS, ["a.json"]),
        ({"images": "x"}, {"dataset": "a.txt", "also": ["a.json"]}, "a.txt", ["a.json"]),
    ):
        recipe = complete_recipe(Recipe(data=data, evaluation=evaluation), SUITES["quick"])
        assert (recipe.data.dataset, [*recipe.evaluation.also]) == (text, also)


def test_forms_of_rows_are_one_request(tmp_path):
    model = save_seeing("gemma3", tmp_path / "model")  # whose own place is another

    def fingerprint(file="rows.jsonl", column="image"):
        calibrated(model, tmp_path / "out", **of_rows(tmp_path, file, column))
        return report(tmp_path)["dataset"]["fingerprint"]

    def chat(**picture):
        parts = [{"type": "image"} | picture, {"type": "text", "text": ASKED}]
        return {"messages": [{"role": "user", "content": parts}], "images": None}

    for colour in ("red", "blue"):
        Image.new("RGB", (30, 40), colour).save(tmp_path / "a.png")
        png = (tmp_path / "a.png").read_bytes()
        table = pyarrow.Table.from_pylist([{"text": ASKED, "image": {"bytes": png, "path": None}}])
        parquet.write_table(table, tmp_path / f"{colour}.parquet")
        link = {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"}
        for row, column in (
            ({"text": ASKED, "image": "a.png"}, "image"),
            ({"text": f"user: <image>{ASKED}\n", "image": "a.png"}, "image"),
            ({"conversations": [{"from": "human", "value": f"<image>{ASKED}"}], "image": "a.png"}, "image"),
            (chat() | {"images": ["a.png"]}, None),
            (chat(path="a.png"), None),
            (chat(type="image_url", image_url=link), None),
        ):
            (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
            assert fingerprint(column=column) == fingerprint(f"{colour}.parquet"), row
    assert fingerprint("red.parquet") != fingerprint("blue.parquet")


def test_rows_that_cannot_be_read(llava, tmp_path):
    Image.new("RGB", (30, 40)).save(tmp_path / "0.png")
    for row, message in (
        ({"text": "Hello", "image": None}, "line 1: it has no picture in column 'image'"),
        ({"text": "Hello"}, "line 1: no column 'image' in the dataset; columns: text"),
        ({"text": "Hello", "image": "no.png"}, "its picture 'no.png' cannot be read .No such file"),
        ({"text": "Hello", "image": "rows.jsonl"}, "'rows.jsonl' cannot be read .cannot identify image"),
        ({"text": "Hello", "image": "https://a.b/c.png"}, "it is an address: download it"),
        ({"text": "<image> and <image>", "image": "0.png"}, "it has 2 places for pictures and 1 pictures"),
        ({"text": "Hello", "image": ["0.png"] * 130}, "reach to token 5.., and the model has 512 positions"),
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(Fp8kvError, match=message):
            calibrated(llava / "model", tmp_path / "out", **of_rows(tmp_path, column="image"))


def test_what_cannot_read_pictures_says_so(llava, tmp_path, monkeypatch):
    def refused(model, message, **settings):
        with pytest.raises(Fp8kvError, match=message):
            calibrated(model, tmp_path / "out", **(of_rows(llava) | settings))

    refused(save_model(tiny_model("llama"), tmp_path / "llama"), "with a model that takes them")
    refused(llava / "model", "runs layer by layer; use --offload none", offload="layerwise")
    refused(llava / "model", "of data that has them", **{"data.dataset": "random"})
    refused(
        save_model(seeing_model("llava"), tmp_path / "bare"), "has no processor|cannot load the processor"
    )
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    refused(llava / "model", "pictures need Pillow, which is not installed: pip install pillow")
