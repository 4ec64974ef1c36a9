"""The two conventions of an NVFP4 cache's calibrated value, and which one a directory follows.

NVFP4 holds x ≈ code * block scale * value: codes up to 6, block scales in E4M3 up to 448, made at
run time for 16 numbers each. The value is calibrated; tools and engines differ by a factor of 6.
"""

import re
from statistics import median
from typing import Literal, NamedTuple

from packaging.version import InvalidVersion, Version

from calib.files.calibrations import Amax
from calib.files.fp8_type import names_nvfp4, names_only_nvfp4
from calib.files.model_directory import ModelDirectory
from calib.files.stored_scales import StoredLayer

Divisor = Literal[448, 2688]  # the value is absmax / this
LARGER: Divisor = 448  # values fit E4M3 before they are multiplied; equal to FP8 scales
SMALLER: Divisor = 2688  # 448 * 6: block scales use all of E4M3
FACTOR = SMALLER / LARGER
PRODUCER_KEY = "nvfp4_kv_divisor"  # in what our exports say of their producer
# ModelOpt #790; before, its exporter wrote absmax / 2688
_MODELOPT_CHANGED = Version("0.42")


class Convention(NamedTuple):
    """What a directory's values are, and how that is known."""

    divisor: Divisor | None  # None: not known
    because: str

    def __str__(self) -> str:
        known = f"absmax / {self.divisor}" if self.divisor else "absmax / 448 or absmax / 2688"
        return f"{known} ({self.because})"


def convention(directory: ModelDirectory) -> Convention | None:
    """The convention that a directory's files tell; None where they hold FP8 scales."""
    if not names_nvfp4(directory):
        return None
    if not names_only_nvfp4(directory):
        return Convention(None, "not known: its files name FP8 as well")
    if any(tensor.parsed.dialect == "auto-round" for tensor in directory.tensors):
        return Convention(SMALLER, "k_global_scale is AutoRound's name")
    producer = (directory.quantization or {}).get("producer") or {}
    producer = producer if isinstance(producer, dict) else {}
    name, said = producer.get("name"), producer.get(PRODUCER_KEY)
    if name == "fp8kv" and said in (LARGER, SMALLER):
        return Convention(said, "fp8kv wrote it so")
    if name == "modelopt" and (version := release(producer.get("version"))):
        if version < _MODELOPT_CHANGED:
            return Convention(SMALLER, f"ModelOpt {version} writes it so")
        return Convention(
            LARGER,
            f"ModelOpt {version} writes it so from Hugging Face models; from Megatron, absmax / "
            "2688: compare with verify --against STATS",
        )
    return Convention(None, "not known: no file says who wrote them; verify --against STATS tells")


def compared(told: Convention, layers: list[StoredLayer], amax: Amax) -> tuple[Convention, list[str]]:
    """The convention that measured absmax shows, and a problem where the files tell another."""
    divisor = _measured_divisor(layers, amax)
    if divisor in (None, told.divisor):
        return told, []
    shown = Convention(divisor, "as the statistics show")
    return shown, [f"the values are {shown}, and not {told}"] if told.divisor else []


def _measured_divisor(layers: list[StoredLayer], amax: Amax) -> Divisor | None:
    """The convention that values fit better; None where nothing compares."""
    ratios = [
        max(amax[layer.layer, letter]) / max(values)
        for layer in layers
        for letter in "kv"
        if (values := getattr(layer, letter)) and max(values) > 0 and (layer.layer, letter) in amax
    ]
    if not ratios:
        return None
    return SMALLER if median(ratios) ** 2 > LARGER * SMALLER else LARGER


def release(said: object) -> Version | None:
    """The release that a producer's version is of or comes before; None where it names none."""
    found = re.match(r"\d+\.\d+(?:\.\d+)?", str(said))
    try:
        return Version(found[0]) if found else None
    except InvalidVersion:
        return None
