"""`fp8kv bake`: the same outputs bit for bit, K and V that need no scales, and what other commands say."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from baking import OTHERS, bake, calibrated, in_float32, model_directory, scales_of, seen
from command_line import calibrate, fp8kv, json_of, one_line_error, ran, succeeded
from families import FAMILIES, SHARED_KV, save_model, tiny_model
from safetensors.torch import load_file, save_file

from calib.engines.catalogue import find_engine
from calib.errors import UnsupportedModelError
from calib.rescale import factors, rope_pairs
from calib.rescale.factors import octave_factor, uniform_factors
from calib.rescale.pipeline import RescalePlan
from calib.rescale.rope_pairs import rotated_pairs
from calib.rescale.weight_changes import AttentionWeights, LayerFactors, cached_attention, list_changes
from calib.scales.stats_file import load_stats

EXACT = [
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "glm4", "olmo2"),
    *("starcoder2", "gpt_neox", "gpt_oss", "granite", "cohere2", "falcon"),
    *("gemma2", "gemma3_text", "qwen3_next"),
]
REFUSED = {
    "gpt2": ({}, "c_attn is a Conv1D"),
    "olmo": ({"clip_qkv": 0.5}, "clips Q, K and V"),
    "bitnet": ({}, "does not follow a factor in front of it"),
}
# what their norms multiply by 1 + is not exact in bfloat16
FLAGS = dict.fromkeys(("qwen3_next", "gemma3_text"), ("--dtype", "float32"))
CLIPPING = ("--headroom=0.1", "--observer=percentile", "--fp8-dtype=e5m2", "--fp8-dtype=e4m3fnuz")
SHARED_BY_HEADS = {"qwen3", "qwen3_moe", "qwen3_next", "gemma3_text"}
DOCS = Path(__file__).parents[3] / "docs" / "bake.md"
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", DOCS.read_text(), re.MULTILINE))


@pytest.mark.parametrize("model_type", EXACT)
def test_each_family_is_baked_for_fp8_and_for_integers(model_type, tmp_path):
    source = model_directory(tmp_path / "source", model_type)
    before = calibrated(source, tmp_path / "before", "--strategy", "attn_head")
    outputs = seen(source)
    for purpose, check in {"fp8": check_scale_one, "int8": check_channels}.items():
        baked = tmp_path / purpose
        succeeded(bake(source, before, baked, "--for", purpose, *FLAGS.get(model_type, ())))
        after = calibrated(baked, tmp_path / f"{purpose}-after", "--strategy", "attn_head")
        check(model_type, outputs, before, baked, after)
    flags = f", `{' '.join(FLAGS[model_type])}`" if model_type in FLAGS else ""
    k = f"per {'layer' if model_type in SHARED_BY_HEADS else 'head'}{flags}"
    assert ROWS[model_type] == f"{k} | per head"


def check_scale_one(model_type, outputs, before, baked, after):
    """1.0 becomes right: each head's scale is in the upper octave below it."""
    (logits, kv), (same, baked_kv) = outputs, seen(baked)
    assert torch.equal(logits, same)
    assert any(not torch.equal(kv[name][0], baked_kv[name][0]) for name in kv)
    old, new = scales_of(before), scales_of(after)
    assert (old / new).log2().frac().abs().max() == 0
    assert new.max() <= 1
    # the largest head of each layer, and each head where no norm is shared
    smallest = new.amax(-1) if model_type in SHARED_BY_HEADS else new
    assert smallest.min() > 0.5
    (baked / "fp8kv_bake.json").unlink()  # of the Hub engines fetch config.json alone
    assert json_of("verify", baked)["baked"] == "fp8"
    card, flags = (baked / "README.md").read_text(), " ".join(["", *FLAGS.get(model_type, ())])
    assert f"vllm serve {baked} --kv-cache-dtype fp8{flags}\n" in card
    assert ("trtllm-serve" in card) == (not flags)  # which has no such flag
    if model_type == "llama":
        assert json_of("generate", baked, "w3 w4", "--max-new-tokens", 3)


