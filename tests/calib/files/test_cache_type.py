"""Which of two conventions the values of an NVFP4 cache follow, by what files and measures say."""

import pytest
from command_line import fp8kv
from scale_directories import NVFP4, PROJ, lines_of, model

from calib.engines.scale_fit import measured_convention
from calib.files.cache_type import nvfp4_convention
from calib.files.model_directory import open_model_directory
from calib.files.stored_scales import read_scales

FOUR_BITS = {"num_bits": 4, "type": "float", "strategy": "tensor_group"}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {}}


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
        (by("modelopt", "1.0.0.dev3+gabc"), 448),
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


@pytest.mark.parametrize("names", ["{module}.{x}_global_scale", "{module}.{x}_scale"])
def test_autoround_is_known_by_its_names(names, tmp_path):
    found = nvfp4_convention(
        of(tmp_path, names=names, **COMPRESSED, kv_cache_scheme=FOUR_BITS, kv_cache_quant_algo=None)
    )
    assert found.divisor == (2688 if "global" in names else None)


def test_what_is_of_no_convention_or_of_several(tmp_path):
    assert "from Megatron, absmax / 2688" in str(nvfp4_convention(of(tmp_path, by("modelopt", "0.47.0"))))
    found = nvfp4_convention(of(tmp_path, by("modelopt", "0.47.0"), kv_cache_quant_algo="FP8"))
    assert found.divisor is None
    assert "name FP8 as well" in str(found)
    assert nvfp4_convention(open_model_directory(model(tmp_path), weights=False)) is None


@pytest.mark.parametrize("told", [448, 2688, None])
@pytest.mark.parametrize("true", [448, 2688])
@pytest.mark.parametrize("other_data", [0.6, 1.5])
def test_measured_absmax_tells_also_from_other_data(told, true, other_data, tmp_path):
    producer = by("fp8kv", nvfp4_kv_divisor=told)
    directory = of(tmp_path, producer)
    amax = {
        (i, x): (value * true * other_data,)
        for x, values in {"k": (0.5, 0.25), "v": (0.125, 0.0625)}.items()
        for i, value in enumerate(values)
    }
    found, problems = measured_convention(nvfp4_convention(directory), read_scales(tmp_path).layers, amax)
    assert found.divisor == true
    assert bool(problems) == (told not in (true, None))


def test_nothing_measured_tells_nothing(tmp_path):
    told = nvfp4_convention(of(tmp_path))
    assert measured_convention(told, read_scales(tmp_path).layers, {}) == (told, [])


def test_commands_say_that_they_are_no_fp8_scales(tmp_path):
    of(tmp_path, by("fp8kv", nvfp4_kv_divisor=2688))
    done = fp8kv("generate", tmp_path, "text")
    assert done.exit_code == 2
    assert "are for an NVFP4 cache, not for FP8" in lines_of(done) + done.stderr
    assert '"divisor": 2688' in fp8kv("inspect", tmp_path, "--json").stdout
