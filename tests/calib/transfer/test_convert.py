"""Scales written again, every format into every other, bit for bit or refused; `strip` gives all back."""

import itertools
import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from apply_cases import calibrated, config_of, contents, damage, scales
from command_line import calibrate, fp8kv, json_of, one_line_error, ran, succeeded
from families import edit_json, edit_tensors, save_model, tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from scale_directories import NVFP4, PROJ
from scale_directories import model as directory_of
from transformers import AutoModelForCausalLM

from calib.capture.directory_scales import open_scales
from calib.files.names import INDEX_FILE, SCALES_SHARD
from calib.files.stored_scales import read_scales
from calib.formats import FORMATS
from calib.scales.stats_file import load_stats
from calib.transfer import convert as conversion

# checkpoints, of these those that hold scales of FP8, and of these those that hold one per head
FORMS = tuple(name for name, target in FORMATS.items() if target.with_weights)
SCALAR = tuple(name for name in FORMS if not FORMATS[name].nvfp4)
PER_HEAD = tuple(name for name in SCALAR if "attn_head" in FORMATS[name].strategies)
ENDINGS = ("{x}_scale", "attn.{x}_scale", "{x}_proj.{x}_scale", "{x}_proj.output_scale", "{x}_cache.scale")
NAMES = [f"{{module}}.{name}" for name in (*ENDINGS, "qkv_proj.{x}_scale")]
CONVERT = "convert {} --without-q"
# what no reader takes for memory that nobody wrote
SCALE = st.floats(2.0**-20, 2.0**10, width=32).filter(lambda scale: scale != 1)


