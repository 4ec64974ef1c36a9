"""Import before an engine: what engines import for pictures has no build for this torch."""

import importlib.machinery
import sys
import tempfile
from pathlib import Path
from unittest.mock import MagicMock

VERSION = "0.28.0"
MODULES = ("", ".io", ".ops", ".transforms", ".transforms.functional", ".transforms.v2.functional")


def install() -> None:
    """Put a torchvision in place that can be imported and does nothing."""
    folder = Path(tempfile.mkdtemp(), f"torchvision-{VERSION}.dist-info")
    folder.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: torchvision\nVersion: {VERSION}\n"
    (folder / "METADATA").write_text(metadata)
    sys.path.append(str(folder.parent))
    for name in MODULES:
        stub = MagicMock(__path__=[], __version__=VERSION)
        stub.__spec__ = importlib.machinery.ModuleSpec("torchvision", None)
        sys.modules[f"torchvision{name}"] = stub
    sys.modules["torchvision.transforms.v2"] = sys.modules["torchvision.transforms"]


install()
