"""Tiny checkpoints with a layer that drafts tokens (MTP), and the layer run by itself, plainly."""

import torch
from families import HYBRIDS, LATENT, edit_json, save_model, tiny_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

_GLM = {"head_dim": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "deepseek_v3": LATENT["deepseek_v3"],
    "glm4_moe": _GLM | {"attention_bias": True, "use_qk_norm": True},
    "qwen3_next": HYBRIDS["qwen3_next"] | {"layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2},
}
_NAMES = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}  # of Qwen3-Next


class Drafting:
    """A model and its draft, the layer after the last, saved in `directory` as checkpoints are."""

    def __init__(self, family, directory, change=lambda model, joining: None, **options):
        model = tiny_model(family, **{"num_hidden_layers": 4, **MODELS[family], **options})
        count, size, norm = len(model.model.layers) - 1, model.config.hidden_size, type(model.model.norm)
        parts = [norm(size, eps=model.config.rms_norm_eps) for _ in range(2)] + [
            nn.Linear(2 * size, size, bias=False)
        ]
        join = nn.ModuleDict(dict(zip(_NAMES, parts, strict=True)))
        for i, part in enumerate(join.values()):
            nn.init.normal_(part.weight, 0.5, 0.5, generator=torch.Generator().manual_seed(i))
        change(model, join)
        save_model(model, directory)
        file, place = directory / "model.safetensors", f"model.layers.{count}."
        weights = load_file(file) | {f"{place}{name}": x for name, x in join.state_dict().items()}
        changes = {"num_hidden_layers": count, "num_nextn_predict_layers": 1}
        if family == "qwen3_next":
            names = {f"{place}{own}.weight": f"mtp.{name}.weight" for own, name in _NAMES.items()}
            weights = {names.get(n, n).replace(place, "mtp.layers.0."): x for n, x in weights.items()}
            changes = {"num_hidden_layers": count, "layer_types": model.config.layer_types[:count]}
        save_file(weights, file, {"format": "pt"})
        edit_json(directory / "config.json", **changes)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.directory, self.join, self.layer = directory, join, model.model.layers[count]
        self.layer.self_attn.layer_idx = 0
        if family == "deepseek_v3":
            self.layer.self_attn.num_key_value_groups = 1

    @torch.inference_mode()
    def run(self, ids, cache, first):
        """Read ids [B, T] as engines do, in the place of token 0 zeros or the next; return hidden states."""
        embedded, hidden = self.model.get_input_embeddings()(ids), self.model.model(ids).last_hidden_state
        first = [(torch.zeros_like(embedded[:, 0]) if first == "zero" else embedded[:, 1], hidden[:, 0], 0)]
        tokens = first + [(embedded[:, j], hidden[:, j - 1], j - 1) for j in range(1, ids.shape[1])]
        embedded, hidden = (torch.stack([token[i] for token in tokens], 1) for i in (0, 1))
        join = self.join
        joined = join["eh_proj"](torch.cat([join["enorm"](embedded), join["hnorm"](hidden)], -1))
        angles = self.model.model.rotary_emb(joined, torch.tensor([[token[2] for token in tokens]]))
        return self.layer(joined, position_embeddings=angles, past_key_values=cache)
