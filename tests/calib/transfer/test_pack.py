"""`fp8kv pack`: what is in a pack, what is not, and what every reader makes of it."""

import json
import re
import shlex
import shutil

import pytest
import yaml
from apply_cases import PACK_FILES, applied, calibrated, copy, manifest, packed, refused, report_of, scales
from command_line import fp8kv, one_line_error, ran
from families import edit_json

from calib.capture.directory_scales import open_scales
from calib.files.atomic import claimed
from calib.models.config import load_config
from calib.models.load import load_model
from calib.models.sources import find_model
from calib.recipe import load_recipe
from calib.scales.stats_file import load_stats
from calib.transfer.pack import license_of


def test_a_pack_holds_all_but_weights(model, measured, pack, tmp_path):
    assert {file.name for file in pack.iterdir()} == PACK_FILES
    same = ("checkpoint", "dataset", "versions", "recipe", "layers", "marks", "warnings")
    assert [report_of(pack)[key] for key in same] == [report_of(measured)[key] for key in same]
    mine, theirs = load_stats(pack).tensors(), load_stats(measured).tensors()
    assert mine.keys() == theirs.keys()
    assert all(mine[name].equal(theirs[name]) for name in mine)
    for layer in report_of(pack)["layers"]:
        larger = max(layer["k_scale"], layer["v_scale"])
        factors = json.loads((pack / "kv_cache_scales.json").read_text())["kv_cache"]
        assert factors["scaling_factor"]["0"][str(layer["layer_idx"])] == larger
    written = calibrated(model, tmp_path / "json", "--format", "json") / "kv_cache_scales.json"
    assert (pack / "kv_cache_scales.json").read_text() == written.read_text()


def test_what_is_printed_and_written_anew_but_not_by_two_runs_at_once(measured, tmp_path):
    out = tmp_path / "a pack"
    done = fp8kv("pack", measured, "-o", out)
    sizes = {file.name: file.stat().st_size for file in out.iterdir()}
    for name, size in sizes.items():
        assert re.search(rf"{size:,} bytes +{re.escape(name)}\n", done.stdout)
    assert f"written to {out}: {sum(sizes.values()):,} bytes, without weights" in done.stdout
    assert shlex.split(done.stdout.splitlines()[-1]) == ["fp8kv", "apply", str(out), "MODEL"]
    before = manifest(out)
    (out / "kv_cache_scales.json").unlink()
    printed = json.loads(fp8kv("pack", measured, "-o", out, "--overwrite", "--json").stdout)
    assert (printed["files"], printed["pushed"]) == (sizes, None)
    assert manifest(out) == before
    with claimed(tmp_path / "claimed"):
        one_line_error(fp8kv("pack", measured, "-o", tmp_path / "claimed"), "another run is writing")
    assert not (tmp_path / "claimed").exists()


def test_scales_from_a_pack_are_those_of_the_calibration(model, measured, pack, tmp_path):
    out = applied(pack, copy(model, tmp_path / "other"), tmp_path / "out")
    assert scales(out) == scales(measured)
    origin = report_of(out)
    assert origin["pack"] == {"name": str(pack), "sha256": manifest(pack)["sha256"]}
    assert any(f"(pack {pack})" in warning for warning in origin["warnings"])
    again = applied(out, copy(model, tmp_path / "third"), tmp_path / "again")
    assert report_of(again)["pack"] == origin["pack"]
    assert "packed" not in report_of(again)

    def edit(tensors):
        tensors["model.layers.1.self_attn.k_proj.weight"] *= 1.1

    other = copy(model, tmp_path / "edited", edit)
    refused(pack, other, tmp_path / "no", f"the scales of '{pack}' do not fit '{other}'")
    one_line_error(fp8kv("apply", pack, pack, "-o", tmp_path / "no"), "is a pack and not a model")
    flags = ("--strategy", "attn_head")
    expected = calibrated(model, tmp_path / "expected", *flags)
    alone = applied(pack / "fp8kv_stats.safetensors", model, tmp_path / "alone", *flags)
    assert scales(alone) == scales(expected)


def test_all_readers_of_calibrations_read_packs(model, measured, pack, tmp_path):
    places = json.loads(fp8kv("inspect", measured, "--json").stdout)["first_tokens"]
    shown = json.loads(fp8kv("inspect", pack, "--json").stdout)
    assert shown["first_tokens"] == places
    done = ran("verify", measured, "--engine", "vllm", "--against", pack)
    assert "100%" in done.stdout
    other = calibrated(model, tmp_path / "other", "--seed", "7")
    flags = ("--model", model)
    ran("merge", packed(other, tmp_path / "second"), pack, "-o", tmp_path / "m", *flags)
    done = fp8kv("merge", other, measured, "-o", tmp_path / "expected", *flags)
    assert scales(tmp_path / "m") == scales(tmp_path / "expected")
    # whose scales are K's and V's, not those of the JSON file
    checkpoint, recipe = find_model(str(model)), load_recipe(None, {"device": "cpu"})
    loaded = load_model(checkpoint, load_config(checkpoint), recipe.dtype, recipe.device)
    found = open_scales(pack, checkpoint)(loaded).layers.values()
    said = report_of(pack)["layers"]
    assert [float(layer.v) for layer in found] == [layer["v_scale"] for layer in said]
    assert any(layer["v_scale"] != layer["k_scale"] for layer in said)


