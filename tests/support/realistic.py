"""Weights like those of trained models: norms far from 1, biases, outlier channels of K, a sink."""

import math

import torch
from torch import nn
from torch.func import functional_call

TOKENS = torch.arange(1, 65)[None]  # which K is enlarged for
SINK = 1  # the token with a massive activation, like BOS in most trained models
_SMALLEST, _LARGEST = 0.3, 60.0  # of norm weights: Gemma 3 has both in one layer
_KEYS = ("k_proj", "key", "kv_a_proj_with_mqa")


@torch.no_grad()
def give_realistic_weights(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if is_norm(module):
            _change_norm(module, generator)
        elif isinstance(getattr(module, "bias", None), nn.Parameter):
            module.bias.normal_(generator=generator)
    of_others = torch.Generator().manual_seed(1)  # parameters of attention or experts themselves
    for name, parameter in model.named_parameters():
        if name.endswith(("_bias", "sinks")) and not name.endswith("dt_bias"):
            parameter.normal_(generator=of_others)
    outliers = [outlier for m in model.modules() if (outlier := _give_outlier(m, generator))]
    embedding = model.get_input_embeddings().weight
    sink = int(torch.randint(embedding.shape[1], (), generator=generator))
    embedding[SINK, sink] = 20 * embedding.abs().max()
    _correct_outliers(model, outliers)
    return model


def is_norm(module):
    named = "Norm" in type(module).__name__ and not isinstance(module, nn.Embedding)
    return named and getattr(module, "weight", None) is not None


def _change_norm(norm, generator):
    wanted = torch.empty(norm.weight.shape).normal_(generator=generator).mul(0.7).exp().clamp(_SMALLEST, 4)
    largest = torch.randint(wanted.shape[-1], (), generator=generator)
    wanted[..., largest] = _LARGEST
    if multiplies_by_one_plus(norm):
        wanted -= 1
        # 1 + it takes more bits than float32 has; Gemma 3 has some in every layer
        wanted[..., largest - 1] = 3.1e-6
    norm.weight.copy_(wanted.bfloat16())
    if isinstance(getattr(norm, "bias", None), nn.Parameter):
        norm.bias.normal_(generator=generator)


def multiplies_by_one_plus(norm):
    """Whether a norm whose weight is -1 answers with zeros, as Gemma's do."""
    x = torch.linspace(-1, 2, norm.weight.numel()).to(norm.weight).view(1, 1, *norm.weight.shape)
    changed = {name: torch.zeros_like(p) for name, p in norm.named_parameters()}
    changed["weight"] = torch.full_like(norm.weight, -1.0)
    return not functional_call(norm, changed, (x, x) if "Gated" in type(norm).__name__ else (x,)).any()


def _give_outlier(attention, generator):
    """Enlarge a channel of K 50 to 500 times; return its layer, the rows of K, and the channel."""
    keys, rows = rows_of_keys(attention)
    if keys is None:
        return None
    channel = rows[int(torch.randint(len(rows), (), generator=generator))]
    _enlarge(keys, channel, 10 ** float(torch.empty(()).uniform_(1.7, 2.7, generator=generator)))
    return keys, list(rows), channel


def _enlarge(keys, channel, factor):
    weight = keys.weight if isinstance(keys, nn.Linear) else keys.weight.T  # Conv1D of GPT-2 has columns
    weight[channel] *= factor
    if keys.bias is not None:
        keys.bias[channel] *= factor


def _correct_outliers(model, outliers):
    """Read a few tokens; make the channels 50 to 500 times the median that are not yet, layer after layer."""

    def correct(keys, rows, channel):
        def hook(module, args, output):
            amax = output.flatten(0, -2)[:, rows].abs().amax(0)
            ratio = float(output[..., channel].abs().max() / amax.median())
            if not 50 <= ratio <= 500:
                factor = 2.0 ** round(math.log2(160 / ratio))  # the same on every machine
                _enlarge(keys, channel, factor)
                output[..., channel] *= factor

        return keys.register_forward_hook(hook)

    hooks, training = [correct(*outlier) for outlier in outliers], model.training
    if hooks:
        model.eval().get_decoder()(input_ids=TOKENS, use_cache=False)
        model.train(training)
    for hook in hooks:
        hook.remove()


def rows_of_keys(attention):
    children = dict(attention.named_children())
    if not hasattr(attention, "layer_idx"):
        return None, None
    for name in _KEYS:
        if isinstance(children.get(name), nn.Linear):
            return children[name], range(len(children[name].weight))
    config = getattr(attention, "config", None)
    heads = getattr(config, "num_attention_heads", 1)
    size = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
    if config is not None and isinstance(children.get("qkv_proj"), nn.Linear):
        start = heads * size
        return children["qkv_proj"], range(start, start + config.num_key_value_heads * size)
    if "c_attn" in children:  # GPT-2, GPTBigCode
        start = attention.embed_dim
        return children["c_attn"], range(start, start + getattr(attention, "kv_dim", start))
    if "query_key_value" in children:  # by KV head: its queries, its key, its value
        stacked, groups = children["query_key_value"], getattr(config, "num_kv_heads", heads)
        rows_of_group = len(stacked.weight) // groups
        starts = [(group + 1) * rows_of_group - 2 * size for group in range(groups)]
        return stacked, [start + i for start in starts for i in range(size)]
    return None, None