# no deadline: a machine that is busy would fail it; a fixture of the module may be shared
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_scales_survive_every_chain_of_formats_that_hold_them(model, data):
    config, draw = config_of(model), data.draw
    heads = draw(st.sampled_from([1, config["num_key_value_heads"]]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    shape = draw(st.sampled_from([(heads,), (heads, 1, 1), *([()] if heads == 1 else [])]))
    names = draw(st.sampled_from(NAMES if heads == 1 else NAMES[:1]))
    formats = st.sampled_from(SCALAR if heads == 1 else PER_HEAD)
    tensors, expected = {}, []
    for layer in range(config["num_hidden_layers"]):
        pair = [torch.tensor(draw(st.lists(SCALE, min_size=heads, max_size=heads))).to(dtype) for _ in "kv"]
        expected.append((layer, *(tuple(x.double().tolist()) for x in pair), None))
        module = f"model.layers.{layer}.self_attn"
        tensors |= {names.format(module=module, x=x): pair["kv".index(x)].view(shape) for x in "kv"}
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch, "source")
        here.mkdir()
        for file in model.iterdir():
            (here / file.name).symlink_to(file.resolve())
        save_file(tensors, here / "other.safetensors")
        for step, to in enumerate(draw(st.lists(formats, min_size=1, max_size=3))):
            conversion.convert(here, to, Path(scratch, str(step)))
            here = Path(scratch, str(step))
            assert scales(here) == expected
        # and reduced: the largest of every layer
        conversion.convert(here, "tgi", Path(scratch, "reduced"), reduce="max")
        assert scales(Path(scratch, "reduced")) == [(i, (max(k),), (max(v),), q) for i, k, v, q in expected]


def convert(source, to, out, *flags):
    ran("convert", source, "--to", to, "-o", out, *flags)
    return out


def command_line(command, source, statistics, out, to="vllm"):
    flags = ("--stats", statistics) if command == "repair" else ()
    return fp8kv(command, source, *flags, "--to", to, "-o", out)


def test_what_a_format_cannot_hold_is_refused_or_reduced(measured, per_head, tmp_path):
    out = tmp_path / "out"
    done = fp8kv("convert", per_head, "--to", "tgi", "-o", out)
    one_line_error(done, "holds no query scales", "--without-q")
    for name in ("convert", "repair"):
        done = command_line(name, measured, measured, out, "fp8kv")
        one_line_error(done, "--to fp8kv holds the statistics of a calibration", "use fp8kv calibrate")
    gone = {f"model.layers.2.self_attn.{x}_scale": None for x in "kv"}
    done = fp8kv("convert", damage(measured, tmp_path / "broken", gone), "--to", "tgi", "-o", out)
    one_line_error(done, "the k_scale of layer 2 is missing", "fp8kv repair")
    assert not out.exists()
    convert(per_head, "tgi", out, "--without-q", "--reduce", "max")
    assert scales(out) == [(i, (max(k),), (max(v),), None) for i, k, v, _ in scales(per_head)]
    assert {q for *_, q in scales(convert(per_head, "vllm", tmp_path / "kv", "--without-q"))} == {None}
    for to in ("vllm", "aphrodite"):
        out = convert(per_head, to, tmp_path / to)
        assert scales(out) == scales(per_head)
    assert config_of(out)["quantization_config"]["kv_cache_scheme"]["strategy"] == "attn_head"
    larger = [max(*k, *v) for _, k, v, _ in scales(measured)]
    for overwrite in ((), ("--overwrite",)):  # it bears a mark of ours
        out = convert(measured, "json", tmp_path / "json", *overwrite)
        foreign = shutil.copytree(measured, tmp_path / "foreign", dirs_exist_ok=True)
        for file in foreign.glob("fp8kv_*.*"):
            file.unlink()
        out_of = convert(foreign, "json", tmp_path / "of-foreign", *overwrite)
        assert sorted(contents(out_of)) == ["README.md", "kv_cache_scales.json"]
    assert [k for _, (k,), _, _ in scales(out)] == pytest.approx(larger)
    ones = {f"model.layers.{i}.self_attn.k_scale": 1.0 for i in range(3)}
    source = damage(measured, tmp_path / "ones", ones)
    (source / "fp8kv_stats.safetensors").unlink()  # of other scales
    done = ran("convert", source, "--to", "modelopt", "-o", tmp_path / "of-ones")
    assert "warning: K scales are all 1.0: nothing was measured" in done.stderr


def test_what_is_written_is_told_to_machines_too(measured, tmp_path):
    out, stripped, mended = (tmp_path / name for name in ("out", "stripped", "mended"))
    told = json_of("convert", measured, "--to", "tgi", "-o", out)
    assert (told["output"], told["format"], told["layers"]) == (str(out), "tgi", 3)
    assert json_of("strip", out, "-o", stripped) == {"output": str(stripped), "had_scales": True}
    assert json_of("strip", stripped, "-o", tmp_path / "again")["had_scales"] is False
    broken = damage(measured, tmp_path / "broken", {"model.layers.2.self_attn.k_scale": None})
    told = json_of("repair", broken, "--stats", measured, "-o", mended)
    (replaced,) = told["replaced"]
    assert (replaced["module"], replaced["letter"], replaced["old"]) == ("model.layers.2.self_attn", "k", [])
    assert tuple(replaced["new"]) == scales(measured)[2][1]
    assert told["problems"] == []


def test_a_refusal_names_flags_that_the_command_has(per_head, tmp_path):
    for command, to, fp8_dtype, ways_out in (
        (CONVERT, "tgi", "e4m3fn", "Use --reduce max, or --to vllm or aphrodite"),
        ("repair {} --stats {}", "tgi", "e4m3fn", "holds no query scales. Use --to vllm"),
        ("repair {} --stats {}", "vllm", "e4m3fnuz", "Use --to tgi"),
        (CONVERT, "vllm", "e4m3fnuz", "Use --to tgi"),
        (CONVERT, "tgi", "e5m2", "scales; these are for e5m2. Use a new calibration in format"),
        (CONVERT, "tgi", "9", "kv_cache_torch_dtype of config.json is 'float8_9'"),
    ):
        source = shutil.copytree(per_head, tmp_path / "source", dirs_exist_ok=True)
        config = config_of(source)
        if fp8_dtype != "e4m3fn":
            config |= {"kv_cache_torch_dtype": f"float8_{fp8_dtype}"}
            config["quantization_config"].pop("kv_cache_scheme")
            edit_json(source / "config.json", **config)
        words = command.replace("{}", str(source)).split()
        done = fp8kv(*words, "--to", to, "-o", tmp_path / "out")
        one_line_error(done, ways_out)
        named = set(re.findall(r"--[a-z][a-z0-9-]*", done.stderr))
        assert named <= set(re.findall(r"--[a-z][a-z0-9-]*", fp8kv(words[0], "--help").stdout))
        assert not (tmp_path / "out").exists()


def test_layers_left_in_16_bits_travel_with_the_checkpoint(model, measured, tmp_path):
    out = convert(measured, "vllm", tmp_path / "out", "--skip-layers", "2,0")
    assert config_of(out)["kv_cache_dtype_skip_layers"] == [0, 2]
    assert "--kv-cache-dtype-skip-layers 0 2" in (out / "README.md").read_text()
    assert scales(out) == scales(measured)
    left = "the config leaves layers 0, 2 in 16 bits: so does vLLM with our plugin"
    assert left in ran("verify", out).stdout
    assert json_of("verify", out)["layers_in_16_bits"] == [0, 2]
    in_fp8 = open_scales(out)(AutoModelForCausalLM.from_pretrained(model)).layers.values()
    assert [layer.layer_idx for layer in in_fp8] == [1]
    # they stay so in vLLM's next format; SGLang has no such choice, and a checkpoint without scales no need
    assert config_of(convert(out, "vllm", tmp_path / "same"))["kv_cache_dtype_skip_layers"] == [0, 2]
    done = ran("convert", out, "--to", "sglang", "-o", tmp_path / "sglang")
    assert "layers 0, 2 of the checkpoint: 16 bits in vLLM, FP8 as all others in SGLang" in done.stderr
    size = json_of("generate", out, "Hi", "--max-new-tokens", 1)
    assert size["bytes_per_token"] / size["bytes_per_token_16bit"] == pytest.approx((1 + 2 * 2) / 6)
    edit_json(out / "config.json", kv_cache_dtype_skip_layers=["1"])
    one_line_error(fp8kv("apply", measured, out, "-o", tmp_path / "no"), "is ['1']; it is a list of layer")
    edit_json(out / "config.json", kv_cache_dtype_skip_layers=[0, 2])
    ran("strip", out, "-o", tmp_path / "plain")
    for name in ("sglang", "plain"):
        assert "kv_cache_dtype_skip_layers" not in config_of(tmp_path / name)
    edit_json(measured / "config.json", layer_types=[*["sliding_attention"] * 2, "full_attention"])
    done = ran("convert", measured, "--to", "vllm", "--skip-layers", "1,2", "-o", tmp_path / "full")
    assert "does not start with layer 2 in 16 bits" in done.stderr
    for to, layers, words in (
        ("vllm", "3", "--skip-layers is [3]; it is a list of layer indices, 0 to 2"),
        ("vllm", "all", "--skip-layers is ['all']"),
        ("vllm", "0,1, 2", "--skip-layers names every layer"),
        ("sglang", "1", "--skip-layers: all layers have one type of cache in SGLang; convert to vllm"),
    ):
        done = fp8kv("convert", measured, "--to", to, "--skip-layers", layers, "-o", tmp_path / "no")
        one_line_error(done, words)


@pytest.mark.parametrize("command", ["convert", "repair"])
def test_what_is_known_or_not_of_the_engine_is_said(command, measured, tmp_path):
    done = command_line(command, measured, measured, tmp_path / "sglang", "sglang")
    assert "note (sglang): needs SGLang 0.5.23 or newer" in done.stdout
    other = shutil.copytree(measured, tmp_path / "other")
    edit_json(other / "config.json", architectures=["OwnForCausalLM"])
    done = command_line(command, other, measured, tmp_path / "vllm")
    assert "warning: whether vLLM loads these scales is not known" in done.stderr
    assert "whether vLLM loads these scales" in (tmp_path / "vllm" / "README.md").read_text()
    edit_json(other / "config.json", architectures=["Qwen3ForCausalLM"])
    done = command_line(command, other, measured, tmp_path / "out", "sglang")
    one_line_error(done, "Use --to vllm for vLLM, or a new calibration in format fp8kv for the bundled")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["convert {} --to tgi", "strip {}", "repair {} --stats {}"])
