"""Scales of one checkpoint beside another of the same model; marks of weights have tests of their own."""

import os
import re
import shlex
import shutil

import apply_cases
import pytest
import torch
from apply_cases import applied, calibrated, copy, edited, refused, report_of, rescale_values, scales
from coded_forms import FORMS, Form, compressed
from coded_forms import packed as packed_codes
from command_line import fp8kv, one_line_error, ran
from families import edit_json, edit_tensors, save_model, tiny_model
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from calib import load_scales
from calib.errors import InputError
from calib.files.fingerprint import fingerprint
from calib.files.model_directory import open_model_directory


def test_another_dtype_and_other_files(model, measured, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    (other / "model.safetensors").unlink()
    loaded = LlamaForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    loaded.save_pretrained(other, max_shard_size="50KB")
    out = applied(measured, other, tmp_path / "out")
    assert scales(out) == scales(measured)
    shards = [*other.glob("*.safetensors")]
    assert len(shards) > 1
    assert all(os.path.samefile(out / shard.name, shard) for shard in shards)
    report, before = report_of(out), report_of(measured)
    assert report["measured_on"]["model"] == before["model"] == str(model)
    assert report["measured_on"]["checkpoint"] == before["checkpoint"] != report["checkpoint"]
    assert report["measured_on"]["compared"]["largest_error"] < 0.01
    assert report["marks"] == before["marks"]
    assert any("not compared: down_proj; K and V of later layers" in line for line in report["warnings"])
    assert f"measured on {model} and applied to this checkpoint" in (out / "README.md").read_text()
    assert report_of(applied(measured, model, tmp_path / "same"))["warnings"] == before["warnings"]
    # of scales of another strategy are told what is true of them alone
    text = ("--samples", 16, "--seq-len", 64, "--strategy")
    own, fine = (calibrated(model, tmp_path / x, *text, x) for x in ("tensor", "attn_head"))
    assert report_of(own)["warnings"] != report_of(fine)["warnings"]
    applied_as = report_of(applied(fine, model, tmp_path / "as", "--strategy", "tensor"))
    assert applied_as["warnings"] == report_of(own)["warnings"]
    done = fp8kv("merge", out, measured, "-o", tmp_path / "merged")
    one_line_error(done, "were applied, and not measured there", "merge calibrations")


@pytest.mark.parametrize("part", ["up", "down"])
def test_factors_that_no_digest_of_the_file_shows_are_named(part, model, measured, tmp_path, monkeypatch):
    monkeypatch.setattr("calib.files.fingerprint._SAMPLED_BLOCKS", 0)
    own = edited(measured, tmp_path / "own", checkpoint=fingerprint(open_model_directory(model)))
    name = f"layers.0.mlp.{part}_proj.weight"
    other = copy(model, tmp_path / "other", lambda tensors: tensors[f"model.{name}"].mul_(1000))
    warnings = " ".join(report_of(applied(own, other, tmp_path / "out"))["warnings"])
    assert "not compared: down_proj; K and V of later layers" in warnings
    assert (f"a row of '{name}' is 1,000 times what it was, the most of 1" in warnings) == (part == "up")


def test_a_quantised_version_also_in_place(model, measured, tmp_path):
    form = FORMS["compressed-fp8"]
    other = form.quantise(copy(model, tmp_path / "other"), tmp_path / "plain")
    out = applied(measured, other, tmp_path / "out")
    config = apply_cases.config_of(out)["quantization_config"]
    assert config["config_groups"] == form.says["config_groups"]
    assert config["kv_cache_scheme"]["num_bits"] == 8
    assert "these scales were measured on" in (out / "README.md").read_text()
    assert any("what quantised weights and activations" in line for line in report_of(out)["warnings"])
    weights = (other / "model.safetensors").stat().st_ino
    ran("apply", measured, other, "--in-place")
    assert scales(other) == scales(out) == scales(measured)
    ran("verify", other, "--engine", "vllm")  # which compares its weights with the marks of the first
    assert (other / "model-00001-of-00001.safetensors").stat().st_ino == weights
    assert (tmp_path / "other.before-fp8kv" / "config.json").exists()
    one_line_error(fp8kv("apply", measured, other, "--in-place", "-o", tmp_path / "o"), "leave -o")
    # beside some weights engines load no scales
    for name, version in {"gptq-4": "if any", "awq": "AutoAWQConverter"}.items():
        other = FORMS[name].quantise(copy(model, tmp_path / name), tmp_path / f"plain-{name}")
        refused(measured, other, tmp_path / "no", "no place for KV scales beside", version)


def test_smoothed_norms_that_the_weights_make_up_for_and_rescaled_values(model, measured, tmp_path):
    other = copy(model, tmp_path / "smooth", apply_cases.smooth)
    report = report_of(applied(measured, other, tmp_path / "out"))
    assert report["measured_on"]["compared"]["layers_with_moved_factors"] == 3
    assert any("norms of 3 layers hold other factors" in line for line in report["warnings"])
    other = copy(model, tmp_path / "rescaled", rescale_values)
    refused(measured, other, tmp_path / "no", "do not fit", "v_proj", "AWQ", "; calibrate that model")
    other = save_model(tiny_model("llama", rms_norm_eps=1e-5), tmp_path / "other")
    refused(measured, other, tmp_path / "no", "is of another model: its config says rms_norm_eps 1e-06")
    ran("bake", model, "--scales", measured, "--for", "fp8", "-o", tmp_path / "baked")
    refused(measured, tmp_path / "baked", tmp_path / "no", "'{}' is baked for fp8".format(tmp_path / "baked"))

    def edit(tensors):
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([0.5])

    other = copy(model, tmp_path / "with-scales", edit)
    refused(measured, other, tmp_path / "no", "apply never rewrites weights", "fp8kv strip")


def test_strategies_come_from_statistics_and_advice_names_flags_of_apply(model, measured, per_head, tmp_path):
    flags = ("--strategy", "attn_head")
    out = applied(measured / "fp8kv_stats.safetensors", model, tmp_path / "out", *flags)
    assert [x[:3] for x in scales(out)] == [x[:3] for x in scales(per_head)]
    again = applied(out, model, tmp_path / "again", "--strategy", "tensor", "--format", "tgi")
    assert scales(again) == scales(measured)
    done = fp8kv("apply", out, model, "-o", tmp_path / "no", "--format", "tgi")
    one_line_error(done, "Use --strategy tensor, or --format vllm")
    help = fp8kv("apply", "--help").output
    assert all(flag in help for flag in re.findall(r"--[a-z0-9-]+", done.stderr))
    done = fp8kv("apply", measured, model, "-o", measured, "--overwrite")
    one_line_error(done, f"would mix with the calibration in '{measured}'")


def test_an_output_without_marks(model, measured, tmp_path):
    without = edited(measured, tmp_path / "without", marks=None)
    refused(
        without,
        model,
        tmp_path / "out",
        "keeps no marks to compare weights by",
        f"; calibrate '{model}' instead",
    )


@pytest.fixture(scope="module")
def outputs(model, tmp_path_factory):
    """A calibration of a model, and one of a copy whose V is eight times as large."""
    scratch = tmp_path_factory.mktemp("outputs")
    other = copy(model, scratch / "louder", lambda tensors: rescale_values(tensors, 8))
    return calibrated(model, scratch / "own"), calibrated(other, scratch / "other")


def test_nothing_is_made_of_the_absmax_of_other_weights_or_of_statistics_beside_changed_scales(
    model, outputs, tmp_path
):
    (own, other), out = outputs, tmp_path / "out"
    mixed = shutil.copytree(own, tmp_path / "mixed")
    weights = next(mixed.glob("model-0*.safetensors"))
    weights.unlink()
    shutil.copy(next(other.glob("model-0*.safetensors")), weights)
    changed = apply_cases.damage(own, tmp_path / "it's changed", {"model.layers.1.self_attn.k_scale": 0.5})
    because = f"'{changed}': scales were changed (k_scale of layer 1)"
    for command, said in (
        (("repair", own, "--stats", other), f"the scales of '{other}' do not fit '{own}': a row"),
        (("convert", mixed, "--to", "vllm-nvfp4"), f"the scales of '{mixed}' do not fit"),
        (("bake", model, "--scales", changed, "--for", "fp8"), because),
        (("apply", changed, model), because),
        (("merge", own, changed), because),
        (("pack", changed), because),
        (("convert", changed, "--to", "tgi"), "the scales as they are, delete fp8kv_stats.safetensors"),
    ):
        done = fp8kv(*command, "-o", out)
        one_line_error(done, said)
        assert not out.exists()
        if said == because:
            advice = re.search("fp8kv (apply .*) writes the measured ones", done.stderr)[1]
    with pytest.raises(InputError, match=re.escape(because)):
        load_scales(changed)
    taken = f"warning: {because}, and are not what the statistics beside them give; the scales are taken as"
    for command in (
        ("generate", model, "a b c", "--max-new-tokens", "2"),
        ("eval", model, "--samples", "8", "--seq-len", "64", "--variants", "none"),
    ):
        warned = [taken in fp8kv(*command, "--scales", x).output for x in (own, changed)]
        assert warned == [False, True]
    names = {"MODEL": model, "OUTPUT": tmp_path / "measured"}
    ran(*(names.get(word, word) for word in shlex.split(advice)))
    assert scales(tmp_path / "measured") == scales(own)
    done = fp8kv("verify", other, "--against", own, "--engine", "vllm")
    one_line_error(done, f"the scales of '{own}' do not fit", "times what it was")
    for directory, problems in ((changed, 1), (own, 0)):
        done = fp8kv("verify", directory, "--engine", "vllm")
        assert (done.exit_code, done.stdout.count("problem: ")) == (problems, problems)
        assert (" ".join(because.split()[1:]) in " ".join(done.stdout.split())) == bool(problems)
    ours = shutil.copytree(own, tmp_path / "ours")  # its calibration is the other's, scales and all
    for name in ("model-fp8kv-scales.safetensors", "fp8kv_stats.safetensors", "fp8kv_calibration.json"):
        (ours / name).unlink()
        shutil.copy(other / name, ours)
    for directory in (mixed, ours):
        misfit = f"the scales of '{directory}' do not fit the weights beside them: a row of 'layers.0"
        for flags in ((), ("--against", own if directory is ours else other)):
            done = fp8kv("verify", directory, "--engine", "vllm", *flags)
            printed = " ".join(done.stdout.split())
            assert (done.exit_code, printed.count(f"problem: {misfit}")) == (1, 1), done.output
        assert misfit in " ".join(
            ran("convert", directory, "--to", "tgi", "-o", tmp_path / "tgi").output.split()
        )
        shutil.rmtree(tmp_path / "tgi")
    one_line_error(
        fp8kv("verify", mixed, "--against", own), f"the scales of '{own}' do not fit '{mixed}': a row"
    )
    broken = apply_cases.damage(
        changed, tmp_path / "broken", {"model.layers.0.self_attn.v_scale": float("nan")}
    )
    problems = " ".join(fp8kv("verify", broken, "--engine", "vllm").stdout.split())
    assert "problem: V scales are NaN in layer 0" in problems
    assert "scales were changed (v_scale of layer 0, k_scale of layer 1)" in problems
    # the larger of K's and V's is one scale for both, and no excuse for a swap
    k, v = (f"model.layers.1.self_attn.{letter}_scale" for letter in "kv")
    stored = load_file(own / "model-fp8kv-scales.safetensors")
    swapped = {k: stored[v].item(), v: stored[k].item()}
    printed = fp8kv("verify", apply_cases.damage(own, tmp_path / "swapped", swapped)).stdout
    assert "scales were changed (k_scale of layer 1, v_scale of layer 1)" in " ".join(printed.split())
    one_number = calibrated(model, tmp_path / "one number", "--format", "json")
    assert "scales were changed" not in fp8kv("verify", one_number).stdout
    rounded = shutil.copytree(own, tmp_path / "rounded")
    bits = {name: x.bfloat16() for name, x in load_file(rounded / "model-fp8kv-scales.safetensors").items()}
    edit_tensors(rounded, lambda tensors: tensors.update(bits), "model-fp8kv-scales.safetensors")
    ran("verify", rounded, "--engine", "vllm")
    ran("pack", changed / "fp8kv_stats.safetensors", "-o", out)


def test_eval_warns_of_scales_of_other_weights_before_it_loads_the_model_and_at_the_end(model, outputs):
    own, other = outputs
    flags = ("--variants", "none", "--samples", "2", "--seq-len", "32", "--allow-few-tokens")
    scales, form = ("--scales", own, "--scales", other), ("--progress", "json")
    done = ran("eval", model, *scales, "--dataset", "random", *flags, *form)
    early, said = done.stderr.partition('"load"')[0], f"warning: the scales of '{other}' do not fit"
    assert [early.count(said), *map(done.stderr.count, (said, "do not fit"))] == [1, 2, 2]
    done = fp8kv("eval", model, *scales, *flags, "--fail-if", "kl>0.5")
    one_line_error(done, said.removeprefix("warning: "), "without --fail-if")


def test_verify_compares_with_no_absmax_of_another_rope(outputs, tmp_path):
    """Somebody turned YaRN on in config.json, which makes K larger."""
    own, _ = outputs
    longer = shutil.copytree(own, tmp_path / "longer")
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    edit_json(longer / "config.json", rope_parameters=yarn)
    ran("verify", own, "--against", own, "--engine", "vllm")
    done = fp8kv("verify", longer, "--against", longer, "--engine", "vllm")
    one_line_error(done, "is of another model: its config says rope_parameters", "'yarn'")


def test_scales_are_near_those_of_a_model_of_4_bits_unless_values_were_rescaled(smollm2_directory, tmp_path):
    def calibrated(model, out):
        data = ("--samples", "4", "--seq-len", "512", "--device", "cpu", "--weights", "none")
        ran("calibrate", model, "-o", out, "--dataset", "builtin:python-docs", *data)
        return out

    measured = calibrated("builtin:smollm2", tmp_path / "measured")
    scheme = compressed("pack-quantized", 4, strategy="group", group_size=64)
    model = Form(scheme, packed_codes, {"group": 64}).quantised(smollm2_directory, tmp_path / "model")
    weights, pack = model / "model.safetensors", apply_cases.packed(measured, tmp_path / "pack")
    original = (smollm2_directory / "model.safetensors").stat().st_size
    assert sum(file.stat().st_size for file in pack.iterdir()) < original / 50
    out = applied(pack, model, tmp_path / "applied")
    assert os.path.samefile(out / "model-00001-of-00001.safetensors", weights)
    assert scales(out) == scales(measured)
    pairs = zip(scales(out), scales(calibrated(model, tmp_path / "own")), strict=True)
    off = sorted(abs(a[x][0] / b[x][0] - 1) for a, b in pairs for x in (1, 2))
    # rounding weights to 4 bits moves the largest K and V themselves, most of all in so small a model
    assert off[len(off) // 2] <= 0.05
    assert off[-1] <= 0.3
    values = [name for name in load_file(weights) if name.endswith("v_proj.weight_scale")]
    edit_tensors(model, lambda tensors: [tensors[name][::2].mul_(1.3) for name in values])
    refused(measured, model, tmp_path / "out", "do not fit", "v_proj", "AWQ")
