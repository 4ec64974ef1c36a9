"""A random Llama of two layers and the text it reads: what each tool here calibrates.

Needs torch, transformers and tokenizers of the tool's environment, and nothing of ours.
"""

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.integrations.sdpa_attention import sdpa_attention_forward

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
CONFIGS = (
    "config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quantization_config.json",
    "model.safetensors.index.json",
)
FP8_MAX = 448.0
LENGTH, SAMPLES = 32, 4
WORDS = [f"w{i}" for i in range(64)]

Amax = dict[str, dict[str, list[float]]]  # attention module -> k, v, q -> one per head


def make(
    directory: Path,
    hidden_size: int = 32,
    heads: tuple[int, int] = (4, 2),
    intermediate_size: int = 32,
) -> LlamaForCausalLM:
    """Load the model, in bfloat16, from `directory`; the same weights every time.

    `heads` are those of Q, and of K and V.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=32,
        vocab_size=len(WORDS),
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
        architectures=["LlamaForCausalLM"],
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word."""
    words = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0])
    inner = RawTokenizer(words)
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=WORDS[0], eos_token=WORDS[1], unk_token=WORDS[0]
    )


def token_ids() -> torch.Tensor:
    """Draw token ids [SAMPLES, LENGTH]."""
    random = torch.Generator().manual_seed(1)
    return torch.randint(2, len(WORDS), (SAMPLES, LENGTH), generator=random)


def texts() -> list[str]:
    """Decode the same token ids to text."""
    return [" ".join(WORDS[i] for i in row) for row in token_ids().tolist()]


@torch.no_grad()
def true_amax(model: LlamaForCausalLM, rows: Tensor | None = None) -> Amax:
    """Largest |K|, |V| and |Q| that reach attention, after RoPE, per head, over `token_ids()`.

    `rows` [B, T] are other token ids.
    """
    found: dict[str, dict[str, Tensor]] = {}
    names = {module: name for name, module in model.named_modules()}

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        seen = found.setdefault(names[module], {})
        for letter, states in (("k", key), ("v", value), ("q", query)):
            amax = states.float().abs().amax((0, 2, 3))
            seen[letter] = torch.maximum(seen.get(letter, amax), amax)
        # causal where it is given no mask
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("measuring", attend)
    before = model.config._attn_implementation
    model.set_attn_implementation("measuring")
    for row in token_ids() if rows is None else rows:
        model(row[None])
    model.set_attn_implementation(before)
    return {name: {letter: amax.tolist() for letter, amax in seen.items()} for name, seen in found.items()}


def keep(written: Path, package: str, case: str, amax: Amax) -> None:
    """Copy what a test needs of an output, and note what is in it, read without our code."""
    golden = GOLDEN / f"{package}-{version(package)}" / case
    shutil.rmtree(golden, ignore_errors=True)
    golden.mkdir(parents=True)
    tensors = {}
    for file in sorted(written.iterdir()):
        if file.suffix == ".safetensors":
            tensors |= load_file(file)
        if file.suffix == ".safetensors" or file.name in CONFIGS:
            shutil.copy(file, golden)
    scales = {
        name: {
            "dtype": str(t.dtype),
            "shape": list(t.shape),
            "values": t.double().flatten().tolist(),
        }
        for name, t in sorted(tensors.items())
        if name.endswith((*(f"{x}_scale" for x in "kvq"), "k_global_scale", "v_global_scale"))
    }
    expected = {"package": package, "version": version(package), "scales": scales, "amax": amax}
    (golden / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    print(f"{golden}: {len(scales)} scales, {sum(f.stat().st_size for f in golden.iterdir())} bytes")
