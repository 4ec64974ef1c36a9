"""Compare measured Q, K and V with what vLLM's own classes hand to their attention.

check_queries.py OUT [ARCHITECTURE ...]   OUT as `write_models.py queries` leaves it; exit 0 if all
                                          that is there, or these, is right
"""

import json
import re
import sys
from pathlib import Path

import no_pictures  # noqa: F401 (before an engine)
import torch
from engine import configure, load_configured, tell
from vllm_process import set_environment

# vLLM adds in another order, in float32; Apertus' activation function is rounded in another way
TOLERANCE = 5e-3
# the groups of processes of a model with experts do for all, and experts of Llama 4 compute otherwise
# after some of the other classes (why was not found out)
FIRST = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration", "MixtralForCausalLM")
SEEN: dict[str, dict[str, torch.Tensor]] = {}


def attend(layer, query, key, value, output_shape=None, **_):
    """Stand in for `Attention.forward`: note Q, K and V, and attend to them causally."""
    tokens, out_size = len(query), getattr(layer, "head_size_v", layer.head_size)
    q = query.reshape(tokens, layer.num_heads, layer.head_size)
    k = key.reshape(tokens, layer.num_kv_heads, layer.head_size)
    v = value.reshape(tokens, layer.num_kv_heads, out_size)
    SEEN[layer.layer_name] = {letter: x.abs().amax((0, 2)) for letter, x in (("k", k), ("v", v), ("q", q))}
    repeat = layer.num_heads // layer.num_kv_heads
    k, v = (x.transpose(0, 1).repeat_interleave(repeat, 0) for x in (k, v))
    scores = q.transpose(0, 1) @ k.mT * layer.impl.scale
    if softcap := getattr(layer.impl, "logits_soft_cap", None):
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf)
    if (sinks := getattr(layer.impl, "sinks", None)) is not None:
        weights = torch.cat([weights, sinks.view(-1, 1, 1).expand(-1, tokens, 1)], -1)
    weights = weights.softmax(-1)[..., :tokens]
    return (weights @ v).transpose(0, 1).reshape(tokens, -1)


def run(home: Path, tokens: list[int]) -> list[dict[str, torch.Tensor]]:
    """What the layers of the engine's class are handed when it reads the tokens."""
    from vllm.forward_context import set_forward_context

    SEEN.clear()
    model = load_configured(config := configure(home, dtype="float32"))
    ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
    if config.model_config.uses_mrope:
        positions = positions.expand(3, -1)
    with set_forward_context(None, config, num_tokens=len(tokens)):
        model(input_ids=ids, positions=positions, intermediate_tensors=None)
    by_layer = {int(re.findall(r"\d+", name)[0]): amax for name, amax in SEEN.items()}
    return [by_layer[i] for i in sorted(by_layer)]


def verdict(home: Path) -> str:
    """`right`, or which of K, V and Q differ and how far."""
    document = json.loads((home / "measured.json").read_text())
    if "layers" not in document:
        return f"not measured: {document.get('refused') or document.get('not built')}"
    try:
        layers = run(home, document["tokens"])
    except Exception as error:  # noqa: BLE001 (whatever the engine raises)
        return f"not run: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    expected = [document["layers"][i] for i in sorted(document["layers"], key=int)]
    if len(layers) != len(expected):
        return f"{len(layers)} layers run, {len(expected)} measured"
    wrong = {}
    for ours, theirs in zip(expected, layers, strict=True):
        for letter in "kvq":
            one, other = torch.tensor(ours[letter]), theirs[letter]
            if one.shape != other.shape:
                return f"{letter} has {len(other)} heads in the engine, {len(one)} measured"
            ratio = other / one
            if not (ratio - 1).abs().max() <= TOLERANCE:  # so is NaN, of 0 / 0
                wrong.setdefault(letter.upper(), []).extend((ratio.min(), ratio.max()))
    spans = (f"{name} {min(r):.4f} to {max(r):.4f} times" for name, r in wrong.items())
    return ", ".join(spans) or "right"


def main() -> None:
    set_environment()
    from vllm.model_executor.layers.attention import Attention

    Attention.forward = attend
    out = Path(sys.argv[1])
    names = sys.argv[2:] or [home.name for home in out.iterdir()]
    names.sort(key=lambda name: (name not in FIRST, name))
    results = ((name, verdict(out / name)) for name in names)
    tell((f"{name} | {result}", result == "right") for name, result in results)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
