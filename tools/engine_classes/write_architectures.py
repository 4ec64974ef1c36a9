"""Write a small config.json of every architecture that the engines' tables are about.

write_architectures.py [ARCHITECTURE ...]   all of architectures.yaml, or these

Runs with our own transformers. Each file has the key "fp8kv_attention": the modules that cache K
and V, named as in a checkpoint.
"""

import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HERE = Path(__file__).parent
FIXTURES = HERE / "architectures"
# what makes a module one that caches K and V: the layer that makes them
MAKERS = ("k_proj", "qkv_proj", "kv_b_proj", "kv_a_proj_with_mqa", "query_key_value", "c_attn")
MAKERS += ("Wqkv", "wkv", "wk", "kv_proj", "qkv", "q_proj")
NOT_TEXT = ("vision", "visual", "audio", "image", "encoder.", "resampler", "indexer", "cross_attn")

SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "ffn_hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "sliding_window": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "shared_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    # MLA: the sizes that kernels are made for
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    # linear attention and Mamba
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
# of a model whose config class is its publisher's own, and so not in transformers
PLAIN = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL_VISION = {
    "hidden_size": 128,
    "embed_dim": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "head_dim": 64,
    "image_size": 56,
    "patch_size": 14,
}


def main() -> None:
    warnings.simplefilter("ignore")
    wanted = yaml.safe_load((HERE / "architectures.yaml").read_text())
    chosen = sys.argv[1:] or sorted(wanted)
    failed = []
    for architecture in chosen:
        try:
            write(architecture, wanted[architecture] or {})
        except Exception as error:  # noqa: BLE001 (whatever transformers raises: all are listed)
            failed.append(f"{architecture}: {type(error).__name__}: {str(error)[:300]}")
    print(*failed, sep="\n")
    sys.exit(f"FAILED: {len(failed)} of {len(chosen)}" if failed else 0)


def write(name: str, options: dict[str, Any]) -> None:
    """Write one file, called by the architecture, or by it, `-` and more.

    `extra` goes into config.json alone; `attention` replaces what is found.
    """
    architecture, options = name.partition("-")[0], dict(options)
    extra, names, plain = options.pop("extra", {}), options.pop("attention", None), options.pop("plain", True)
    model_type = options.pop("model_type", None) or type_of(architecture)
    if model_type not in CONFIG_MAPPING or not plain:
        document = {"architectures": [architecture], "model_type": model_type}
        save(name, merged(document | (PLAIN if plain else {}), extra) | {"torch_dtype": "bfloat16"}, names)
        return
    known = AutoConfig.for_model(model_type).attribute_map
    options = {known.get(name, name): value for name, value in options.items()}
    config = small_config(model_type, options)
    found = attention_on_disk(config, architecture) if names is None else names
    document = {"architectures": [architecture], "model_type": model_type}
    document |= merged(without_noise(config.to_diff_dict()), options)
    document |= {"model_type": model_type, "torch_dtype": "bfloat16"}
    save(name, merged(document, extra), found)


def save(name: str, document: dict[str, Any], attention: list[str] | str) -> None:
    """Write the file; `attention` may be one name with `N` for the number of every layer."""
    if isinstance(attention, str):
        parts = [document, *(part for part in document.values() if isinstance(part, dict))]
        parts += [part for one in parts[1:] for part in one.values() if isinstance(part, dict)]
        layers = next(part["num_hidden_layers"] for part in parts if "vocab_size" in part)
        attention = [attention.replace("N", str(layer)) for layer in range(layers)]
    found = attention
    text = json.dumps(document | {"fp8kv_attention": found}, indent=2)
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda found: as_line(found[1]), text)
    (FIXTURES / f"{name}.json").write_text(text + "\n")
    print(name, len(found), found[0], found[-1], flush=True)


def as_line(items: str) -> str:
    """A list of JSON on one line, where that is not too long."""
    line = f"[{' '.join(items.split())}]"
    return line if len(line) <= 80 else f"[\n    {' '.join(items.split())}\n  ]"


