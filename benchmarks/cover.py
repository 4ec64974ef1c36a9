"""How well calibrated scales cover text that nobody has seen: SmolLM2, prose and code, in float32.

Every token's largest |K| and |V| of every head is taken once. Scales are then made of the first
1k to 16k tokens of its documents in six orders, and what was predicted is compared with the rest.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from cover_growth import PREDICTORS, tail_of
from machine import machine, scratch_and_output, write_result
from numpy.typing import NDArray
from torch import Tensor

from calib.capture.attention import observe_qkv
from calib.data import load_data, make_batches
from calib.evaluate.layer_errors import poisson_interval
from calib.models.config import load_config
from calib.models.load import load_model, load_tokenizer
from calib.models.sources import find_model
from calib.recipe import DataRecipe, Recipe
from calib.scales.tail import headroom_for

MODEL = "builtin:smollm2"
# at most so many tokens. The fit was chosen by looking at 71,168 of each of the first two
DATASETS = {"builtin:python-docs": 71_168, "builtin:code": 512_000, "builtin:chat": 71_168}
SEQ_LEN = 512
ORDERS = 6
CALIBRATED = (1024, 2048, 4096, 8192)
STRATEGIES = ("attn_head", "tensor")
CHANCE = 1e-6
LEAST_EVENTS = 20
FACTOR = 3.0

Rows = list[dict[str, Any]]


class Promise(NamedTuple):
    """One layer of one order."""

    factor: float
    clipped: int  # tokens
    documents: set[int]  # they are of
    tokens: int
    cover: float  # of the amax of all tokens


class Text(NamedTuple):
    """The largest |x| of every token, [layers, K and V, heads, tokens], documents one by one."""

    amax: Tensor
    lengths: list[int]

    def shuffled(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return the documents in another order, and of each token [tokens] its document."""
        order = np.random.default_rng(seed).permutation(len(self.lengths))
        parts = self.amax.split(self.lengths, dim=-1)
        lengths = torch.tensor(self.lengths)[order]
        documents = torch.from_numpy(order).repeat_interleave(lengths)
        return torch.cat([parts[i] for i in order], dim=-1), documents


def main() -> None:
    """Measure, print, write the JSON."""
    args = scratch_and_output(__doc__, "cover")
    texts = {name: read(name, tokens) for name, tokens in DATASETS.items()}
    result = {
        "machine": machine(),
        "model": MODEL,
        "tokens": {name: text.amax.shape[-1] for name, text in texts.items()},
        "exceedance": [row for name, text in texts.items() for row in exceedance(name, text)],
        "growth": [row for name, text in texts.items() for row in growth(name, text)],
        "headroom": [row for name, text in texts.items() for row in headroom(name, text)],
    }
    for kind in ("exceedance", "growth", "headroom"):
        for row in result[kind]:
            print(kind, row)
    write_result(args.output, result)


