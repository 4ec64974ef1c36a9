"""One document read by the reference and by every variant, in step, whatever its length."""

from collections.abc import Sequence

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from calib.eval.divergence import Divergence, chunks, compare, join
from calib.eval.variants import REFERENCE, Variant
from fp8kv_runtime.hf import Backend

# tokens at a time: the logits of a long document would not fit into memory
_CHUNK = 512


def read(
    model: PreTrainedModel, token_ids: Tensor, variants: Sequence[Variant], backend: Backend
) -> dict[str, Divergence]:
    """What each variant's logits are worth on `token_ids` [T], and the reference's own."""
    names = [REFERENCE, *(variant.name for variant in variants)]
    caches = {name: DynamicCache(config=model.config) for name in names}
    parts: dict[str, list[Divergence]] = {name: [] for name in caches}
    for rows in chunks(len(token_ids), _CHUNK):
        chunk, following = token_ids[rows], token_ids[rows.start + 1 : rows.stop + 1]
        reference = _logits(model, chunk, caches[REFERENCE])
        parts[REFERENCE].append(compare(reference, reference, following))
        for variant in variants:
            with variant.applied(model, backend):
                logits = _logits(model, chunk, caches[variant.name])
            parts[variant.name].append(compare(reference, logits, following))
    return {name: join(each) for name, each in parts.items()}


def _logits(model: PreTrainedModel, token_ids: Tensor, cache: Cache) -> Tensor:
    ids = token_ids[None].to(model.device)
    logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    return logits[0]
