"""Calibration on pictures: what is measured where, what is warned of, and what is refused."""

import base64
import json
import shutil
import wave

import numpy as np
import pyarrow
import pytest
import torch
from apply_cases import report_of
from evaluations import plain_comparison
from fake_quant import fake_quantized
from families import edit_json, save_model, tiny_model
from PIL import Image
from pyarrow import parquet
from seeing import AUDIO, IMAGE, PLACES, read_media, save_seeing, seeing_model, seeing_smollm2, write_rows
from transformers import AutoModelForMultimodalLM, AutoProcessor, dynamic_module_utils

from calib import Recipe, load_recipe, load_stats, run
from calib.capture.attention import map_attention
from calib.capture.loop import media_arguments
from calib.data.builtin import MORE_PICTURES, PICTURES, PYTHON_DOCS
from calib.data.media import open_sound
from calib.data.samples import MediaSample
from calib.errors import Fp8kvError
from calib.evaluate.inputs import SUITES, complete_recipe
from calib.evaluate.report import Suite
from calib.evaluate.run import evaluate
from calib.evaluate.summarize import summarize
from calib.evaluate.verdict import failures
from calib.files.model_directory import open_model_directory
from calib.files.text import parse_condition
from calib.models import load
from calib.scales.stats import MODALITIES
from calib.scales.summary import TEXT_ALONE
from calib.transfer.merge import merge

FEW = {"device": "cpu", "dtype": "float32", "data.seq_len": 256, "data.allow_few_tokens": True}
TEXT, ASKED = {"data.dataset": "builtin:python-docs", "data.samples": 2}, "Which colour is this, and why?"


def calibrated(model, output, **settings):
    return run(str(model), load_recipe(None, FEW | settings), output, overwrite=True)


def evaluated(model, settings, *scales):
    suite = Suite(1, 3, 96, 0, 0, (), (), 1)
    return summarize(evaluate(str(model), load_recipe(None, FEW | settings), scales=scales, suite=suite))


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    home = tmp_path_factory.mktemp("llava")
    save_seeing("llava", home / "model")
    write_rows(home)
    return home


@pytest.mark.parametrize("family", PLACES)
def test_amax_and_kl_by_modality_are_those_of_the_whole_model(family, tmp_path):
    model, expected, kl = save_seeing(family, tmp_path / "model"), {}, ([], [])
    whole = AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32)
    kinds = {"<audio>": ("audio", "audio", "wav")}
    name, key, ending = kinds.get(PLACES[family], ("pictures", "images", "png"))
    for row in write_rows(tmp_path, ending)[: 2 if family == "glmasr" else 3]:  # GLM takes one sound
        text = f"user: {PLACES[family] * len(row['shown'])}{row['question']}\n"
        given = {"return_tensors": "pt", "add_special_tokens": False} | read_media(tmp_path, row, family)
        inputs = AutoProcessor.from_pretrained(model)(text=[text], **given)
        is_it = torch.isin(inputs["input_ids"][0], torch.tensor([IMAGE, AUDIO]))
        with torch.inference_mode():
            layers = whole(**inputs, use_cache=True).past_key_values.layers
        pair = plain_comparison(whole, fake_quantized(whole, map_attention(whole).unit_scales()), **inputs)
        for place, tokens in zip(kl, (~is_it, is_it), strict=True):
            place.append(torch.stack(pair)[:, tokens])
        for i, layer in enumerate(layers):
            amax = torch.stack([layer.keys[0], layer.values[0]]).abs().amax(-1)
            table = expected.setdefault(i, torch.zeros(*amax.shape[:2], 3))
            for place, tokens in ((0, ~is_it), (MODALITIES.index(name), is_it)):
                table[..., place] = torch.maximum(table[..., place], amax[..., tokens].amax(-1))
    rows = {"data.dataset": str(tmp_path / "rows.jsonl"), f"data.{key}": "shown"}
    noted = calibrated(model, tmp_path / "out", **rows).notes[0]
    for layer in load_stats(tmp_path / "out").layers.values():
        assert torch.equal(torch.stack([layer.k.modalities, layer.v.modalities]), expected[layer.layer_idx])
    said, (text, media) = report_of(tmp_path / "out"), (torch.cat(parts, 1) for parts in kl)
    assert [x[name] for x in said["modalities"][2:4]] == expected[1][..., MODALITIES.index(name)].tolist()
    assert noted.endswith(f"; text: {text.shape[1]} of the tokens")
    counts = [said["dataset"][x] for x in (name, f"{name.removesuffix('s')}_tokens")]
    assert counts == [2 if family == "glmasr" else 4, media.shape[1]]
    measured = evaluated(model, rows | {"evaluation.variants": ["none"], "evaluation.samples": 2})
    modalities = measured.other_texts[0].variants["none"].modalities.values()
    for row, figures in zip(modalities, (text, media), strict=True):
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
    assert torch.equal(stats[2].modalities[:, :2], torch.stack([text_amax, stats[1].modalities[:, 1]], 1))
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
        ({"dataset": PICTURES}, {"dataset": MORE_PICTURES}, PYTHON_DOCS, [MORE_PICTURES]),
        (shown, {"dataset": "b.json"}, PYTHON_DOCS, ["a.json", "b.json"]),
        (shown, {"dataset": PICTURES}, PYTHON_DOCS, ["a.json", MORE_PICTURES]),
        ({"images": "x"}, {"dataset": "a.txt", "also": ["a.json"]}, "a.txt", ["a.json"]),
    ):
        recipe = complete_recipe(Recipe(data=data, evaluation=evaluation), SUITES["quick"])
        assert (recipe.data.dataset, [*recipe.evaluation.also]) == (text, also)
    with pytest.raises(Fp8kvError, match="--images: builtin:python-docs has no such column"):
        complete_recipe(Recipe(data={"dataset": PYTHON_DOCS, "images": "x"}), SUITES["quick"])