@torch.inference_mode()
def read(dataset: str, tokens: int) -> Text:
    """Run the model over `tokens` of `dataset`, or all it has."""
    data = DataRecipe(dataset=dataset, samples=tokens // SEQ_LEN, seq_len=SEQ_LEN)
    recipe = Recipe(device="cpu", dtype="float32", data=data)
    checkpoint = find_model(MODEL)
    config = load_config(checkpoint)
    model = load_model(checkpoint, config, recipe.dtype, recipe.device)
    samples = load_data(data, load_tokenizer(checkpoint), lambda: model).samples
    found: dict[int, Tensor] = {}
    for batch in make_batches(samples, 8, pad_id=0):
        layers: list[Tensor] = []

        def sink(name: str, query: Tensor, *kv: Tensor, into: list[Tensor] = layers) -> None:
            into.append(torch.stack([x.abs().amax(-1) for x in kv], dim=1))  # [B, 2, K, T]

        with observe_qkv(model, sink):
            model.get_decoder()(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
            )
        rows = zip(batch.sample_ids, torch.stack(layers, dim=1), strict=True)
        found |= {sample: row[..., : len(samples[sample])] for sample, row in rows}
    together = torch.cat([found[i] for i in range(len(samples))], dim=-1)
    return Text(together, [len(sample) for sample in samples])


def grouped(amax: Tensor, strategy: str) -> Tensor:
    """[layers, groups, tokens]: a group of K or V shares a scale."""
    return (amax if strategy == "attn_head" else amax.amax(2, keepdim=True)).flatten(1, 2)


def splits(text: Text, counts: tuple[int, ...]) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """Strategy, tokens calibrated on, values [layers, groups, tokens] in an order, document of each token."""
    for seed in range(ORDERS):
        amax, documents = text.shuffled(seed)
        for strategy, count in product(STRATEGIES, counts):
            yield strategy, count, grouped(amax, strategy), documents


def exceedance(dataset: str, text: Text) -> Rows:
    """Predicted and seen tokens with any clipped value in a layer, without headroom."""
    found: dict[tuple[str, int], list[tuple[float, float, int]]] = {}
    for strategy, count, values, _ in splits(text, CALIBRATED):
        rest = values.shape[-1] - count
        for layer in values:
            tail = tail_of(layer[:, :count])
            seen = int((layer[:, count:] > layer[:, :count].amax(-1, keepdim=True)).any(0).sum())
            row = (float(tail.chance.sum()) * rest, len(layer) / count * rest, seen)
            found.setdefault((strategy, count), []).append(row)
    return [_agreement(dataset, *at, rows) for at, rows in found.items()]


def _agreement(
    dataset: str, strategy: str, count: int, rows: list[tuple[float, float, int]]
) -> dict[str, Any]:
    judged = [(a, b, seen) for a, b, seen in rows if a >= LEAST_EVENTS]
    ratios = [max(seen, 0.5) / a for a, _, seen in judged]
    # rows are of one order after the other: each layer's expectation over all of them
    layers = np.array(rows).reshape(ORDERS, -1, 3).mean(0)
    each_layer = [(a, seen) for a, _, seen in layers if a >= LEAST_EVENTS]
    return {
        "dataset": dataset,
        "strategy": strategy,
        "tokens": count,
        "layers": len(judged),
        "agree": _share(_agrees(a, seen) for a, _, seen in judged),
        "agree_by_count_alone": _share(_agrees(b, seen) for _, b, seen in judged),
        "agree_over_orders": _share(_close(a, seen) for a, seen in each_layer),
        "median_ratio": float(np.median(ratios)) if judged else None,
    }


def _share(answers: Iterable[bool]) -> float | None:
    """Return the share that is true; None of nothing."""
    found = list(answers)
    return sum(found) / len(found) if found else None


def _agrees(expected: float, seen: int) -> bool:
    low, high = poisson_interval(seen)
    return _close(expected, seen) or low <= expected <= high


def _close(expected: float, seen: float) -> bool:
    return expected / FACTOR <= seen <= expected * FACTOR


def growth(dataset: str, text: Text) -> Rows:
    """Error of the predicted amax of the next 4 times as many tokens, three ways and without."""
    found: dict[tuple[int, str], list[NDArray[np.float64]]] = {}
    for strategy, count, values, _ in splits(text, CALIBRATED):
        if strategy != "tensor":
            continue
        true = values[..., : 5 * count].amax(-1)
        for name, predict in PREDICTORS.items():
            predicted = torch.stack([predict(layer[:, :count], 4 * count) for layer in values])
            error = (predicted / true).log().flatten().double().numpy()
            found.setdefault((count, name), []).append(error)
    return [
        {
            "dataset": dataset,
            "tokens": count,
            "by": name,
            "rms_error": float(np.sqrt(np.mean(np.square(errors)))),
            "bias": float(np.mean(errors)),
        }
        for (count, name), errors in found.items()
    ]


def headroom(dataset: str, text: Text) -> Rows:
    """Return what `--headroom auto` promises and does, and how much of the whole run's amax it covers."""
    found: dict[tuple[str, int], list[Promise]] = {}
    for strategy, count, values, documents in splits(text, (*CALIBRATED[1:], 2 * CALIBRATED[-1])):
        for layer in values:
            factor = headroom_for([tail_of(layer[:, :count])], CHANCE)
            level = layer[:, :count].amax(-1, keepdim=True) * factor
            clipped = (layer[:, count:] > level).any(0)
            where = set(documents[count:][clipped].tolist())
            cover = float((level[:, 0] / layer.amax(-1)).min())
            row = Promise(factor, int(clipped.sum()), where, len(clipped), cover)
            found.setdefault((strategy, count), []).append(row)
    return [_promise(dataset, *at, rows) for at, rows in found.items()]


def _promise(dataset: str, strategy: str, count: int, rows: list[Promise]) -> dict[str, Any]:
    clipped, tokens = sum(row.clipped for row in rows), sum(row.tokens for row in rows)
    documents = len(set().union(*(row.documents for row in rows)))
    covers = np.array([row.cover for row in rows])
    return {
        "dataset": dataset,
        "strategy": strategy,
        "tokens": count,
        "factor": [float(np.quantile([row.factor for row in rows], q)) for q in (0, 0.5, 1)],
        "chance": clipped / tokens,
        "chance_interval": _by_documents(clipped, documents, tokens),
        "documents": documents,
        "layers_covered": float(np.mean(covers >= 1)),
        "least_cover": float(covers.min()),
        "layers_covered_without": float(np.mean([row.cover >= row.factor for row in rows])),
    }


def _by_documents(clipped: int, documents: int, tokens: int) -> list[float]:
    """Return the interval of the chance, were the documents with clipped tokens drawn anew.

    The tokens of one document are not independent, and the orders share documents: without any
    clipped, what was seen counts once, and not for each order.
    """
    weight = clipped / documents if documents else ORDERS
    return [x * weight / tokens for x in poisson_interval(documents)]


if __name__ == "__main__":
    main()
