"""What the vendors say of their GPUs: memory, and dense bfloat16 matrix products per second."""

from dataclasses import dataclass

from calib.errors import InputError


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    memory: int  # bytes
    flops: float  # dense bfloat16, per second


def _gpu(gigabytes: int, teraflops: float) -> Gpu:
    return Gpu(gigabytes * 10**9, teraflops * 10**12)


# data sheets; figures there "with sparsity" are halved
GPUS = {
    "a100-40": _gpu(40, 312),
    "a100": _gpu(80, 312),
    "l4": _gpu(24, 121),
    "l40s": _gpu(48, 362),
    "rtx4090": _gpu(24, 165),
    "h100": _gpu(80, 989),
    "h200": _gpu(141, 989),
    "b200": _gpu(180, 2250),
    "mi300x": _gpu(192, 1307),
    "mi325x": _gpu(256, 1307),
    "mi355x": _gpu(288, 2500),
}


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`.

    Raises:
        InputError: it is not in the table.
    """
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise InputError(
            f"--gpu {name} is not one this plans for; use one of {', '.join(GPUS)}"
        ) from None
