"""Where a model takes its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids go; with offloaded weights accelerate moves them on from the CPU."""
    return torch.device("cpu") if model.device.type == "meta" else model.device
