"""Cards; what --reduce makes of strategies in each format; scales called as classes of engines load them."""

import json
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import formats_table
import jinja2
import observers_table
import pytest
import torch
from command_line import calibrate, fp8kv, json_of, one_line_error, ran, succeeded
from engine_fixtures import make_scales
from families import LATENT, save_model, tiny_model, tiny_vision_language_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from calib.errors import UnsupportedExportError
from calib.files.stored_scales import read_scales
from calib.formats import FORMATS, export
from calib.formats.card import format_card, render_card

PER_HEAD = ("vllm", "aphrodite")
NEEDING = "transformers opens this directory only where `compressed-tensors` is installed"


def test_text_of_others_cannot_begin_a_line_or_steer_a_terminal_and_its_markup_is_quoted_in_a_pack():
    card = format_card("m\n# Mine\x1b[2J", "vllm", Path("out"), "tensor", warnings=["a\n# b"])
    first, *lines = card.splitlines()
    assert first.startswith("#")
    assert not [line for line in lines if line.startswith("#")]
    assert "\x1b" not in card
    assert lines[-1] == "- a\N{REPLACEMENT CHARACTER}# b"
    facts = {"facts": {"model": "a|b"}, "evaluation": None, "layers": [], "warnings": ["[x](y)"]}
    card = render_card("pack", model="*m*", **facts)
    for quoted in (r"# FP8 KV-cache scales for \*m\*", r"| model | a\|b |", r"- \[x\](y)"):
        assert quoted in card
    with pytest.raises(jinja2.UndefinedError):
        render_card("bake", model="a card without its facts")


def test_the_tables_of_formats_and_of_observers_are_fresh():
    for tool in (formats_table, observers_table):
        assert tool.PAGE.read_text() == tool.page(), "make pages"


def opens(directory):
    try:
        AutoModelForCausalLM.from_pretrained(directory)
    except ImportError as error:
        return "compressed-tensors" not in str(error)
    return True


# whatever needs it cannot be seen where it is
@pytest.mark.skipif(find_spec("compressed_tensors") is not None, reason="compressed-tensors is installed")
def test_the_card_says_what_transformers_needs_to_open_an_output(tiny_directory, tmp_path):
    formats = [name for name, each in FORMATS.items() if each.with_weights]
    flags = [flag for name in formats for flag in ("--format", name)]
    assert calibrate(tiny_directory, "-o", tmp_path / "out", *flags).exit_code == 0
    source = tmp_path / "out" / "vllm"
    for name in {*FORMATS} - {"fp8kv"}:
        ran("convert", source, "--to", name, "-o", tmp_path / f"converted-{name}")
    for name in formats:
        for directory in (tmp_path / "out" / name, tmp_path / f"converted-{name}"):
            says = NEEDING in (directory / "README.md").read_text()
            assert says == (name in ("vllm", "aphrodite", "sglang")) == (not opens(directory)), directory
    assert NEEDING not in (tmp_path / "converted-json" / "README.md").read_text()
    ran("strip", source, "-o", tmp_path / "stripped")
    assert opens(tmp_path / "stripped")


def expected(name, strategy, reduce):
    """The strategy of what is written; nothing where it is refused."""
    if name == "fp8kv":  # statistics: the strategy is chosen when they are read
        return None if reduce == "max" and strategy != "tensor" else strategy
    if reduce == "max" or strategy == "tensor":
        return "tensor"
    return strategy if strategy == "attn_head" and name in PER_HEAD else None


def test_every_format_does_with_every_strategy_what_is_asked_or_refuses(checkpoint):
    for name, strategy, reduce in product(FORMATS, ("tensor", "attn_head", "channel"), ("none", "max")):
        scales, kind = make_scales(strategy), expected(name, strategy, reduce)
        if kind is None:
            with pytest.raises(UnsupportedExportError):
                export(scales, checkpoint, name, reduce=reduce)
            continue
        made = export(scales, checkpoint, name, reduce=reduce)
        wanted = export(scales if kind == strategy else scales.reduce_max(), checkpoint, name)
        assert (made.config, made.documents) == (wanted.config, wanted.documents), (name, strategy)
        found, tensors = ({n: t.tolist() for n, t in each.tensors.items()} for each in (made, wanted))
        assert found == tensors, (name, strategy)


def test_the_card_and_the_command_that_serves_it_are_of_what_is_written(model, tmp_path):
    source, reduced, converted = (tmp_path / name for name in ("source", "reduced", "converted"))
    calibrate(model, "--strategy", "attn_head", "-o", source)
    assert "--attention-backend" in (source / "README.md").read_text()
    done = succeeded(calibrate(model, "--strategy", "attn_head", "-o", reduced, "--reduce", "max"))
    assert "--attention-backend" not in " ".join(done.stdout.split())
    ran("convert", source, "--to", "vllm", "--reduce", "max", "-o", converted)
    for out in (reduced, converted):
        card = (out / "README.md").read_text()
        assert "--attention-backend" not in card
        assert "strategy `tensor`" in card
        ran("verify", out, "--engine", "sglang")
    # apply reduces as the calibration did, unless a strategy is named
    for extra, count in (((), 1), (("--strategy", "attn_head"), 2)):
        out = tmp_path / f"out-{count}"
        ran("apply", reduced, model, "-o", out, *extra)
        assert {len(layer.k) for layer in read_scales(out).layers} == {count}