def type_of(architecture: str) -> str:
    """The model_type whose causal or image-and-text model it is."""
    tables = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    found = [
        model_type
        for table in tables
        for model_type, names in table.items()
        if architecture in ([names] if isinstance(names, str) else names)
    ]
    own = architecture.partition("For")[0].lower()
    return max(found, key=lambda name: (name.endswith("_text"), name.replace("_", "") == own))


def small_config(model_type: str, options: dict[str, Any]) -> PretrainedConfig:
    """A config of that type, small wherever it has a field that we know."""
    default = AutoConfig.for_model(model_type)
    parts = default.sub_configs if isinstance(default.sub_configs, dict) else {}
    fields: dict[str, Any] = {}
    for part in parts:
        table = SMALL if part.startswith(("text", "llm", "thinker")) else SMALL_VISION
        inner = getattr(default, part, None)
        if inner is not None:
            small = {"model_type": inner.model_type, **small_fields(inner, table)}
            fields[part] = small | options.get(part, {})
    if "text_config" not in parts:
        fields |= small_fields(default, SMALL)
    return AutoConfig.for_model(model_type, **fields | without(options, parts))


def small_fields(config: PretrainedConfig, table: dict[str, int]) -> dict[str, Any]:
    """The fields of the table that this config has, and two layers of every kind."""
    known = {*config.to_dict(), *config.attribute_map}
    names = {config.attribute_map.get(name, name): name for name in table if name in known}
    fields: dict[str, Any] = {name: table[given] for name, given in names.items()}
    kept_in = config.attribute_map.get("layer_types", "layer_types")
    if isinstance(getattr(type(config), kept_in, None), property):
        return fields  # made from other fields
    if "kv_lora_rank" in names.values() and "num_key_value_heads" in names.values():
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    if len(kinds) > 1:
        fields |= {"num_hidden_layers": 2 * len(kinds), kept_in: 2 * kinds}
    elif kinds:
        fields[kept_in] = 2 * kinds
    return fields


def attention_on_disk(config: PretrainedConfig, architecture: str) -> list[str]:
    """The names that the modules which cache K and V have in a checkpoint."""
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, architecture)._from_config(config)
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or []
    kept = set()
    for name, module in model.named_modules():
        maker = next((m for m in MAKERS if hasattr(module, m)), None)
        if maker and hasattr(module, "layer_idx") and not any(part in name for part in NOT_TEXT):
            kind = kinds[module.layer_idx] if module.layer_idx < len(kinds) else ""
            if not kind.startswith(("linear", "mamba", "conv")):
                kept.add(f"{name}.{maker}.weight")
    made = {name: tensor for name, tensor in model.state_dict().items() if name in kept}
    disk = [on_disk(model, name, tensor) for name, tensor in made.items()]
    return list(dict.fromkeys(disk))


def on_disk(model: Any, name: str, tensor: torch.Tensor) -> str:
    """The attention module of a weight, of any shape, in the checkpoint."""
    (saved, *_) = revert_weight_conversion(model, {name: tensor})
    return str(saved).rsplit(".", 2)[0]


def without(options: dict[str, Any], names: Any) -> dict[str, Any]:
    """The others."""
    return {name: value for name, value in options.items() if name not in names}


def merged(document: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The document with what was asked for, though it be a default, in it."""
    for name, value in options.items():
        inner = document.get(name)
        both = isinstance(value, dict) and isinstance(inner, dict)
        document[name] = merged(inner, value) if both else value
    return document


def without_noise(document: dict[str, Any]) -> dict[str, Any]:
    """The document without what says nothing about the model."""
    noise = {*PretrainedConfig().to_dict()} - {"model_type"}
    return {
        name: without_noise(value) if isinstance(value, dict) else value
        for name, value in document.items()
        if name not in noise and value not in (None, "")
    }


if __name__ == "__main__":
    with torch.inference_mode():
        main()