def test_an_output_without_weights_is_told_where_they_are(command, model, measured, tmp_path):
    bare = calibrated(model, tmp_path / "bare", "--weights", "none")
    words = command.replace("{}", str(bare)).split()
    done = fp8kv(*words, "-o", tmp_path / "out")
    one_line_error(done, "--weights none", "put the source's weight files beside", "give the sourc")
    assert "download" not in done.stderr
    # and so it is
    shutil.copy(model / "model.safetensors", bare)
    ran(*words, "-o", tmp_path / "out")
    weights = load_file(next((tmp_path / "out").glob("model[.-]*safetensors")))
    assert weights["model.norm.weight"].shape == (64,)
    if command != "strip {}":
        assert scales(tmp_path / "out") == scales(measured)


DIVISORS = {"vllm": 448, "vllm-nvfp4": 448, "sglang-nvfp4": 2688}


@pytest.fixture(scope="module")
def several(model, tmp_path_factory):
    """A calibration in each of the formats."""
    out = tmp_path_factory.mktemp("absmax") / "out"
    return calibrated(model, out, *(f"--format={name}" for name in DIVISORS))


def values_of(directory):
    return {(layer.layer, x): getattr(layer, x)[0] for layer in read_scales(directory).layers for x in "kv"}


def converted(source, to, out):
    return " ".join(ran("convert", source, "--to", to, "-o", out).output.split())


