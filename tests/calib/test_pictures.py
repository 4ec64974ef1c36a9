"""Calibration on pictures: what is measured where, what is warned of, and what is refused."""

import base64
import json

import pyarrow
import pytest
import torch
from families import save_model, tiny_model
from PIL import Image
from pyarrow import parquet
from seeing import IMAGE, PLACES, save_seeing, seeing_model, write_rows
from transformers import AutoModelForImageTextToText, AutoProcessor

from calib.errors import Fp8kvError
from calib.evaluate.run import run_evaluation
from calib.job import run
from calib.models import load
from calib.recipe import load_recipe
from calib.scales.stats_file import load_stats
from calib.scales.summary import TEXT_ALONE
from calib.transfer.merge import merge

FEW = {"device": "cpu", "dtype": "float32", "data.seq_len": 256, "data.allow_few_tokens": True}
TEXT = {"data.dataset": "builtin:python-docs", "data.samples": 2}
ASKED = "Which colour is this, and why?"


def calibrated(model, output, **settings):
    return run(str(model), load_recipe(None, FEW | settings), output, overwrite=True)


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
def test_amax_by_modality_is_that_of_the_whole_models_own_cache(family, tmp_path):
    model, expected = save_seeing(family, tmp_path / "model"), {}
    whole = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(model)
    for row in write_rows(tmp_path):
        text = f"user: {PLACES[family] * len(row['shown'])}{row['question']}\n"
        images = [[Image.open(tmp_path / name) for name in row["shown"]]]
        inputs = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
        is_picture = inputs["input_ids"][0] == IMAGE
        with torch.inference_mode():
            layers = whole(**inputs, use_cache=True).past_key_values.layers
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


def test_text_alone_misses_what_pictures_do_and_says_so(tmp_path):
    model = seeing_model("llava")
    first = model.get_decoder().layers[0]
    model.get_decoder().embed_tokens.weight.data[:, 7] = 0  # a channel of pictures alone
    model.model.multi_modal_projector.linear_2.bias.data[7] = 1e4
    saved = save_seeing("llava", tmp_path / "model", model)
    for factor in (0, 16):
        wanted = calibrated(saved, tmp_path / "text", **TEXT).layers[0].v_amax
        norm = 8 * first.input_layernorm.weight.data[7]  # of a vector with one channel alone
        first.self_attn.v_proj.weight.data[:, 7] = factor * wanted / norm
        model.save_pretrained(saved)
    text = calibrated(saved, tmp_path / "text", **TEXT)
    pictures = calibrated(saved, tmp_path / "out", **TEXT | {"data.dataset": "builtin:pictures"})
    assert pictures.layers[0].v_amax / text.layers[0].v_amax == pytest.approx(16, rel=0.2)
    assert any(note.startswith("pictures raise V of layer 0 1") for note in pictures.notes)
    both = merge([tmp_path / "text", tmp_path / "out"], tmp_path / "both")
    assert [TEXT_ALONE in result.warnings for result in (text, pictures, both)] == [True, False, False]
    stats = [load_stats(tmp_path / name).layers.values() for name in ("text", "out", "both")]
    of_text, of_out, of_both = (next(iter(layers)).v for layers in stats)
    text_amax = torch.maximum(of_text.amax.amax(1), of_out.modalities[:, 0])
    assert torch.equal(of_both.modalities, torch.stack([text_amax, of_out.modalities[:, 1]], 1))


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


def test_an_evaluation_measures_text_and_says_so(llava, tmp_path):
    recipe = load_recipe(None, FEW | of_rows(llava) | {"evaluation.variants": ["none"]})
    warnings = run_evaluation(str(llava / "model"), recipe, output=tmp_path / "report")[0].warnings
    assert any("measured on text alone" in warning for warning in warnings)