def check_channels(model_type, outputs, before, baked, after):
    """Channels become even: they go half of the way to their head's largest."""
    (logits, _), (same, _) = outputs, seen(baked)
    said = json.loads((baked / "fp8kv_bake.json").read_text())
    assert torch.equal(logits, same) == said["exact"]
    assert said["exact"] or model_type == "gemma3_text"  # its 1 + 3.1e-6 takes all of float32
    model = in_float32(baked)
    old_layers, new_layers = load_stats(before).layers, load_stats(after).layers
    for name, module in cached_attention(model).items():
        pair, old, new = rotated_pairs(model, module), old_layers[name], new_layers[name]
        k_before, k = (x.k.amax.maximum(x.k.amax[:, pair]) for x in (old, new))
        if AttentionWeights(module, model.get_submodule(name)).shares_k:
            k_before, k = (x.amax(0, keepdim=True) for x in (k_before, k))
        for was, became in ((k_before, k), (old.v.amax, new.v.amax)):
            # half of the way, of at most ten octaves, to the nearest power of two
            ratio = was / was.amax(-1, keepdim=True)
            wanted = ratio.log2() - ratio.clamp(min=2**-10).log2() / 2
            assert ((became / was.amax(-1, keepdim=True)).log2() - wanted).abs().max() < 0.501


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_baked(model_type, tmp_path):
    options, reason = REFUSED[model_type]
    source = save_model(tiny_model(model_type, **options).to(torch.bfloat16), tmp_path / "source")
    scales = calibrated(source, tmp_path / "scales", "--format", "fp8kv")
    for purpose in ("fp8", "int8") if model_type == "bitnet" else ("fp8",):
        one_line_error(bake(source, scales, tmp_path / "out", "--for", purpose), reason)
        assert not (tmp_path / "out").exists()
    assert f"refused: {reason} |" in ROWS[model_type]
    assert ROWS.keys() == {*EXACT, *REFUSED}


@pytest.mark.parametrize("flag", CLIPPING)
def test_recipes_that_clip_or_are_for_another_type(flag, llama, tmp_path):
    out, largest = tmp_path / "out", 240 / 448 if "fnuz" in flag else 1
    scales = calibrated(llama.source, tmp_path / "scales", flag, "--format", "fp8kv")
    succeeded(bake(llama.source, scales, out, "--for", "fp8"))
    after = scales_of(calibrated(out, tmp_path / "after", "--strategy", "attn_head"))
    assert largest / 2 < after.min() <= after.max() <= largest
    ran("verify", out)
    problems = json_of("verify", out, "--fnuz", status=largest == 1)["problems"]
    assert ("ends at 240" in str(problems)) == (largest == 1)


def test_shards_that_do_not_change_are_linked(llama, tmp_path):
    source, out = shutil.copytree(llama.source, tmp_path / "source"), tmp_path / "out"
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    weight_map = {n: f"{'attention' if 'self_attn' in n else 'rest'}.safetensors" for n in tensors}
    for file in ("attention.safetensors", "rest.safetensors"):
        held = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(held, source / file, {"format": "pt"})
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    succeeded(bake(source, calibrated(source, tmp_path / "scales"), out, "--for", "fp8"))
    assert (out / "rest.safetensors").samefile(source / "rest.safetensors")
    assert not (out / "attention.safetensors").samefile(source / "attention.safetensors")
    assert (out / index.name).read_text() == index.read_text()


def test_weights_that_cannot_hold_a_factor():
    for child, module, problem in (
        ("k_norm", torch.nn.RMSNorm(25), "k_norm has 25 weights, where its heads make up 24"),
        ("v_proj", torch.nn.Linear(64, 50), "v_proj has 50 rows, where its heads make up 48"),
        ("o_proj", torch.nn.Linear(90, 64), "o_proj has 90 columns, where its heads make up 96"),
        ("another", torch.nn.Identity(), "one weight for all heads"),
    ):
        model = tiny_model("qwen3", **FAMILIES["qwen3"])
        name, attention = next(iter(cached_attention(model).items()))
        factors = uniform_factors({name: attention}, 2.0, 4.0)
        setattr(model.get_submodule(name), child, module)
        factors[name].k[0] *= 2 if child == "another" else 1
        with pytest.raises(UnsupportedModelError, match=problem):
            list_changes(model, {name: attention}, factors)


def test_octaves_and_how_many_are_missing():
    for scale, factor in ((1.0, 1), (0.51, 1), (0.5, 2), (1.001, 0.5), (3e-5, 2**15), (448.0, 2**-9)):
        assert octave_factor(torch.tensor([scale])).item() == factor
    wanted = torch.tensor([[8.0, 16.0], [4.0, 4.0]])
    k, v = wanted / 4, wanted / torch.tensor([[2.0, 8.0], [1.0, 1.0]])
    plan = RescalePlan({"": LayerFactors(k, v)}, {"": LayerFactors(wanted, wanted)}, {}, [], {})
    # what all channels of a head lack costs integers nothing
    assert [plan.missing_octaves(purpose) for purpose in ("fp8", "int8")] == [(2, 3), (0, 2)]