@pytest.mark.parametrize(("family", "kind"), [("gemma3", "image"), ("qwen2_audio", "audio")])
def test_forms_of_rows_are_one_request(family, kind, tmp_path):
    model, ending = save_seeing(family, tmp_path / "model"), "png" if kind == "image" else "wav"
    write_rows(tmp_path, ending)

    def fingerprint(file="rows.jsonl", column=kind):
        columns = {"data.images" if kind == "image" else "data.audio": column}
        calibrated(model, tmp_path / "out", **columns | {"data.dataset": str(tmp_path / file)})
        return report_of(tmp_path / "out")["dataset"]["fingerprint"]

    def chat(**media):
        parts = [{"type": kind} | media, {"type": "text", "text": ASKED}]
        return {"messages": [{"role": "user", "content": parts}], f"{kind}s": None}

    for number in range(2):
        name = f"{number}.{ending}"
        held = (tmp_path / name).read_bytes()
        table = pyarrow.Table.from_pylist([{"text": ASKED, kind: {"bytes": held, "path": None}}])
        parquet.write_table(table, tmp_path / f"{number}.parquet")
        data = base64.b64encode(held).decode()
        for row, column in (
            ({"text": ASKED, "image": "x", "audio": "x", kind: name}, kind),
            ({"text": f"user: <{kind}>{ASKED}\n", kind: name}, kind),
            ({"conversations": [{"from": "human", "value": f"<{kind}>{ASKED}"}], kind: name}, kind),
            (chat() | {f"{kind}s": [name]}, None),
            (chat(path=name), None),
            (chat(type=f"{kind}_url", **{f"{kind}_url": {"url": f"data:{kind}/x;base64,{data}"}}), None),
            *[(chat(type="input_audio", input_audio={"data": data}), None)] * (kind == "audio"),
        ):
            (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
            assert fingerprint(column=column) == fingerprint(f"{number}.parquet"), row
    assert fingerprint("0.parquet") != fingerprint("1.parquet")


def test_sounds_of_any_width_and_rate_are_one(tmp_path):
    half, whole = (np.sin(2 * np.pi * 440 * np.arange(rate) / rate) for rate in (8000, 16000))
    for width in (1, 2, 3, 4):
        codes = np.rint(half * (2 ** (8 * width - 1) - 1)).astype("<i4") + 128 * (width == 1)
        with wave.open(str(tmp_path / "a.wav"), "wb") as file:
            file.setparams((2, width, 8000, 0, "NONE", None))
            file.writeframes(codes.repeat(2)[:, None].view(np.uint8)[:, :width].tobytes())
        assert abs(open_sound("a.wav", tmp_path, 16000) - whole).max() < 2.0 ** (2 - 8 * width) + 1e-6
    array = {"array": half.tolist(), "sampling_rate": 8000}
    assert abs(open_sound(array, tmp_path, 16000) - whole).max() < 1e-6
    with pytest.raises(Fp8kvError, match="its sound of bytes cannot be read .file does not start with RIFF"):
        open_sound(b"the frames of an MP3", tmp_path, 16000)


def test_rows_that_cannot_be_read(llava, tmp_path):
    Image.new("RGB", (30, 40)).save(tmp_path / "0.png")
    for row, message in (
        ({"text": "Hello", "image": None}, "line 1: it has no picture in column 'image'"),
        ({"text": "Hello"}, "rows.jsonl' can be read: .*it has no picture in column 'image'; columns: text"),
        ({"text": "Hello", "image": "no.png"}, "its picture 'no.png' cannot be read .No such file"),
        ({"text": "Hello", "image": "rows.jsonl"}, "'rows.jsonl' cannot be read .cannot identify image"),
        ({"text": "Hello", "image": "https://a.b/c.png"}, "it is an address: download it"),
        ({"text": "<image> and <image>", "image": "0.png"}, "it has 2 places for pictures and 1 pictures"),
        ({"text": "Hello", "image": ["0.png"] * 130}, "reach to token 5.., and the model has 512 positions"),
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(Fp8kvError, match=message):
            path = str(tmp_path / "rows.jsonl")
            calibrated(llava / "model", tmp_path / "out", **{"data.dataset": path, "data.images": "image"})


def test_a_processor_by_the_models_own_code_is_loaded_if_trusted_and_named_if_it_is_none(
    llava, tmp_path, monkeypatch
):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = shutil.copytree(llava / "model", tmp_path / "model")
    edit_json(model / "processor_config.json", auto_map={"AutoProcessor": "own.Own"}, processor_class="Own")
    own = "from transformers import LlavaProcessor, LlamaTokenizer\nclass Own({}): ..."
    (model / "own.py").write_text(own.format("LlavaProcessor"))
    for trust, message in ((False, "contains custom code"), (True, "is of class Own; .* use text alone")):
        with pytest.raises(Fp8kvError, match=message):
            load.load_processor(open_model_directory(model), trust_remote_code=trust)
            (model / "own.py").write_text(own.format("LlamaTokenizer"))
            # where it may be too
            (model / "processor_config.json").rename(model / "preprocessor_config.json")
            load.load_processor(open_model_directory(model), trust_remote_code=trust)


def test_what_cannot_read_pictures_says_so(llava, tmp_path, monkeypatch):
    def refused(model, message, **settings):
        rows = {"data.dataset": str(llava / "rows.jsonl"), "data.images": "shown"} | settings
        with pytest.raises(Fp8kvError, match=message):
            calibrated(model, tmp_path / "out", **rows)

    refused(save_model(tiny_model("llama"), tmp_path / "llama"), "and this model takes none")
    towerless = save_seeing("llava", tmp_path / "towerless", seeing_model("llama4"))
    refused(towerless, "transformers' Llama4ForCausalLM reads text alone; calibrate on text")
    refused(llava / "model", "runs layer by layer; use --offload none", offload="layerwise")
    refused(llava / "model", "takes no sound", **{"data.images": None, "data.audio": "shown"})
    refused(llava / "model", "and this dataset has none", **{"data.dataset": "random"})
    bare = save_model(seeing_model("llava"), tmp_path / "bare")
    refused(bare, "has neither processor_config|cannot load the processor")
    with pytest.raises(Fp8kvError, match="needs mm_token_type_ids, which its processor does not make"):
        media_arguments(seeing_model("paddleocr_vl"), MediaSample((1, 0), torch.ones(1), b"", dict))
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    message = "^pictures need Pillow, which is not installed: pip install pillow"
    refused(llava / "model", message, **{"data.dataset": PICTURES})  # before any is drawn