def test_query_scales_are_not_left_out_unasked(model, tmp_path):
    source = tmp_path / "source"
    assert calibrate(model, "-o", source, "--targets", "qkv").exit_code == 0
    for name in ("vllm", "tgi", "fp8kv"):
        done = fp8kv("convert", source, "--to", name, "-o", tmp_path / name)
        assert done.exit_code == (0 if name == "vllm" else 2), name
        assert ("--without-q" in done.stderr) == (name == "tgi")


FLAG = "--model-impl transformers"
WAY_OUT = "fp8kv bake after fp8kv calibrate --format fp8kv, or --to"
PLAIN, INNER = "self_attn.k_scale", "self_attn.attn.k_scale"


def save(family, directory):
    make = tiny_vision_language_model if family == "llama4" else tiny_model
    return save_model(make(family), directory / family)


def holds(output, name):
    with safe_open(output / "model-fp8kv-scales.safetensors", "pt") as file:
        return any(key.endswith(f".0.{name}") for key in file.keys())  # noqa: SIM118


def test_an_output_loads_in_the_engine_of_its_format_or_it_is_said_before_measuring(tmp_path, monkeypatch):
    for family, engine, name in (
        ("llama", "sglang", PLAIN),
        ("qwen2", "sglang", INNER),
        ("qwen3_moe", "vllm", PLAIN),
        ("gpt2", "sglang", "attn.attn.k_scale"),
        ("llama4", "vllm", PLAIN),
    ):
        out = tmp_path / f"{family}-out"
        succeeded(calibrate(save(family, tmp_path), "-o", out, "--format", engine, "--quiet"))
        assert holds(out, name)
        ran("verify", out, "--engine", engine)
    monkeypatch.setattr("calib.capture.resume.calibrate", lambda *_, **__: pytest.fail("it measured"))
    deepseek = save_model(tiny_model("deepseek_v3", **LATENT["deepseek_v3"]), tmp_path / "deepseek")
    way_out = "(no place), so it would compute with 1.0. Use --format vllm for vLLM, or --format fp8kv"
    for source, name, *said in (
        (save("qwen3", tmp_path), "sglang", "SGLang's class Qwen3ForCausalLM loads no KV scales", way_out),
        (save("gpt_oss", tmp_path), "sglang", "SGLang's class GptOssForCausalLM loads no KV scales", way_out),
        (deepseek, "vllm", "--format vllm:", "fp8kv bake after fp8kv calibrate --format fp8kv"),
    ):
        one_line_error(calibrate(source, "-o", tmp_path / "out", "--format", name), *said)
        assert not (tmp_path / "out").exists()


def test_a_class_that_was_never_run_gets_the_usual_name_and_a_warning(tmp_path):
    source, out = save("llama", tmp_path), tmp_path / "out"
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["OwnForCausalLM"]}))
    done = succeeded(calibrate(source, "-o", out, "--format", "sglang"))
    printed = " ".join((done.stdout + done.stderr).split())
    assert "whether SGLang loads these scales is not known for OwnForCausalLM" in printed
    assert holds(out, PLAIN)
    assert fp8kv("verify", out, "--engine", "sglang").exit_code == 1
    quiet = calibrate(source, "-o", out, "--format", "sglang", "--quiet", "--overwrite")
    assert quiet.stdout == ""
    assert quiet.stderr.startswith("warning: whether SGLang loads these scales is not known for")
    assert calibrate(source, "-o", out, "--format", "sglang", "--json", "--overwrite").stderr == ""


def test_an_output_of_latents_is_served_as_its_card_says_and_as_verify_says(tmp_path):
    deepseek = save_model(tiny_model("deepseek_v3", **LATENT["deepseek_v3"]), tmp_path / "model")
    out, again = tmp_path / "out", tmp_path / "again"
    done = succeeded(calibrate(deepseek, "-o", out, "--format", "modelopt"))
    command, card = f"vllm serve {out} --kv-cache-dtype fp8 {FLAG}", (out / "README.md").read_text()
    for said, whom in ((" ".join(done.stdout.split()), "serve with vLLM:"), (card, "for vLLM; strategy")):
        assert command in said
        assert whom in said
    (engine,) = json_of("verify", out, "--engine", "vllm")["engines"]
    assert engine["flag"] == FLAG
    # vLLM passes them through bfloat16
    layers = json.loads((out / "fp8kv_calibration.json").read_text())["layers"]
    expected = [torch.tensor(layer["k_scale"]).bfloat16().item() for layer in layers]
    assert [o["values"][0] for o in engine["layers"] if o["letter"] == "k"] == expected
    assert fp8kv("verify", out, "--engine", "sglang").exit_code == 1
    # convert writes them for no other engine
    one_line_error(fp8kv("convert", out, "--to", "vllm", "-o", again), "--to vllm:", f"Use {WAY_OUT}")
    ran("convert", out, "--to", "modelopt", "-o", again)
    assert f"vllm serve {again} --kv-cache-dtype fp8 {FLAG}\n" in (again / "README.md").read_text()
    ran("verify", again, "--engine", "vllm")
