"""A training loop that gives its engine new weights, and KV-cache scales that fit them."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import calib


class Engine:
    """Stands in for vLLM, started on a checkpoint with scales; its workers have this method."""

    def reload_weights(self, weights_iterator):
        self.weights = {name: tensor.clone() for name, tensor in weights_iterator}


sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=256, **sizes))
text = torch.tensor([*calib.scales_for.__doc__.encode()])[:1152].view(9, 128)
engine, optimizer = Engine(), torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(1, 31):
    batch = text[torch.randint(9, (4,))]
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        scales = calib.scales_for(model, [text], strategy="tensor")
        engine.reload_weights(iter([*model.named_parameters(), *scales.items()]))
        first = scales["model.layers.0.self_attn.k_scale"].item()
        print(f"step {step}: loss {loss.item():.2f}, K scale of layer 0: {first:.4f}")
