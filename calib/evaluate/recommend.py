"""Which cache to serve: the cheapest within a budget of KL, or the best within a budget of bytes."""

import math
from dataclasses import dataclass

from calib.caches.types import ALL_CACHES, UNSIMULATED, cache_type
from calib.choices import KL_BUDGET, REFERENCE
from calib.engines.cache_support import NotServed, check_place
from calib.engines.tokens_that_fit import USUAL_GPU
from calib.errors import InputError
from calib.evaluate.report import Alternative, CacheFigures, Recommendation, ServedCache
from calib.evaluate.serve_commands import Offers
from calib.evaluate.verdict import SERVED, Judgement

_BETTER = "measurably better"
_PAGE = 16  # tokens
_NO_POOL = (
    "how {engine} allocates this model's memory is not known; to compare by bytes, add --engine {engine}"
)
_NEEDS = ("nothing", "calibrated scales", "baked weights")


@dataclass(frozen=True)
class Wish:
    """A budget: KL in nats per token, or a share of the bytes of 16 bits; and where to serve."""

    kl: float | None = KL_BUDGET
    share: float | None = None
    engine: str | None = None
    gpu: str | None = None
    request_tokens: int | None = None  # of the requests that are to fit; None: a default
    is_written: bool = False  # we calibrate and bake, so what a cache needs does not count

    def is_met_by(self, cache: CacheFigures) -> bool:
        """Return whether a cache stays within the budget."""
        if self.kl is not None:
            return cache.kl.is_finite and cache.kl.high <= self.kl
        assert self.share is not None
        return cache.kl.is_finite and cache.share <= self.share


def make_wish(
    budget_kl: str | None, budget_bytes: str | None, engine: str | None, gpu: str | None,
    request_tokens: int | None = None,
) -> Wish:  # fmt: skip
    """Read the flags of `recommend`; raise an InputError for what cannot be meant."""
    if budget_kl and budget_bytes:
        raise InputError("--budget-kl and --budget-bytes: give one of them")
    check_place(engine, gpu)
    if budget_bytes is None:
        budget = KL_BUDGET if budget_kl is None else _positive("--budget-kl", budget_kl, "nats")
        return Wish(budget, None, engine, gpu, request_tokens)
    share = _positive("--budget-bytes", budget_bytes, "a share of 16 bits' bytes, at most 1")
    if share > 1:
        advice = f"; give {share / 100:g} for {share:g} %" if share <= 100 else ""
        raise InputError(f"--budget-bytes {budget_bytes} is more than 1, which is 16 bits{advice}")
    return Wish(None, share, engine, gpu, request_tokens)


