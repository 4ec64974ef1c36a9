"""Recipes: bundled ones are legal, mistakes are named with the nearest key, saved ones return."""

import json
import shutil

import pytest
import yaml

from calib.commands.flags import parse_assignments
from calib.errors import InputError
from calib.formats import FORMATS
from calib.recipe import load_recipe, recipe_names, recipe_text

# each level holds the one before nine times
BOMB = "a: &a [x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)
)


def test_a_bundled_recipe_says_what_its_name_says_and_the_default_is_the_fields():
    assert " ".join(recipe_names()) == (
        "amd-fnuz attn_head-absmax attn_head-mse legacy-json qkv-attn_head random-tokens "
        "tensor-absmax tgi-kv_scale"
    )
    for name in recipe_names():
        recipe = load_recipe(name)
        assert recipe.strategy == ("attn_head" if "attn_head" in name else "tensor"), name
        assert recipe.observer.name == ("mse" if "mse" in name else "absmax"), name
        assert recipe.fp8_dtype == ("e4m3fnuz" if "fnuz" in name else "e4m3fn"), name
        assert recipe.targets == ("qkv" if "qkv" in name else "kv"), name
        assert yaml.safe_load(recipe_text(name))["description"] == recipe.description > ""
        # so that a model of fewer positions can be calibrated
        assert "seq_len" not in recipe.data.model_fields_set, name
    recipe, named = load_recipe(None), load_recipe("tensor-absmax")
    data = (recipe.data.dataset, recipe.data.samples, recipe.data.seq_len)
    assert data == ("HuggingFaceH4/ultrachat_200k", 512, 2048)
    # the named one spells its split out
    assert {k for k, v in recipe if getattr(named, k) != v} == {"description", "data"}
    assert named.data.split == "train_sft"
    assert "; every format holds it" in named.description
    assert all("tensor" in x.strategies for x in FORMATS.values())


def test_overrides_win_over_the_file_and_an_anchor_is_no_bomb(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("strategy: attn_head\ndata: &d {samples: 7}\nevaluation: {<<: *d, suite: full}\n")
    recipe = load_recipe(str(file), {"data.samples": 9, "data.seed": 3, "headroom": 1.5})
    assert (recipe.strategy, recipe.headroom) == ("attn_head", 1.5)
    assert (recipe.data.samples, recipe.data.seed, recipe.evaluation.samples) == (9, 3, 7)
    assert not recipe.collects_means
    assert load_recipe(None, {"center_keys": True}).collects_means
    with pytest.raises(InputError, match="'strategy.x' cannot be set"):
        load_recipe(str(file), {"strategy.x": 1})


def test_a_mistake_is_one_line_that_names_it(tmp_path):
    for text, message in (
        (
            "data: a.jsonl",
            r"data: Input should be keys with values, as in `data: {KEY: VALUE}`, got 'a.jsonl'",
        ),
        ("data: {headroom: 1.2}", r"unknown key 'data.headroom' \(did you mean 'headroom'\?\); legal"),
        ("data: {sampels: 3}", r"unknown key 'data.sampels' \(did you mean 'samples'\?\); legal keys"),
        (
            "batch_size: 4",
            r"unknown key 'batch_size' \(did you mean 'data.batch_size'\?\); legal keys here: ver",
        ),
        ("samples: 4", r"\(did you mean 'data.samples' or 'evaluation.samples'\?\)"),
        ("data.samples: 4", r"unknown key 'data.samples' \(write `data: {samples: ...}`\); legal keys"),
        ("evaluation: {fail_if: kl>1}", r"evaluation.fail_if: Input should be a list, got 'kl>1'"),
        ("strategy: per_head", r"strategy: Input should be 'tensor', 'attn_head' or 'channel', got"),
        ("data: {samples: 0}", "data.samples: Input should be greater than or equal to 1, got 0"),
        ("evaluation: {seq_len: 15}", "evaluation.seq_len: Input should be greater than or equal to 16"),
        ("headroom: 1.0e-30", "headroom: Input should be greater than or equal to 0.0625"),
        ("data: {seed: 18446744073709551616}", "data.seed: Input should be less than"),
        ("data: {batch_size: big}", "data.batch_size: .*a valid integer, .*, or 'auto', got 'big'"),
        ("data: {batch_size: 0}", "batch_size: .*be greater than 0, or 'auto', got 0"),
        ("data: {until: yes}", "data.until: needs a number, not true"),
        ("data: {until: .nan}", "data.until: Input should be a finite number, got nan"),
        (
            "export: {formats: []}",
            "^recipe '[^']+': export.formats: name one or more of vllm, .*, fp8kv; without",
        ),
        ("version: 2", "version: Input should be less than or equal to 1"),
        ("strategy: channel\nobserver: {name: mse}", "strategy 'channel' keeps no histogram"),
        ("clip_chance: 1.0e-6", r"^recipe '\S+': unknown key 'clip_chance'"),
        ("- a list", "must be a mapping"),
        ("strategy: tensor\nstrategy: attn_head", "'strategy' is given twice, again in line 2"),
        ("description: 2026-99-99", "cannot read recipe .*: month must be in 1..12"),
        ("description: " + "[" * 1_000, "cannot read recipe .*: nested too deep"),
        (BOMB, "cannot read recipe .*: more than 20 aliases"),
        ("strategy: [" + "x, " * 1_000 + "]", r"strategy: .*got \['x', 'x'.*\.\.\."),
        ("evaluation: {fail_if: ['kl>nan']}", "evaluation.fail_if.0: .*'kl>nan'.*finite number"),
        ("evaluation: {variants: [tensr]}", "evaluation.variants.0: Input should be 'bf16'.*tensr"),
        ("evaluation: {kl_budget: .inf}", "kl_budget: Input should be a finite number"),
        ("evaluation: {attention: fa3, backend: triton}", "'fa3' is simulated in plain torch, and backend"),
        # of --set
        ("a=[1", "--set 'a=\\[1': .*expected ',' or '\\]'"),
        ("seed=" + "9" * 5000, "--set 'seed=999.*too many digits"),
        *((text, "--set takes KEY=VALUE") for text in ("noequals", "=1")),
    ):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(InputError, match=message) as caught:
            parse_assignments([text]) if "--set" in message else load_recipe(str(tmp_path / "bad.yaml"))
        assert len(str(caught.value)) < 1000


def test_a_saved_calibration_is_a_recipe_and_another_name_is_none(tmp_path):
    recipe, saved = load_recipe("attn_head-mse", {"data.samples": 5}), tmp_path / "fp8kv_calibration.json"
    saved.write_text(json.dumps({"recipe": recipe.model_dump(mode="json"), "model": "x"}))
    assert load_recipe(str(saved)) == recipe
    report = shutil.copy(saved, tmp_path / "report.json")
    saved.write_text(json.dumps({"model": "x"}))
    with pytest.raises(InputError, match="' has no recipe; give the file of another"):
        load_recipe(str(saved))
    with pytest.raises(InputError, match="is a report, whose recipe .* or the fp8kv_calib"):
        load_recipe(str(report))
    for source, message in (("attn-head-mse", "did you mean 'attn_head-mse'"), ("x.yml", "recipe 'x.yml'")):
        with pytest.raises(InputError, match=message):
            load_recipe(source)