def test_pairs_are_found_by_trying():
    slow = {"rope_theta": 1e13, "rope_type": "default", "partial_rotary_factor": 0.5}
    slow = {"max_position_embeddings": 2**20, "rope_parameters": slow}
    for model_type, options, expected in (
        ("llama", {}, [*range(8, 16), *range(8)]),
        # norms with weights of 0.3 beside 60: in bfloat16 the second hides the first
        ("gemma3_text", {}, [*range(12, 24), *range(12)]),
        ("glm4", slow, [1, 0, 3, 2, 5, 4, 7, 6, *range(8, 16)]),
        ("gpt_neox", {}, [2, 3, 0, 1, *range(4, 16)]),
        ("smollm3", {"no_rope_layers": [0, 0, 0]}, [*range(16)]),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            model = tiny_model(model_type, **(FAMILIES | OTHERS).get(model_type, {}) | options).to(dtype)
            for module in cached_attention(model).values():
                assert rotated_pairs(model, module).tolist() == expected


def test_wrong_pairs_are_not_proved(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(rope_pairs, "rotated_pairs", lambda *_: torch.arange(16) ^ 1)
    done = bake(llama.source, llama.scales, tmp_path / "baked", "--for", "int8")
    one_line_error(done, "cannot be baked: K of model.layers.0", "Nothing was written")
    assert not (tmp_path / "baked").exists()


@pytest.mark.parametrize(
    ("model_type", "options", "same_k", "same_v"),  # layers; Gemma's last one reads another's cache
    [
        ("llama4_text", {"num_hidden_layers": 4, "head_dim": 6}, [0, 1, 2], []),
        ("gemma3n_text", SHARED_KV, [], [0, 1, 2]),
    ],
)
def test_what_is_normalised_without_a_weight_stays(model_type, options, same_k, same_v, tmp_path):
    source = save_model(tiny_model(model_type, **options).to(torch.bfloat16), tmp_path / "source")
    scales = calibrated(source, tmp_path / "scales", "--format", "fp8kv")
    logits, before = seen(source)
    for purpose in ("fp8", "int8"):
        succeeded(bake(source, scales, tmp_path / purpose, "--for", purpose))
        same, after = seen(tmp_path / purpose)
        assert torch.equal(logits, same)
        for i, (name, (key, value)) in enumerate(before.items()):
            assert torch.equal(key, after[name][0]) == (i in same_k)
            assert torch.equal(value, after[name][1]) == (i in same_v)


def test_channels_that_are_mixed_in_another_way_than_by_rope(tmp_path):
    source = save_model(
        tiny_model("inkling2_text", unpadded_vocab_size=128).to(torch.bfloat16), tmp_path / "source"
    )
    scales = calibrated(source, tmp_path / "scales", "--format", "fp8kv")
    refusal = "mixes channels of K in another way than RoPE's pairs"
    one_line_error(bake(source, scales, tmp_path / "out", "--for", "int8"), refusal)


IS_BAKED = "is baked for fp8"


def test_a_baked_model_says_how_to_serve_it_and_is_compared_with_what_was_measured(llama, tmp_path):
    shown = fp8kv("verify", llama.baked, "--engine", "lmdeploy")
    assert "baked: right at 1.0" in " ".join(shown.stdout.split())
    card = (llama.baked / "README.md").read_text()
    for line in (f"vllm serve {llama.baked} --kv-cache-dtype fp8", "--quant-policy 16", "trtllm-serve"):
        assert line in card
    # other weights beside the same document are none
    other = shutil.copytree(llama.baked, tmp_path / "other")
    shutil.copy(llama.source / "model.safetensors", other / "model.safetensors")
    one_line_error(fp8kv("verify", other), "holds no KV-cache scales")
    after = calibrated(llama.baked, tmp_path / "after", "--strategy", "attn_head")
    found = json_of("verify", llama.baked, "--against", after)
    assert found["problems"] == []
    bake_facts = json.loads((llama.baked / "fp8kv_bake.json").read_text())
    own = "heads have factors of their own in {k} of 3 layers for K and {v} for V; in the others"
    assert own.format(**bake_facts["layers_with_factors_per_head"]) in " ".join(llama.shown.split())
    few = "only 128 tokens were read, too few to tell"
    assert any(few in line for line in found["warnings"])
    assert few in " ".join(llama.shown.split())
    assert [0.5 < x <= 1 for fit in found["against"] for x in fit["used"].values()] == [True] * 6
    for statistics in (llama.scales, llama.scales / "fp8kv_stats.safetensors"):
        done = fp8kv("verify", llama.baked, "--against", statistics)
        one_line_error(done, IS_BAKED, "were not measured on it")
        assert not done.stdout


def test_verify_of_a_model_baked_for_int8_names_the_engines_with_that_cache(llama, tmp_path):
    small = tmp_path / "small"
    shown = succeeded(bake(llama.source, llama.scales, small, "--for", "int8")).output
    problem = "int8_per_token_head is served with heads of 32 and more (vllm), not of 16"
    assert f"warning: vLLM does not serve it: {problem}" in " ".join(shown.split())
    lmdeploy, vllm = "lmdeploy serve api_server {} --backend pytorch --quant-policy 8\n", "vllm serve {} "
    card = (small / "README.md").read_text()
    assert (lmdeploy.format(small) in card, vllm.format(small) in card) == (True, False)
    wide = tmp_path / "wide"  # LMDeploy's flag for float32 is not known
    succeeded(bake(llama.source, llama.scales, wide, "--for", "int8", "--dtype", "float32"))
    assert "No command is known that serves it." in (wide / "README.md").read_text()
    for answer in json_of("verify", small, "--engine", "vllm", status=1)["engines"]:
        assert (answer["flag"], answer["problem"], answer["layers"]) == (None, problem, [])
    source = save_model(tiny_model("llama", head_dim=32).to(torch.bfloat16), tmp_path / "source")
    scales, baked = calibrated(source, tmp_path / "scales"), tmp_path / "baked"
    assert "warning: vLLM" not in succeeded(bake(source, scales, baked, "--for", "int8")).output
    vllm += "--kv-cache-dtype int8_per_token_head\n"
    assert f"```bash\n{vllm}{lmdeploy}```".format(baked, baked) in (baked / "README.md").read_text()
    answer = json_of("verify", baked)
    assert (answer["good"], answer["baked"]) == (True, "int8")
    flags = {x["engine"]: x["flag"] for x in answer["engines"] if x["problem"] is None}
    int8 = {"vLLM": "int8_per_token_head", "LMDeploy": "lmdeploy_int8"}
    assert flags == {x: find_engine(x.lower()).caches.types[name][0].flag for x, name in int8.items()}
    shown = fp8kv("verify", baked, "--engine", "sglang")
    assert shown.stdout.startswith(f"{baked}, LlamaForCausalLM, baked for int8, on one GPU")
    assert (shown.exit_code, "it has no INT8 cache" in shown.stdout) == (1, True)
    vllm, no_server = ("--engine", "vllm"), ("--served", "http://localhost:9")
    for *flags, flag, value in (
        (*vllm, "--against", llama.scales),
        (*vllm, "--backend", "FLASH_ATTN"),
        no_server,
    ):
        done = fp8kv("verify", baked, *flags, flag, value)
        one_line_error(done, "is baked for int8, whose cache makes its own scales", f"leave {flag} out")
    one_line_error(
        fp8kv("convert", baked, "--to", "tgi", "-o", tmp_path / "no"), "is baked for int8; serve it"
    )
    other = shutil.copy(llama.source / "model.safetensors", baked / "model.safetensors")  # not what was baked
    one_line_error(fp8kv("verify", other.parent), "holds no KV-cache scales")


def test_scales_of_something_else(llama, tmp_path):
    other = save_model(tiny_model("llama").to(torch.bfloat16), tmp_path / "other")
    needless = shutil.copytree(llama.baked, tmp_path / "needless")
    (needless / "fp8kv_bake.json").unlink()
    shutil.copy(llama.source / "config.json", needless)
    beside = shutil.copytree(llama.source, tmp_path / "beside")
    json_file = calibrated(llama.source, tmp_path / "json", "--format", "json") / "kv_cache_scales.json"
    shutil.copy(json_file, beside)
    one_line_error(fp8kv("stress", beside, "-o", tmp_path / "out"), "has KV scales", "fp8kv strip")
    for model, scales, said in (
        (other, llama.scales, "do not fit"),
        (llama.scales, llama.scales, "has KV scales"),
        (beside, llama.scales, "has KV scales ('kv_cache_scales.json')"),
        (llama.source, llama.source, "statistics"),
        (llama.baked, llama.scales, IS_BAKED),
        (needless, calibrated(needless, tmp_path / "again"), "nothing to bake"),
    ):
        one_line_error(bake(model, scales, tmp_path / "out", "--for", "fp8"), said)
        assert not (tmp_path / "out").exists()
    # nor is the calibration replaced
    scales = shutil.copytree(llama.scales, tmp_path / "scales")
    done = bake(llama.source, scales, scales, "--for", "fp8", "--overwrite")
    one_line_error(done, "would mix with the calibration")
    assert (scales / "fp8kv_stats.safetensors").exists()


def test_other_commands_know_a_baked_model_with_scales_and_without(llama, tmp_path):
    no, again, copy = (tmp_path / name for name in ("no", "again", "copy"))
    one_line_error(fp8kv("apply", llama.scales, llama.baked, "-o", no), IS_BAKED)
    for flags in (("compare", llama.scales), ("convert", "--to", "tgi", "-o", no)):
        done = fp8kv(flags[0], llama.baked, *flags[1:])
        one_line_error(done, f"needs none: it {IS_BAKED}; serve it as it is")
    shown = ran("inspect", llama.baked).stdout
    assert shown == "baked for fp8: its weights hold the factors, so it needs no scales\n"
    assert json_of("inspect", llama.baked)["baked"] == "fp8"
    assert json_of("inspect", llama.scales)["baked"] is None
    one_line_error(fp8kv("inspect", llama.baked, "--plot", tmp_path / "x.png"), "no scales to draw")
    done = calibrate(llama.baked, "-o", again, "--dtype", "float32")
    assert f"this model {IS_BAKED}" in done.stdout + done.stderr
    one_line_error(bake(again, llama.scales, no, "--for", "fp8"), IS_BAKED)
    ran("strip", again, "-o", tmp_path / "stripped")
    one_line_error(bake(tmp_path / "stripped", llama.scales, no, "--for", "fp8"), IS_BAKED)
    ran("generate", again, "text", "--scales", again, "--device", "cpu")
    ran("convert", again, "--to", "sglang", "-o", copy)
    ran("repair", copy, "--stats", again, "-o", tmp_path / "mended")
    one_line_error(fp8kv("repair", copy, "--stats", llama.scales, "-o", no), IS_BAKED)


def test_scales_of_the_source_are_not_used_with_what_is_baked_of_it(llama, tmp_path):
    baked = shutil.copytree(llama.baked, tmp_path / "baked")
    for file in ("fp8kv_calibration.json", "fp8kv_stats.safetensors"):
        shutil.copy(llama.scales / file, baked)
    for command, scales in (
        (("eval", llama.baked, "--dataset", "random"), llama.scales),
        (("generate", baked, "text"), llama.scales),
        (("generate", baked, "text"), baked),
    ):
        done = fp8kv(*command, "--scales", scales, "--device", "cpu")
        one_line_error(done, f"{IS_BAKED}, and the scales in", "were not measured on it")


def test_weights_that_would_not_be_baked(llama, tmp_path):
    source = shutil.copytree(llama.source, tmp_path / "source")
    (source / "original").mkdir()
    shutil.copy(source / "model.safetensors", source / "original" / "consolidated.safetensors")
    in_place = fp8kv("bake", source, "--scales", llama.scales, "--for", "fp8", "--in-place")
    one_line_error(in_place, "holds 'original/consolidated.safetensors' too")
    succeeded(bake(source, llama.scales, tmp_path / "out", "--for", "fp8"))
    assert not (tmp_path / "out" / "original").exists()
    (source / "adapter_config.json").write_text("{}")
    one_line_error(bake(source, llama.scales, tmp_path / "no", "--for", "fp8"), "merge adapters first")


def test_in_place_keeps_what_it_replaces(llama, tmp_path):
    source, backup = shutil.copytree(llama.source, tmp_path / "source"), tmp_path / "source.before-fp8kv"
    flags = ("--scales", llama.scales, "--for", "fp8", "--in-place")
    assert json_of("bake", source, *flags)["backup"] == str(backup)
    for kept, directory in ((llama.source, backup), (llama.baked, source)):
        assert (directory / "model.safetensors").read_bytes() == (kept / "model.safetensors").read_bytes()
    one_line_error(fp8kv("bake", source, *flags), IS_BAKED)
    one_line_error(fp8kv("bake", "builtin:smollm2", *flags), "--in-place writes into a local directory")
    has_scales = fp8kv("bake", shutil.copytree(llama.scales, tmp_path / "scaled"), *flags)
    one_line_error(has_scales, "has KV scales", "take them out with fp8kv strip")


def test_statistics_far_below_what_the_model_computes(llama, tmp_path, monkeypatch):
    octave = factors.octave_factor
    monkeypatch.setattr(factors, "octave_factor", lambda scale: octave(scale) * 1024)
    done = bake(llama.source, llama.scales, tmp_path / "out", "--for", "fp8")
    one_line_error(done, "at 1.0, beyond FP8", "calibrate again")
    assert not (tmp_path / "out").exists()
