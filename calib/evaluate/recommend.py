"""Which cache: the cheapest within a budget of KL, or the best within a budget of bytes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from calib.choices import KL_BUDGET, REFERENCE
from calib.engines.cache_support import Offer, check_place
from calib.errors import InputError
from calib.evaluate.report import Passed, Recommendation, Row, Way
from calib.evaluate.serve_commands import Offers
from calib.evaluate.verdict import SERVED, Judgement

_BETTER = "measurably better"
_NEEDS = ("nothing", "calibrated scales", "baked weights")


@dataclass(frozen=True)
class Wish:
    """A budget: KL in nats per token, or a share of the bytes of 16 bits; and where to serve."""

    kl: float | None = KL_BUDGET
    share: float | None = None
    engine: str | None = None
    gpu: str | None = None


class _Candidate(NamedTuple):
    """A variant that can be served."""

    name: str
    row: Row
    offer: Offer

    @property
    def bytes_per_token(self) -> int:
        assert self.row.bytes_per_token is not None
        return self.row.bytes_per_token

    @property
    def needs(self) -> int:
        """Index in `_NEEDS`."""
        return 2 if self.row.is_baked else int(self.row.kind == "fp8" and self.name != "none")

    @property
    def rank(self) -> tuple[float, ...]:
        """Simplest first."""
        own = SERVED.index(self.name) if self.needs == 1 else 0
        return (self.name != REFERENCE, self.needs, own, self.bytes_per_token, self.row.kl.value)


def make_wish(budget_kl: str | None, budget_bytes: str | None, engine: str | None, gpu: str | None) -> Wish:
    """The wish of the flags; InputError for what cannot be meant."""
    if budget_kl and budget_bytes:
        raise InputError("--budget-kl and --budget-bytes: give one of them")
    check_place(engine, gpu)
    if budget_bytes is None:
        budget = KL_BUDGET if budget_kl is None else _positive("--budget-kl", budget_kl, "nats")
        return Wish(kl=budget, engine=engine, gpu=gpu)
    share = _positive("--budget-bytes", budget_bytes, "a share of 16 bits' bytes, at most 1")
    if share > 1:
        raise InputError(f"--budget-bytes {budget_bytes} is more than 1, which is 16 bits")
    return Wish(kl=None, share=share, engine=engine, gpu=gpu)


def _positive(flag: str, text: str, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise InputError(f"{flag} takes a number above 0 ({what}); got '{text}'")
    return number


def recommend(judgement: Judgement, offers: Offers, wish: Wish) -> Recommendation:
    """The simplest among the cheapest, or best, that stay in the budget; 16 bits if none does."""
    found, refused = _candidates(judgement, offers, wish)
    by_name = {each.name: each for each in found}
    full = by_name[REFERENCE]
    within = [each for each in found if _is_within(each, full, wish)] or [full]
    if wish.kl is not None:
        least = min((each.bytes_per_token, each.needs) for each in within)
        within = [each for each in within if (each.bytes_per_token, each.needs) == least]
    chosen = by_name[judgement.simplest([each.name for each in within])]
    others = [each for each in found if each is not chosen]
    return Recommendation(
        budget_kl=wish.kl,
        budget_bytes=wish.share,
        engine=wish.engine,
        gpu=wish.gpu,
        chosen=_way(chosen, full),
        passed=[
            Passed(**_figures(each, full), why=_why(each, chosen, full, wish, judgement))
            for each in sorted(others, key=lambda each: (each.bytes_per_token, each.row.kl.value))
        ],
        not_served=refused,
    )


def _candidates(judgement: Judgement, offers: Offers, wish: Wish) -> tuple[list[_Candidate], dict[str, str]]:
    """What was measured and can be served, simplest first; and why the other caches cannot."""
    found, refused = [], {}
    for name, row in judgement.rows.items():
        if row.kind in ("cache", REFERENCE) or name in SERVED:
            offer = offers.of(judgement.measured[name].variant, wish.engine, wish.gpu)
            if isinstance(offer, str):
                refused[name] = offer
            else:
                found.append(_Candidate(name, row, offer))
    return sorted(found, key=lambda each: each.rank), refused


def _is_within(each: _Candidate, full: _Candidate, wish: Wish) -> bool:
    if wish.kl is not None:
        return each.row.kl.is_finite and each.row.kl.high <= wish.kl
    assert wish.share is not None
    is_small = each.bytes_per_token <= wish.share * full.bytes_per_token
    return is_small and each.row.kl.is_finite


def _why(
    each: _Candidate,
    chosen: _Candidate,
    full: _Candidate,
    wish: Wish,
    judgement: Judgement,
) -> str:
    """Why `each` is not chosen."""
    if not each.row.kl.is_finite:
        return "its KL is not a finite number"
    if not _is_within(each, full, wish):
        if wish.share is not None:
            return "more bytes than the budget"
        return f"KL up to {each.row.kl.high:.2g}, beyond the budget"
    if wish.kl is not None and each.bytes_per_token > chosen.bytes_per_token:
        return "more bytes"
    if judgement.is_worse(each.name, chosen.name):
        return "measurably worse"
    is_better = judgement.is_worse(chosen.name, each.name)
    found = _BETTER if is_better else f"not {_BETTER}"
    return f"{found}, needs {_NEEDS[each.needs]}" if each.needs > chosen.needs else found


def _figures(each: _Candidate, full: _Candidate) -> dict[str, object]:
    size = each.bytes_per_token
    return {
        "cache": each.name,
        "what": each.row.what,
        "kl": each.row.kl,
        "bytes_per_token": size,
        "share": size / full.bytes_per_token,
    }


def _way(each: _Candidate, full: _Candidate) -> Way:
    offer = each.offer
    return Way(
        **_figures(each, full),
        needs=_NEEDS[each.needs],
        engine=offer.engine,
        engine_version=offer.version,
        gpus=offer.gpus,
        notes=offer.notes,
        commands=offer.commands,
    )


def answer_lines(found: Recommendation) -> Sequence[str]:
    """The answer as lines of text, without what it was chosen over."""
    way, budget = found.chosen, budget_text(found)
    if way.cache == REFERENCE:
        return [f"16 bits: {_why_full(found)}", *way.commands]
    kl = f"KL {way.kl.value:.2g} nats [{way.kl.low:.2g}, {way.kl.high:.2g}]"
    where = f"{way.engine} {way.engine_version} on {', '.join(way.gpus)}"
    notes = f" ({'; '.join(way.notes)})" if way.notes else ""
    return [
        f"{way.cache}: {way.what}; {kl}, within {budget}",
        f"{way.bytes_per_token:,} bytes a token, {way.share:.1%} of 16 bits; "
        f"needs {way.needs}; speed was not measured",
        f"served by {where}{notes}:",
        *(f"  {command}" for command in way.commands),
    ]


def _why_full(found: Recommendation) -> str:
    budget = budget_text(found)
    if found.budget_bytes == 1:  # where 16 bits is within the budget itself
        return f"nothing that can be served has a lower KL within {budget}"
    has_nan = any(not each.kl.is_finite for each in found.passed)
    finite = " with a finite KL" if has_nan else ""
    return f"nothing else that can be served{finite} stays within {budget}"


def advised_cache(found: Recommendation | None, wish: Wish | None) -> list[str]:
    """The answer in a line of advice, where nobody wished for another budget."""
    if found is None or wish is not None:
        return []
    way, budget = found.chosen, budget_text(found)
    if way.cache == REFERENCE:
        return [f"within {budget}: 16 bits, as no other cache that can be served stays below"]
    better = [each.cache for each in found.passed if each.why.startswith(_BETTER)]
    and_better = f" ({', '.join(better)}: {_BETTER} in as many bytes)" if better else ""
    commands = " && ".join(way.commands)
    size = f"{way.share:.1%} of 16 bits' bytes{and_better}"
    return [f"the cheapest within {budget}: {way.cache}, needs {way.needs}, {size}: {commands}"]


def budget_text(found: Recommendation) -> str:
    """The budget in words."""
    if found.budget_kl is not None:
        return f"KL {found.budget_kl:g}"
    return f"{found.budget_bytes:.0%} of 16 bits' bytes"
