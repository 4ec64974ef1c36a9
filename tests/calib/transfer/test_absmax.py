"""Scales and values of an NVFP4 cache, made of one another where absmax is known."""

import json

import pytest
import torch
from command_line import calibrate, fp8kv, one_line_error
from families import save_model
from scale_directories import NVFP4, model

from calib.files.model_directory import open_model_directory
from calib.files.stored_scales import read_scales
from calib.scales.stats_file import load_stats

PROJ = "{module}.{x}_proj.{x}_scale"
FORMATS = {"vllm": 448, "vllm-nvfp4": 448, "sglang-nvfp4": 2688}


@pytest.fixture(scope="module")
def calibrated(tiny_llama, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("absmax")
    flags = [f"--format={name}" for name in FORMATS]
    source = save_model(tiny_llama, scratch / "tiny-llama")
    assert calibrate(source, "-o", scratch / "out", *flags).exit_code == 0
    return scratch / "out"


def values_of(directory):
    layers = read_scales(directory).layers
    return {(layer.layer, x): getattr(layer, x)[0] for layer in layers for x in "kv"}


@pytest.mark.parametrize("name", FORMATS)
def test_a_calibration_writes_absmax_over_the_formats_divisor(name, calibrated):
    amax = load_stats(calibrated / name).amax_by_head()
    found = values_of(calibrated / name)
    # float32: one rounding of the division, another of its sixth
    wanted = {at: max(heads) / FORMATS[name] for at, heads in amax.items() if at[1] != "q"}
    assert found == pytest.approx(wanted, rel=2**-22)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_each_is_made_of_each(source, to, calibrated, tmp_path):
    done = fp8kv("convert", calibrated / source, "--to", to, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    found, wanted = values_of(tmp_path / "out"), values_of(calibrated / to)
    # from the smaller one: times 6 and perhaps a sixth again, each rounded in float32
    rel = 2**-22 if source == "sglang-nvfp4" else 0
    assert found == pytest.approx(wanted, rel=rel, abs=0)


def test_mse_scales_are_no_absmax_and_its_statistics_are(tiny_directory, tmp_path, calibrated):
    assert calibrate(tiny_directory, "-o", tmp_path / "mse", "--observer", "mse").exit_code == 0
    done = fp8kv("convert", tmp_path / "mse", "--to", "vllm-nvfp4", "-o", tmp_path / "out")
    assert "from the absmax in the calibration's statistics" in " ".join(done.output.split())
    assert values_of(tmp_path / "mse") != values_of(tmp_path / "out")
    assert values_of(tmp_path / "out") == values_of(calibrated / "vllm-nvfp4")


def test_fp8_scales_of_unknown_origin_are_refused(tmp_path):
    done = fp8kv("convert", model(tmp_path / "a"), "--to", "sglang-nvfp4", "-o", tmp_path / "out")
    one_line_error(done, "whether its FP8 scales are absmax / 448 is not known")
    assert not (tmp_path / "out").exists()


def of_modelopt(directory, version):
    config = NVFP4 | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}
    config |= {"kv_cache_quant_algo": "FP8", "producer": {"name": "modelopt", "version": version}}
    return model(directory, names=PROJ, config=config)


@pytest.mark.parametrize("version", ["0.43.0", "0.47.0"])
def test_modelopts_fp8_scales_are_absmax(version, tmp_path):
    source = of_modelopt(tmp_path / "a", version)
    done = fp8kv("convert", source, "--to", "sglang-nvfp4", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    six = {at: torch.tensor(value).div(6).item() for at, value in values_of(source).items()}
    assert values_of(tmp_path / "out") == six


@pytest.mark.parametrize("version", ["0.33.0", "0.42.0", None])
def test_before_0_43_modelopt_clamped_fp8_scales(version, tmp_path):
    source = of_modelopt(tmp_path / "a", version)
    done = fp8kv("convert", source, "--to", "sglang-nvfp4", "-o", tmp_path / "out")
    one_line_error(done, "whether its FP8 scales are absmax / 448 is not known")


def test_values_of_unknown_convention_are_refused(tmp_path):
    source = model(tmp_path / "a", names=PROJ, config=NVFP4)
    done = fp8kv("convert", source, "--to", "vllm", "-o", tmp_path / "out")
    one_line_error(done, "absmax / 448 or absmax / 2688 is not known: no file says who")


def test_what_modelopts_version_tells_is_said(tmp_path):
    producer = {"name": "modelopt", "version": "0.41.0"}
    source = model(tmp_path / "a", names=PROJ, config=NVFP4 | {"producer": producer})
    done = fp8kv("convert", source, "--to", "vllm-nvfp4", "-o", tmp_path / "out")
    assert "absmax / 2688 (ModelOpt 0.41.0 writes it so)" in " ".join(done.output.split())
    six = {at: value * 6 for at, value in values_of(source).items()}
    assert values_of(tmp_path / "out") == six


@pytest.mark.parametrize(
    "flags", [("--observer", "mse"), ("--observer", "percentile"), ("--fp8-dtype", "e4m3fnuz")]
)
def test_a_calibration_for_fp8s_grid_alone_is_refused(flags, tiny_directory, tmp_path):
    done = calibrate(tiny_directory, "-o", tmp_path / "out", "--format", "vllm-nvfp4", *flags)
    one_line_error(done, "format 'vllm-nvfp4' is made from absmax")


def test_the_card_serves_with_that_cache(calibrated):
    card = (calibrated / "sglang-nvfp4" / "README.md").read_text()
    assert card.startswith("# NVFP4 KV-cache scales for")
    assert "--kv-cache-dtype nvfp4" in card


def test_the_config_names_the_convention(calibrated):
    for name in ("vllm-nvfp4", "sglang-nvfp4"):
        config = json.loads((calibrated / name / "config.json").read_text())
        producer = config["quantization_config"]["producer"]
        assert producer == {"name": "fp8kv", "nvfp4_kv_divisor": FORMATS[name]}


def test_repair_does_not_make_them_of_scales_that_are_no_absmax(calibrated, tmp_path):
    given = ("--stats", calibrated / "vllm", "--to", "vllm-nvfp4", "-o", tmp_path / "out")
    one_line_error(fp8kv("repair", calibrated / "vllm", *given), "repair mends FP8 scales")


@pytest.mark.parametrize("name", ["vllm-nvfp4", "sglang-nvfp4"])
def test_stripped_nothing_is_left_of_them(name, calibrated, tmp_path):
    assert fp8kv("strip", calibrated / name, "-o", tmp_path / "out").exit_code == 0
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    assert not open_model_directory(tmp_path / "out", weights=False).tensors


def test_strip_leaves_no_word_of_the_cache_beside_nvfp4_weights(tmp_path):
    config = NVFP4 | {"quant_algo": "NVFP4", "ignore": ["lm_head"]}
    source = model(tmp_path / "a", names=PROJ, config=config)
    assert fp8kv("strip", source, "-o", tmp_path / "out").exit_code == 0
    left = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert left == {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