def assert_close(values, expected, by_sixths):
    """The same values, or by way of sixths the next float32."""
    assert values.keys() == expected.keys()
    new, old = (torch.tensor([x[at] for at in expected]).view(torch.int32) for x in (values, expected))
    assert (new - old).abs().max() <= int(by_sixths)


def test_each_is_made_of_each_and_of_statistics(several, tiny_directory, tmp_path):
    amax = load_stats(several / "vllm").amax_by_head()
    for name, divisor in DIVISORS.items():
        # float32: one rounding of the division, another of its sixth
        wanted = {at: max(heads) / divisor for at, heads in amax.items() if at[1] != "q"}
        assert values_of(several / name) == pytest.approx(wanted, rel=2**-22), name
    card = (several / "sglang-nvfp4" / "README.md").read_text()
    assert card.startswith("# NVFP4 KV-cache scales for")
    assert "--kv-cache-dtype nvfp4" in card
    for source, to in itertools.permutations(DIVISORS, 2):
        out = tmp_path / f"{source}-{to}"
        converted(several / source, to, out)
        assert_close(values_of(out), values_of(several / to), source == "sglang-nvfp4")
        if to != "vllm":  # of FP8 scales without statistics it is not known whether they are of absmax
            converted(out, source, back := tmp_path / f"{source}-{to}-{source}")
            # by way of a sixth: times 6 and a sixth, each rounded in float32
            assert_close(values_of(back), values_of(several / source), "sglang-nvfp4" in (source, to))
    # scales of an observer that clips are no absmax, and its statistics are
    mse = calibrated(tiny_directory, tmp_path / "mse", "--observer", "mse")
    assert "from the absmax in the calibration's statistics" in converted(mse, "vllm-nvfp4", tmp_path / "out")
    assert values_of(mse) != values_of(tmp_path / "out") == values_of(several / "vllm-nvfp4")


def test_modelopts_version_tells_what_its_fp8_scales_and_values_are(tmp_path):
    scheme = {"num_bits": 8, "type": "float", "dynamic": False}
    config = NVFP4 | {"kv_cache_scheme": scheme, "kv_cache_quant_algo": "FP8"}

    def of_modelopt(version):
        says = config | {"producer": {"name": "modelopt", "version": version}}
        return directory_of(tmp_path / f"{version}", names=PROJ, config=says)

    source = of_modelopt("0.43.0")
    converted(source, "sglang-nvfp4", tmp_path / "out")
    six = {at: torch.tensor(value).div(6).item() for at, value in values_of(source).items()}
    assert values_of(tmp_path / "out") == six
    # before, it clamped them
    for source in (of_modelopt("0.42.0"), of_modelopt(None), directory_of(tmp_path / "plain")):
        done = fp8kv("convert", source, "--to", "sglang-nvfp4", "-o", tmp_path / "no")
        one_line_error(done, "whether its FP8 scales are absmax / 448 is not known")
        assert not (tmp_path / "no").exists()
    producer = {"name": "modelopt", "version": "0.41.0"}
    source = directory_of(tmp_path / "a", names=PROJ, config=NVFP4 | {"producer": producer})
    assert "absmax / 2688 (ModelOpt 0.41.0 writes it so)" in converted(source, "vllm-nvfp4", tmp_path / "new")
    assert values_of(tmp_path / "new") == {at: value * 6 for at, value in values_of(source).items()}
    source = directory_of(tmp_path / "b", names=PROJ, config=NVFP4)
    done = fp8kv("convert", source, "--to", "vllm", "-o", tmp_path / "no")
    one_line_error(done, "absmax / 448 or absmax / 2688 is not known: no file says who")


