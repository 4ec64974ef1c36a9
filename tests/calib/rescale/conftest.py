"""Baked models that several tests read and none changes."""

from types import SimpleNamespace

import pytest
from baking import bake, calibrated, latent_directory, model_directory
from command_line import succeeded


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A Llama, a calibration of it, and what is baked of both for FP8."""
    root = tmp_path_factory.mktemp("llama")
    return baked_fixture(root, model_directory(root / "source", "llama"))


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory):
    """The same of a DeepSeek-V3, which caches latents."""
    root = tmp_path_factory.mktemp("deepseek")
    return baked_fixture(root, latent_directory(root / "source", "deepseek_v3"), "--format", "fp8kv")


def baked_fixture(root, source, *flags):
    scales, baked = calibrated(source, root / "scales", *flags), root / "baked"
    done = succeeded(bake(source, scales, baked, "--for", "fp8"))
    return SimpleNamespace(source=source, scales=scales, baked=baked, shown=done.output)
