"""Scales read for, or from, the values of an NVFP4 cache."""

from dataclasses import replace

from packaging.version import Version

from calib.capture.directory_scales import to_scales
from calib.errors import InputError
from calib.files.cache_type import FP8_DIVISOR, nvfp4_convention, parse_release
from calib.files.model_directory import ModelDirectory
from calib.files.names import CALIBRATION_FILE, STATS_FILE
from calib.files.stored_scales import StoredScales
from calib.recipe import load_recipe
from calib.same_model.check import check_same_model, model_facts, scales_facts
from calib.scales.scales import KVScales
from calib.scales.stats import derive_scales
from calib.scales.stats_file import load_stats

Read = tuple[KVScales, tuple[str, ...]]  # scales for E4M3, absmax / 448; notes on them
# before, its exporter clamped scales below 1.0
_MODELOPT_UNCLAMPED = Version("0.43")


def from_nvfp4(found: StoredScales) -> Read | None:
    """The values of an NVFP4 cache as absmax / 448; None where the directory holds FP8 scales.

    An InputError where their convention is not known.
    """
    followed = nvfp4_convention(found.directory)
    if followed is None:
        return None
    if followed.divisor is None:
        raise InputError(
            f"'{found.directory.path}': whether its values of an NVFP4 cache are absmax / 448 or "
            f"absmax / 2688 is {followed.because}; calibrate the model again"
        )
    scales = to_scales(found, found.layers_by_module(), "e4m3fn")
    factor = followed.divisor / FP8_DIVISOR
    layers = {
        name: replace(layer, k=layer.k * factor, v=layer.v * factor) for name, layer in scales.layers.items()
    }
    return replace(scales, layers=layers), (f"values were read as {followed}",)


def for_nvfp4(found: StoredScales, checkpoint: ModelDirectory) -> Read | None:
    """Scales that are absmax / 448, of a directory with FP8 scales; None: those in its files are.

    An InputError where that is not known: scales may be other than absmax, clipped on purpose.
    """
    path = found.directory.path
    if (path / STATS_FILE).exists() and (path / CALIBRATION_FILE).exists():
        recipe = load_recipe(
            str(path / CALIBRATION_FILE),
            {
                "observer.name": "absmax",
                "strategy": found.strategy,
                "fp8_dtype": "e4m3fn",
                "center_keys": False,
            },
        )
        stats = load_stats(path)
        check_same_model(scales_facts(path), model_facts(checkpoint, stats.layers))
        return derive_scales(stats, recipe), (
            "values were made from the absmax in the calibration's statistics",
        )
    if _is_of_an_unclamped_modelopt(found):
        return None
    raise InputError(
        f"'{path}': whether its FP8 scales are absmax / 448 is not known, and values of an NVFP4 "
        "cache are made from absmax; calibrate the model again with that --format"
    )


def _is_of_an_unclamped_modelopt(found: StoredScales) -> bool:
    producer = (found.directory.quantization or {}).get("producer")
    if not isinstance(producer, dict) or producer.get("name") != "modelopt":
        return False
    version = parse_release(producer.get("version"))
    return version is not None and version >= _MODELOPT_UNCLAMPED