def test_what_is_for_fp8_alone_is_refused(several, tiny_directory, tmp_path):
    for flags in (("--observer", "mse"), ("--fp8-dtype", "e4m3fnuz")):
        done = calibrate(tiny_directory, "-o", tmp_path / "out", "--format", "vllm-nvfp4", *flags)
        one_line_error(done, "format 'vllm-nvfp4' is made from absmax")
    given = ("--stats", several / "vllm", "--to", "vllm-nvfp4", "-o", tmp_path / "out")
    one_line_error(fp8kv("repair", several / "vllm", *given), "repair mends FP8 scales")
    # strip leaves no word of the cache beside NVFP4 weights
    config = NVFP4 | {"quant_algo": "NVFP4", "ignore": ["lm_head"]}
    ran("strip", directory_of(tmp_path / "weights", names=PROJ, config=config), "-o", tmp_path / "out")
    left = config_of(tmp_path / "out")["quantization_config"]
    assert left == {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}


INDEX, GOLDEN = "model.safetensors.index.json", Path(__file__).parents[2] / "golden"
CARD = b"---\nlicense: mit\n---\n\r\n<h1>A model</h1>\xff, in no encoding\n"


@pytest.fixture(scope="module", params=["one", "several"])
def source(request, tmp_path_factory):
    """A model in one file without an index, or in several with one; with files of odd layout."""
    model, directory = tiny_model("llama"), tmp_path_factory.mktemp("source") / "tiny"
    save_model(model, directory)
    if request.param == "several":
        (directory / "model.safetensors").unlink()
        model.save_pretrained(directory, max_shard_size="100KB")
        index = json.loads((directory / INDEX).read_text())
        index["metadata"]["mark"] = "\u00e9"
        del index["weight_map"]["model.norm.weight"]  # the tensor is in its file all the same
        (directory / INDEX).write_text(json.dumps(index))
    config = config_of(directory)
    (directory / "config.json").write_text(json.dumps({"zzz": 1e-05, **config}, indent=7) + "\n\n")
    (directory / "README.md").write_bytes(CARD)
    (directory / "code").mkdir()
    (directory / "code" / "config.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def in_formats(source, tmp_path_factory):
    """An output in each format, below one directory."""
    out = tmp_path_factory.mktemp("calibrated") / "out"
    return calibrated(source, out, *(f"--format={name}" for name in FORMATS))


def output_of(*command):
    ran(*command)
    return Path(command[command.index("-o") + 1])


def test_strip_gives_back_every_file_also_after_other_commands_and_in_place(source, in_formats, tmp_path):
    for name in FORMS:
        back = output_of("strip", in_formats / name, "-o", tmp_path / name / "back")
        assert contents(back) == contents(source), name
        there = output_of("convert", in_formats / "vllm", "--to", name, "-o", tmp_path / name / "there")
        for step in (there, output_of("convert", there, "--to", "vllm", "-o", tmp_path / name / "again")):
            back = output_of("strip", step, "-o", tmp_path / name / f"{step.name}-back")
            assert contents(back) == contents(source), name
    statistics, own = in_formats / "vllm", shutil.copytree(source, tmp_path / "own")
    repaired = output_of("repair", statistics, "--stats", statistics, "-o", tmp_path / "repaired")
    twice = calibrated(in_formats / "tgi", tmp_path / "twice")
    for seed in (1, 2):
        succeeded(calibrate(own, "--in-place", "--seed", seed))
    for out in (repaired, twice, own):
        assert contents(output_of("strip", out, "-o", tmp_path / f"{out.name}-back")) == contents(source)


def test_a_parameter_called_as_a_scale_stays_and_a_misspelt_scale_in_our_file_goes(in_formats, tmp_path):
    own = shutil.copytree(in_formats / "vllm", tmp_path / "own")
    index = json.loads((own / INDEX_FILE).read_text())
    parameter, misspelt = (f"model.layers.0.self_attn.{name}" for name in ("key_scale", "kscale"))
    for name, file in ((parameter, index["weight_map"]["model.norm.weight"]), (misspelt, SCALES_SHARD)):
        edit_tensors(own, lambda tensors, name=name: tensors.update({name: torch.ones(1)}), file)
        index["weight_map"][name] = file
    (own / INDEX_FILE).write_text(json.dumps(index))
    out = output_of("convert", own, "--to", "tgi", "-o", tmp_path / "out")
    files = json.loads((out / INDEX_FILE).read_text())["weight_map"]
    assert (parameter in load_file(out / files[parameter]), misspelt in files) == (True, False)


def test_edits_stay_and_an_output_without_its_source_keeps_no_false_card(source, in_formats, tmp_path):
    edited, old = (shutil.copytree(in_formats / name, tmp_path / name) for name in ("vllm", "tgi"))
    edit_json(edited / "config.json", rope_theta=5.0)
    back = output_of("strip", edited, "-o", tmp_path / "back")
    assert config_of(back) == {**config_of(source), "rope_theta": 5.0}
    shutil.copyfile(source / "config.json", edited / "config.json")  # which announces nothing
    (edited / "fp8kv_stats.safetensors").unlink()
    assert "without KV-cache scales" in ran("strip", edited, "-o", tmp_path / "quiet").stdout
    shutil.rmtree(old / "fp8kv_source")
    assert not (output_of("strip", old, "-o", tmp_path / "old-back") / "README.md").exists()
    card = (output_of("convert", old, "--to", "vllm", "-o", tmp_path / "new") / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n")
    assert "Format `tgi`" not in card


def test_a_conversions_card_is_its_own_and_then_the_models(source, in_formats, tmp_path):
    for to in (*FORMS, "json"):
        out = output_of("convert", in_formats / "tgi", "--to", to, "-o", tmp_path / to)
        card = (out / "README.md").read_bytes()
        assert b"Format `%b` for" % to.encode() in card
        assert b"Format `tgi`" not in card or to == "tgi"
        assert str(in_formats).encode() not in card
        assert str(out).encode() in card or not FORMATS[to].serve
        with_weights = FORMATS[to].with_weights
        assert card.startswith(b"---\nlicense: mit\n---\n") == with_weights
        assert card.count(b"<h1>A model</h1>") == with_weights
        assert (b"The weights are those of the source, bit for bit" in card) == with_weights
        assert (b"No weights are here" in card) == (b"bit for bit" not in card) == (not with_weights)
    # a conversion is an earlier output of ours
    output_of("convert", in_formats / "tgi", "--to", "json", "-o", tmp_path / "vllm", "--overwrite")
    done = calibrate(source, "-o", tmp_path / "bare", "--weights", "none", "--format", "tgi")
    promise = "put the source's weight files beside these"
    assert promise in done.stdout
    for output, said in ((tmp_path / "bare", promise), (in_formats / "json", ""), (in_formats / "fp8kv", "")):
        card = (output / "README.md").read_text(errors="replace")
        assert "No weights are here" in card
        assert said in card
        assert "bit for bit" not in card


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*-*/*")), ids=lambda p: f"{p.parent.name}-{p.name}")
def test_the_output_of_another_tool_loses_its_scales_alone(path, tmp_path):
    directory = shutil.copytree(path, tmp_path / "theirs")
    (directory / "README.md").write_bytes(CARD)
    back, twice, said = tmp_path / "back", tmp_path / "twice", "held no KV-cache scales to take out"
    assert said not in ran("strip", directory, "-o", back).stdout
    (back / "training_args.bin").write_bytes(b"")  # which has no scales
    assert f"{back} {said}" in ran("strip", back, "-o", twice).stdout
    (back / "training_args.bin").unlink()
    assert contents(twice) == contents(back)
    one_line_error(fp8kv("inspect", back), "holds no KV-cache scales")
    assert (back / "README.md").read_bytes() == CARD
    assert not (back / INDEX).exists()
    if "llmcompressor" in path.parent.name:
        assert "quantization_config" not in config_of(back)
    if path.match("nvidia-modelopt-*/fp8-kv"):  # what says that weights are quantised stays
        was, now = (json.loads((d / "hf_quant_config.json").read_text()) for d in (path, back))
        assert was["quantization"].pop("kv_cache_quant_algo") == "FP8"
        assert now == was
    there = output_of("convert", directory, "--to", "vllm", "-o", tmp_path / "there", "--without-q")
    assert contents(output_of("strip", there, "-o", tmp_path / "again")) == contents(back)
