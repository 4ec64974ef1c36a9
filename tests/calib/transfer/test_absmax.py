"""Scales and values of an NVFP4 cache, made of one another where absmax is known."""

import itertools

import pytest
import torch
from apply_cases import calibrated, config_of
from command_line import calibrate, fp8kv, one_line_error, ran
from scale_directories import NVFP4, model

from calib.files.stored_scales import read_scales
from calib.scales.stats_file import load_stats

PROJ = "{module}.{x}_proj.{x}_scale"
FORMATS = {"vllm": 448, "vllm-nvfp4": 448, "sglang-nvfp4": 2688}


@pytest.fixture(scope="module")
def several(model, tmp_path_factory):
    """A calibration in each of the formats."""
    return calibrated(
        model, tmp_path_factory.mktemp("absmax") / "out", *(f"--format={name}" for name in FORMATS)
    )


def values_of(directory):
    layers = read_scales(directory).layers
    return {(layer.layer, x): getattr(layer, x)[0] for layer in layers for x in "kv"}


def convert(source, to, out):
    done = ran("convert", source, "--to", to, "-o", out)
    return " ".join(done.output.split())


def refuses(source, to, out, *phrases):
    one_line_error(fp8kv("convert", source, "--to", to, "-o", out), *phrases)
    assert not out.exists()


def test_a_calibration_writes_absmax_over_the_formats_divisor(several):
    for name, divisor in FORMATS.items():
        amax = load_stats(several / name).amax_by_head()
        # float32: one rounding of the division, another of its sixth
        wanted = {at: max(heads) / divisor for at, heads in amax.items() if at[1] != "q"}
        assert values_of(several / name) == pytest.approx(wanted, rel=2**-22), name
    for name in ("vllm-nvfp4", "sglang-nvfp4"):
        config = config_of(several / name)
        producer = config["quantization_config"]["producer"]
        assert producer == {"name": "fp8kv", "nvfp4_kv_divisor": FORMATS[name]}
    card = (several / "sglang-nvfp4" / "README.md").read_text()
    assert card.startswith("# NVFP4 KV-cache scales for")
    assert "--kv-cache-dtype nvfp4" in card


@pytest.mark.parametrize(("source", "to"), [*itertools.permutations(FORMATS, 2)])
def test_each_is_made_of_each(source, to, several, tmp_path):
    convert(several / source, to, tmp_path / "out")
    # from the smaller one: times 6 and perhaps a sixth again, each rounded in float32
    rel = 2**-22 if source == "sglang-nvfp4" else 0
    assert values_of(tmp_path / "out") == pytest.approx(values_of(several / to), rel=rel, abs=0)


def test_mse_scales_are_no_absmax_and_its_statistics_are(tiny_directory, tmp_path, several):
    mse = calibrated(tiny_directory, tmp_path / "mse", "--observer", "mse")
    said = convert(mse, "vllm-nvfp4", tmp_path / "out")
    assert "from the absmax in the calibration's statistics" in said
    assert values_of(mse) != values_of(tmp_path / "out")
    assert values_of(tmp_path / "out") == values_of(several / "vllm-nvfp4")


def of_modelopt(directory, version):
    config = NVFP4 | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}
    config |= {"kv_cache_quant_algo": "FP8", "producer": {"name": "modelopt", "version": version}}
    return model(directory, names=PROJ, config=config)


def test_fp8_scales_of_modelopt_are_absmax_since_0_43(tmp_path):
    source = of_modelopt(tmp_path / "new", "0.43.0")
    convert(source, "sglang-nvfp4", tmp_path / "out")
    six = {at: torch.tensor(value).div(6).item() for at, value in values_of(source).items()}
    assert values_of(tmp_path / "out") == six
    unknown = "whether its FP8 scales are absmax / 448 is not known"
    for version in ("0.42.0", None):  # before, it clamped them
        source = of_modelopt(tmp_path / f"{version}", version)
        refuses(source, "sglang-nvfp4", tmp_path / "no", unknown)
    refuses(model(tmp_path / "plain"), "sglang-nvfp4", tmp_path / "no", unknown)


def test_values_tell_by_modelopts_version_what_they_are(tmp_path):
    producer = {"name": "modelopt", "version": "0.41.0"}
    source = model(tmp_path / "a", names=PROJ, config=NVFP4 | {"producer": producer})
    said = convert(source, "vllm-nvfp4", tmp_path / "out")
    assert "absmax / 2688 (ModelOpt 0.41.0 writes it so)" in said
    assert values_of(tmp_path / "out") == {at: value * 6 for at, value in values_of(source).items()}
    source = model(tmp_path / "b", names=PROJ, config=NVFP4)
    unknown = "absmax / 448 or absmax / 2688 is not known: no file says who"
    refuses(source, "vllm", tmp_path / "no", unknown)


def test_what_is_for_fp8_alone_is_refused(several, tiny_directory, tmp_path):
    for flags in (("--observer", "mse"), ("--fp8-dtype", "e4m3fnuz")):
        done = calibrate(tiny_directory, "-o", tmp_path / "out", "--format", "vllm-nvfp4", *flags)
        one_line_error(done, "format 'vllm-nvfp4' is made from absmax")
    given = ("--stats", several / "vllm", "--to", "vllm-nvfp4", "-o", tmp_path / "out")
    one_line_error(fp8kv("repair", several / "vllm", *given), "repair mends FP8 scales")


def test_strip_leaves_no_word_of_the_cache_beside_nvfp4_weights(tmp_path):
    config = NVFP4 | {"quant_algo": "NVFP4", "ignore": ["lm_head"]}
    source = model(tmp_path / "weights", names=PROJ, config=config)
    ran("strip", source, "-o", tmp_path / "out")
    left = config_of(tmp_path / "out")["quantization_config"]
    assert left == {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
