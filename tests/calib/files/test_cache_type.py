"""Which of two conventions the values of an NVFP4 cache follow, by what files and measures say."""

import pytest
from command_line import fp8kv
from scale_directories import NVFP4, PROJ, lines_of, model

from calib.engines.scale_fit import measured_convention
from calib.files.cache_type import nvfp4_convention
from calib.files.model_directory import open_model_directory
from calib.files.stored_scales import read_scales


def of(directory, producer=None, names=PROJ, **changes):
    config = NVFP4 | ({"producer": producer} if producer else {}) | changes
    return open_model_directory(model(directory, config=config, names=names), weights=False)


def by(name, version=None, **more):
    return {"name": name, "version": version, **more}


@pytest.mark.parametrize(
    ("producer", "divisor"),
    [
        (by("modelopt", "0.41.0"), 2688),  # before its #790
        (by("modelopt", "0.42.0rc1"), 448),
        (by("modelopt", "new"), None),
        (by("modelopt", None), None),
        (by("fp8kv", nvfp4_kv_divisor=448), 448),
        (by("fp8kv", nvfp4_kv_divisor=2688), 2688),
        (by("fp8kv", nvfp4_kv_divisor=7), None),
        (by("somebody", "0.47.0"), None),
        ("modelopt", None),
    ],
)
def test_the_producer_tells(producer, divisor, tmp_path):
    found = nvfp4_convention(of(tmp_path, producer))
    assert found.divisor == divisor
    assert ("not known" in str(found)) == (divisor is None)


def test_names_and_other_words_of_the_config_tell(tmp_path):
    four_bits = {"num_bits": 4, "type": "float", "strategy": "tensor_group"}
    said = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_quant_algo": None}
    for names, divisor in (("{module}.{x}_global_scale", 2688), ("{module}.{x}_scale", None)):
        told = nvfp4_convention(of(tmp_path, names=names, **said, kv_cache_scheme=four_bits))
        assert told.divisor == divisor  # the first are AutoRound's
    modelopt = by("modelopt", "0.47.0")
    assert "from Megatron, absmax / 2688" in str(nvfp4_convention(of(tmp_path, modelopt)))
    found = nvfp4_convention(of(tmp_path, modelopt, kv_cache_quant_algo="FP8"))
    assert found.divisor is None
    assert "name FP8 as well" in str(found)
    assert nvfp4_convention(open_model_directory(model(tmp_path), weights=False)) is None


@pytest.mark.parametrize("told", [448, 2688, None])
@pytest.mark.parametrize("true", [448, 2688])
def test_measured_absmax_tells_also_from_other_data(told, true, tmp_path):
    convention = nvfp4_convention(of(tmp_path, by("fp8kv", nvfp4_kv_divisor=told)))
    layers = read_scales(tmp_path).layers
    assert measured_convention(convention, layers, {}) == (convention, [])
    for other_data in (0.6, 1.5):
        size = true * other_data
        amax = {(x.layer, letter): (x.values(letter)[0] * size,) for x in layers for letter in "kv"}
        found, problems = measured_convention(convention, layers, amax)
        assert found.divisor == true
        assert bool(problems) == (told not in (true, None))


def test_commands_say_that_they_are_no_fp8_scales(tmp_path):
    of(tmp_path, by("fp8kv", nvfp4_kv_divisor=2688))
    done = fp8kv("generate", tmp_path, "text")
    assert done.exit_code == 2
    assert "are for an NVFP4 cache, not for FP8" in lines_of(done) + done.stderr
    assert '"divisor": 2688' in fp8kv("inspect", tmp_path, "--json").stdout