def _positive(flag: str, text: str, unit: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise InputError(f"{flag} takes a number above 0 ({unit}); got '{text}'")
    return number


def recommend(judgement: Judgement, offers: Offers, wish: Wish) -> Recommendation:
    """Choose the simplest among the cheapest, or best, within the budget; 16 bits if there are none."""
    caches, refusals = _served_caches(judgement, offers, wish)
    within = [cache for cache in caches if wish.is_met_by(cache)] or caches[:1]
    if wish.kl is not None:
        costs = [(cache.memory, 0 if wish.is_written else _effort(cache)) for cache in within]
        within = [cache for cache, cost in zip(within, costs, strict=True) if cost == min(costs)]
    name = judgement.simplest([cache.cache for cache in within])
    chosen = next(cache for cache in within if cache.cache == name)
    alternatives = sorted(caches, key=lambda cache: (cache.memory, cache.kl.value))
    return Recommendation(
        budget_kl=wish.kl,
        budget_bytes=wish.share,
        engine=wish.engine,
        gpu=wish.gpu,
        request_tokens=offers.request_tokens(wish.request_tokens),
        chosen=chosen,
        alternatives=[
            Alternative(**dict(cache), why=_why_not(cache, chosen, wish, judgement))
            for cache in alternatives
            if cache is not chosen
        ],
        not_served=refusals,
        evidence={name: cache_type(name).evidence for name in (*ALL_CACHES, *UNSIMULATED)},
    )


def _served_caches(
    judgement: Judgement, offers: Offers, wish: Wish
) -> tuple[list[ServedCache], dict[str, str]]:
    """List what was measured and can be served, simplest first, 16 bits before all; say why others cannot."""
    caches, refusals, tokens = [], {}, offers.request_tokens(wish.request_tokens)
    for name, row in judgement.rows.items():
        if row.kind not in ("cache", REFERENCE) and name not in SERVED:
            continue
        try:
            offer = offers.find(judgement.measured[name].variant, wish.engine, wish.gpu)
        except NotServed as error:
            refusals[name] = str(error)
            continue
        effort = 2 if row.is_baked else int(row.kind == "fp8" and name != "none")
        size, full = row.bytes_per_token, judgement.rows[REFERENCE].bytes_per_token
        assert size is not None
        assert full is not None
        reference = judgement.measured[REFERENCE].variant
        gpu = wish.gpu or min(offer.gpus, key=USUAL_GPU.__ne__, default=USUAL_GPU)
        whole = offers.pool(reference, wish.engine or "vllm", gpu, tokens)
        pool = offers.pool(judgement.measured[name].variant, offer.engine, gpu, tokens)
        # bytes tell what fits where all of a model's pages are alike, but for a page's end
        if whole and not pool and abs(whole.request_bytes / (full * tokens) - 1) > _PAGE / tokens:
            refusals[name] = _NO_POOL.format(engine=offer.engine)
            continue
        memory = pool.request_bytes / whole.request_bytes if pool and whole else size / full
        caches.append(
            ServedCache(
                cache=name, description=row.description, kl=row.kl, bytes_per_token=size, share=size / full,
                tokens_per_gb=pool and pool.tokens_per_gb, memory=memory,
                needs=_NEEDS[effort], engine=offer.engine, engine_version=offer.version,
                gpus=offer.gpus, notes=offer.notes, commands=offer.commands,
            )
        )  # fmt: skip
    return sorted(caches, key=_complexity), refusals


def _effort(cache: ServedCache) -> int:
    return _NEEDS.index(cache.needs)


def _complexity(cache: ServedCache) -> tuple[float, ...]:
    """Rank a cache by what it takes to serve it; 0 is the simplest."""
    order = SERVED.index(cache.cache) if cache.cache in SERVED else 0
    return (cache.cache != REFERENCE, _effort(cache), order, cache.memory, cache.kl.value)


def _why_not(cache: ServedCache, chosen: ServedCache, wish: Wish, judgement: Judgement) -> str:
    if not cache.kl.is_finite:
        return "its KL is not a finite number"
    if not wish.is_met_by(cache):
        if wish.share is not None:
            return "more bytes than the budget"
        return f"KL up to {cache.kl.high:.2g}, beyond the budget"
    if wish.kl is not None and cache.memory > chosen.memory:
        return "fewer tokens fit" if cache.tokens_per_gb and chosen.tokens_per_gb else "more bytes"
    if judgement.is_worse(cache.cache, chosen.cache):
        return "measurably worse"
    comparison = _BETTER if judgement.is_worse(chosen.cache, cache.cache) else f"not {_BETTER}"
    return f"{comparison}, needs {cache.needs}" if _effort(cache) > _effort(chosen) else comparison


def answer_lines(answer: Recommendation) -> list[str]:
    """Word the answer, without what it was chosen over; with the commands that make and serve it."""
    cache, budget = answer.chosen, _budget_text(answer)
    if cache.cache == REFERENCE:
        return [f"16 bits: {_why_16_bits(answer)}", *cache.commands]
    notes = f" ({'; '.join(cache.notes)})" if cache.notes else ""
    return [
        f"{cache.cache}: {cache.description}; KL {cache.kl.value:.2g} nats "
        f"[{cache.kl.low:.2g}, {cache.kl.high:.2g}], within {budget}",
        f"{cache.bytes_per_token:,} bytes a token, {cache.share:.1%} of 16 bits; "
        f"needs {cache.needs}; speed was not measured",
        f"{cache.tokens_per_gb:,} tokens fit into a GB (10^9 bytes), {1 / cache.memory:.2f} times those of "
        f"16 bits, in requests of {answer.request_tokens:,}, as {cache.engine} allocates them"
        if cache.tokens_per_gb
        else f"compared by bytes: how {cache.engine} allocates this model's memory is not known",
        f"served by {cache.engine} {cache.engine_version} on {', '.join(cache.gpus)}{notes}:",
        *(f"  {command}" for command in cache.commands),
    ]


def _why_16_bits(answer: Recommendation) -> str:
    budget, alternatives = _budget_text(answer), answer.alternatives
    wish = Wish(answer.budget_kl, answer.budget_bytes)
    if answer.budget_bytes == 1:  # 16 bits is within the budget itself
        return f"nothing that can be served has a lower KL within {budget}"
    if any(wish.is_met_by(cache) for cache in alternatives):
        return f"nothing else within {budget} lets more tokens fit"
    finite = "" if all(cache.kl.is_finite for cache in alternatives) else " with a finite KL"
    return f"nothing else that can be served{finite} stays within {budget}"


def advised_cache(answer: Recommendation) -> str:
    """Word the answer as a line of advice."""
    cache, budget = answer.chosen, _budget_text(answer)
    if cache.cache == REFERENCE:
        return f"Serve 16 bits: {_why_16_bits(answer)}."
    better = [other.cache for other in answer.alternatives if other.why.startswith(_BETTER)]
    and_better = f" ({', '.join(better)}: {_BETTER} in as many bytes)" if better else ""
    word = "cheapest" if answer.budget_kl is not None else "best"
    return (
        f"The {word} within {budget} is {cache.cache}, which needs {cache.needs}, in {cache.share:.1%} of "
        f"16 bits' bytes{and_better}: {' && '.join(cache.commands)}"
    )


def _budget_text(answer: Recommendation) -> str:
    if answer.budget_kl is not None:
        return f"KL {answer.budget_kl:g}"
    return f"{answer.budget_bytes:.0%} of 16 bits' bytes"
