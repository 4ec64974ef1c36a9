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


def test_a_calibration_writes_absmax_over_the_formats_divisor(several):
    for name, divisor in FORMATS.items():
        amax = load_stats(several / name).amax_by_head()
        # float32: one rounding of the division, another of its sixth
        wanted = {at: max(heads) / divisor for at, heads in amax.items() if at[1] != "q"}
        assert values_of(several / name) == pytest.approx(wanted, rel=2**-22), name
    for name in ("vllm-nvfp4", "sglang-nvfp4"):
        producer = config_of(several / name)["quantization_config"]["producer"]
        assert producer == {"name": "fp8kv", "nvfp4_kv_divisor": FORMATS[name]}
    card = (several / "sglang-nvfp4" / "README.md").read_text()
    assert card.startswith("# NVFP4 KV-cache scales for")
    assert "--kv-cache-dtype nvfp4" in card


def test_each_is_made_of_each_and_of_statistics(several, tiny_directory, tmp_path):
    for source, to in itertools.permutations(FORMATS, 2):
        out = tmp_path / f"{source}-{to}"
        convert(several / source, to, out)
        # from the smaller one: times 6 and perhaps a sixth again, each rounded in float32
        rel = 2**-22 if source == "sglang-nvfp4" else 0
        assert values_of(out) == pytest.approx(values_of(several / to), rel=rel, abs=0)
    # scales of an observer that clips are no absmax, and its statistics are
    mse = calibrated(tiny_directory, tmp_path / "mse", "--observer", "mse")
    said = convert(mse, "vllm-nvfp4", tmp_path / "out")
    assert "from the absmax in the calibration's statistics" in said
    assert values_of(mse) != values_of(tmp_path / "out") == values_of(several / "vllm-nvfp4")


def test_fp8_scales_of_modelopt_are_absmax_since_0_43(tmp_path):
    scheme = {"num_bits": 8, "type": "float", "dynamic": False}
    config = NVFP4 | {"kv_cache_scheme": scheme, "kv_cache_quant_algo": "FP8"}

    def of_modelopt(version):
        says = config | {"producer": {"name": "modelopt", "version": version}}
        return model(tmp_path / f"{version}", names=PROJ, config=says)

    source = of_modelopt("0.43.0")
    convert(source, "sglang-nvfp4", tmp_path / "out")
    six = {at: torch.tensor(value).div(6).item() for at, value in values_of(source).items()}
    assert values_of(tmp_path / "out") == six
    # before, it clamped them
    for source in (of_modelopt("0.42.0"), of_modelopt(None), model(tmp_path / "plain")):
        done = fp8kv("convert", source, "--to", "sglang-nvfp4", "-o", tmp_path / "no")
        one_line_error(done, "whether its FP8 scales are absmax / 448 is not known")
        assert not (tmp_path / "no").exists()


def test_values_tell_by_modelopts_version_what_they_are(tmp_path):
    producer = {"name": "modelopt", "version": "0.41.0"}
    source = model(tmp_path / "a", names=PROJ, config=NVFP4 | {"producer": producer})
    said = convert(source, "vllm-nvfp4", tmp_path / "out")
    assert "absmax / 2688 (ModelOpt 0.41.0 writes it so)" in said
    assert values_of(tmp_path / "out") == {at: value * 6 for at, value in values_of(source).items()}
    source = model(tmp_path / "b", names=PROJ, config=NVFP4)
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
    ran("strip", model(tmp_path / "weights", names=PROJ, config=config), "-o", tmp_path / "out")
    left = config_of(tmp_path / "out")["quantization_config"]
    assert left == {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
