"""A training loop that gives its engine new weights, and KV-cache scales that fit them."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import calib


class Engine:
    """Stands in for vLLM, whose models have this method too."""

    def load_weights(self, weights):
        self.weights = {name: tensor.clone() for name, tensor in weights}


sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=256, **sizes))
text = torch.tensor([*Path(__file__).read_bytes()])[:1152].view(9, 128)
engine, optimizer = Engine(), torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(1, 31):
    batch = text[torch.randint(9, (4,))]
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        scales = calib.scales_for(model, [batch], strategy="attn_head")
        engine.load_weights([*model.named_parameters(), *scales.items()])
        first = scales["model.layers.0.self_attn.k_scale"].flatten()
        print(f"step {step}: loss {loss.item():.2f}, K scales of layer 0: {first.tolist()}")
