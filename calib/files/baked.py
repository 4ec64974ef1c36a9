"""Whether a directory's weights were baked, so that scale 1.0 is right for them."""

from pathlib import Path

from calib.choices import FP8Name
from calib.files.fingerprint import weights_digest
from calib.files.names import BAKE_FILE
from calib.files.strict_json import read_object


def baked_for(path: Path) -> str | None:
    """What the weights of a directory were baked for, fp8 or int8; None: they are no baked ones."""
    file = path / BAKE_FILE
    says = read_object(file) if file.exists() else {}
    purpose = says.get("for")
    is_own = purpose is not None and says.get("weights") == weights_digest(path)
    return str(purpose) if is_own else None


def baked_fp8_type(path: Path) -> FP8Name:
    """The FP8 type whose range K and V of a baked model fill."""
    says = read_object(path / BAKE_FILE)
    return "e4m3fnuz" if says.get("fp8_dtype") == "e4m3fnuz" else "e4m3fn"


def baked_from(path: Path) -> str:
    """The fingerprint of the model that a baked one was made from."""
    return str(read_object(path / BAKE_FILE).get("source"))


def bakes_latents(path: Path) -> bool:
    """Whether latents (MLA) of a baked model were, in K's place."""
    return read_object(path / BAKE_FILE).get("latent") is True