@pytest.mark.parametrize(
    "flags",
    [("--strategy", "attn_head"), ("--targets", "qkv"), ("--fp8-dtype", "e5m2", "--format", "fp8kv")],
)
def test_finer_scales_have_no_json(flags, model, tmp_path):
    made = packed(calibrated(model, tmp_path / "given", *flags), tmp_path / "pack")
    assert {file.name for file in made.iterdir()} == PACK_FILES - {"kv_cache_scales.json"}
    applied(made, model, tmp_path / "out", *flags[2:])


def test_the_card_is_one_of_the_hub(model, pack, tmp_path):
    described = copy(model, tmp_path / "with-card")
    (described / "README.md").write_text("---\nlicense: apache-2.0\ntags:\n- x\n---\n# A model\n")
    given = calibrated(described, tmp_path / "given")
    card = (packed(given, tmp_path / "pack", "--base-model", "owner/model") / "README.md").read_text()
    front, text = re.fullmatch(r"---\n(.*?)---\n(.*)", card, re.DOTALL).groups()
    named = {"base_model": "owner/model", "license": "apache-2.0"}
    assert yaml.safe_load(front) == named | {"library_name": "fp8kv", "tags": ["fp8", "kv-cache", "fp8kv"]}
    assert "# FP8 KV-cache scales for owner/model" in text
    for layer in report_of(given)["layers"]:
        assert f"| {layer['k_amax']:.4g} | {layer['v_amax']:.4g} |" in text
    plain = (pack / "README.md").read_text()
    assert "license" not in plain
    assert "base_model" not in plain
    # it steers no terminal, and holds no markup
    dataset = {"source": "\x1b[2J<script>|x|", "samples": 1, "tokens": 1}
    edit_json(given / "fp8kv_calibration.json", warnings=["\x1b[3J\n# no"], dataset=dataset)
    card = (packed(given, tmp_path / "hostile") / "README.md").read_text()
    assert "\x1b" not in card
    assert "<script>" not in card.replace("\\<", "")
    assert "\n# no" not in card


def test_the_commit_of_a_model_on_the_hub(model, tmp_path):
    commit = "0123456789" * 4
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    given = calibrated(copy(model, snapshot), tmp_path / "given")
    found = manifest(packed(given, tmp_path / "pack"))
    assert (found["base_model"], found["revision"]) == ("owner/name", commit)
    assert found["fingerprint"] == report_of(given)["checkpoint"]
    other = manifest(packed(given, tmp_path / "other", "--base-model", "a/b"))
    assert (other["base_model"], other["revision"]) == ("a/b", None)
    fits_none = fp8kv("pack", given, "-o", tmp_path / "no", "--base-model", "not an id")
    one_line_error(fits_none, "--base-model 'not an id' is not an id on the Hub")


def test_what_is_not_packed(model, measured, pack, tmp_path):
    def no(given, *phrases, at=tmp_path / "no", flags=()):
        one_line_error(fp8kv("pack", given, "-o", at, *flags), *phrases)

    no(pack, "is a pack already")
    no(model, "has no fp8kv_stats.safetensors")
    no(tmp_path / "gone", "does not exist")
    no(applied(measured, model, tmp_path / "applied"), "were applied, and not measured there")
    old = shutil.copytree(measured, tmp_path / "old")
    edit_json(old / "fp8kv_calibration.json", marks=None)
    no(old, "keeps no marks")
    no(measured, "would mix with the calibration in", at=measured / "pack")
    no(measured, "exists; add --overwrite", at=pack)
    mine = tmp_path / "mine"
    (mine / "thesis").mkdir(parents=True)
    no(measured, "was not written by fp8kv", at=mine, flags=("--overwrite",))
    no(measured, "cannot write", at="/proc/pack")
    no(measured, "--private is for --push-to-hub", flags=("--private",))
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("card", "license"),
    [
        ("---\nlicense: 'apache-2.0' # as agreed\ntags:\n- x\n---\n# A model\n", "apache-2.0"),
        ("---\ntags: [x]\n---\n\n---\nlicense: mit\n---\n", None),
        ("---\nabout: |\n  x\n  license: mit\n---\n", None),
        ("---\nlicense: [mit, x]\n---\n", None),
        ('---\nlicense: "mit\\ntags: x"\n---\n', None),
        ("---\nlicense: 2001-99-99\n---\n", None),
        ("---\n- license: mit\n---\n", None),
        ("license: mit\n", None),
    ],
)
def test_the_license_is_that_in_the_head_of_the_models_card(card, license, tmp_path):
    (tmp_path / "README.md").write_text(card)
    assert license_of(tmp_path) == license
