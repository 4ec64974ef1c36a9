"""Whole models of a config's shape with random weights, for benchmarks whose speed depends on no value."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


@torch.no_grad()
def random_model(config: PreTrainedConfig, *, small: bool) -> PreTrainedModel:
    """Make a model of this shape in float16; small: few layers, narrow MLP, few words."""
    if small:
        config.update({"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 512})
        config.layer_types = None
    device = torch.device("cpu" if small else "cuda")
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    model.to_empty(device=device)
    for weight in model.parameters():
        weight.copy_(torch.randn_like(weight) * 0.02 if weight.dim() > 1 else weight.fill_(1.0))
    _restore_buffers(model, config)
    return model.eval()


def _restore_buffers(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """RoPE's frequencies are no weights, and `to_empty` forgets them."""
    for name, module in model.named_modules():
        if name.endswith("rotary_emb"):
            fresh = type(module)(config)
            for key, buffer in fresh.named_buffers(recurse=False):
                getattr(module, key).copy_(buffer)
