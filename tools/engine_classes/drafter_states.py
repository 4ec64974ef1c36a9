"""Whether a drafter in a running vLLM stores the K and V that fp8kv measures of it.

drafter_states.py DIRECTORY   writes small models and drafters there, and prints a line for each pair;
                              ends with 1 if one differs

Both compute in float32 on a CPU. vLLM's prompt has a token more: the last one that it drafts from is its own.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from vllm_process import OPTIONS, set_environment

from calib.capture.attention import map_attention
from calib.capture.draft import layers_read, read_by_drafter
from calib.capture.loop import calibrate
from calib.files.model_directory import open_model_directory
from calib.recipe import Recipe
from calib.serving.engine_layers import vllm_attention
from calib.serving.vllm_worker import check

SIZE, VOCABULARY, LAYERS, HEAD = 128, 128, 8, 32
MODELS = ("llama", "qwen2", "qwen3")
_LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA_3 |= {"original_max_position_embeddings": 64}
DRAFTERS: dict[str, dict[str, Any]] = {
    "EagleLlamaForCausalLM": {"rope_theta": 500000.0, "rope_scaling": _LLAMA_3},
    "LlamaForCausalLMEagle3": {"draft_vocab_size": 64},
    "Eagle3LlamaForCausalLM": {"draft_vocab_size": 64, "eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
}
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": SIZE,
    "intermediate_size": 2 * SIZE,
    "head_dim": HEAD,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = torch.randint(3, VOCABULARY, (1, 60), generator=torch.Generator().manual_seed(0))


def random(*shape: int) -> Tensor:
    """A weight, float32 of any shape: a matrix, or a norm's."""
    return 0.1 * torch.randn(shape) if len(shape) > 1 else 1 + 0.3 * torch.randn(shape)


def write_model(kind: str, directory: Path) -> None:
    """A model whose weights are larger than those that transformers draws."""
    config = AutoConfig.for_model(kind, num_hidden_layers=LAYERS, **_SHAPE)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data = random(*parameter.shape)
    model.save_pretrained(directory)


def write_drafter(architecture: str, directory: Path) -> None:
    """A drafter with one layer, and embeddings of its own."""
    is_3 = "Eagle3" in architecture
    layer, width = ("midlayer", 2 * SIZE) if is_3 else ("layers.0", SIZE)
    shapes = {"embed_tokens": (VOCABULARY, SIZE), "fc": (SIZE, (3 if is_3 else 2) * SIZE)}
    shapes |= {f"{layer}.self_attn.{x}_proj": (HEAD * n, width) for x, n in (("q", 4), ("k", 2), ("v", 2))}
    shapes |= {f"{layer}.self_attn.o_proj": (SIZE, 4 * HEAD), f"{layer}.mlp.down_proj": (SIZE, 2 * SIZE)}
    shapes |= {f"{layer}.mlp.{x}_proj": (2 * SIZE, SIZE) for x in ("gate", "up")}
    norms = ["post_attention_layernorm", *(["input_layernorm", "hidden_norm"] if is_3 else [])]
    shapes |= {f"{layer}.{norm}": (SIZE,) for norm in norms}
    shapes |= {"norm": (SIZE,), "lm_head": (64, SIZE)} if is_3 else {}
    weights = {f"{name}.weight": random(*shape) for name, shape in shapes.items()}
    weights |= {"d2t": torch.zeros(64, dtype=torch.long)} if is_3 else {}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = {"architectures": [architecture], "model_type": "llama", "num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(config | _SHAPE | DRAFTERS[architecture]))


def stored_by_vllm(model: Path, drafter: Path, method: str) -> tuple[list[Tensor], str]:
    """The largest K and V, each [K], that the drafter stores of a prompt, and what the plugin says."""
    set_environment()
    from vllm import LLM, SamplingParams

    speculative = {"method": method, "model": str(drafter), "num_speculative_tokens": 1}
    options = {"dtype": "float32", "skip_tokenizer_init": True, "speculative_config": speculative}
    llm = LLM(model=str(model), use_tqdm_on_load=False, **OPTIONS, **options)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    (layer,), seen = vllm_attention(runner.drafter.model).values(), []
    layer.register_forward_pre_hook(lambda _, arguments: seen.append([x.clone() for x in arguments[1:3]]))
    prompt = {"prompt_token_ids": IDS[0].tolist()}
    llm.generate(prompt, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    ((k, v),) = seen
    return [x[: IDS.shape[1] - 1].view(-1, 2, HEAD).abs().amax((0, 2)) for x in (k, v)], str(check(runner))


def measured(model: Path, drafter: Path) -> list[Tensor]:
    """The same largest K and V, each [K], as fp8kv measures them."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    files = open_model_directory(drafter)
    layers = layers_read(files, whole.config, Recipe())
    attention = read_by_drafter(map_attention(whole), whole, files, layers)
    ((_, layer),) = calibrate(whole, [IDS], Recipe(), attention=attention).layers.items()
    return [layer.k.amax.amax(-1), layer.v.amax.amax(-1)]


def main(directory: Path) -> int:
    torch.manual_seed(0)
    failed = 0
    for kind in MODELS:
        write_model(kind, directory / kind)
        for architecture in DRAFTERS:
            drafter, method = directory / architecture, "eagle3" if "Eagle3" in architecture else "eagle"
            write_drafter(architecture, drafter)
            own = measured(directory / kind, drafter)
            theirs, said = stored_by_vllm(directory / kind, drafter, method)
            off = max(float((a / b - 1).abs().max()) for a, b in zip(own, theirs, strict=True))
            failed += off > 1e-5
            print(f"{architecture} for {kind}: K and V of each head differ by {off:.1e}; {said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
