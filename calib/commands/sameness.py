"""How near the outputs of a rescaled model are to its source's, in words."""

from collections.abc import Sequence


def sameness(kl: float, *, exact: bool) -> str:
    """What was proved of the outputs."""
    if exact:
        return "the logits in float32 are the source's, bit for bit"
    return f"the outputs differ by a KL of {kl:.2g} nats per token on a few random tokens"


def rounded_lines(names: Sequence[str]) -> list[str]:
    """Which weights the difference comes from, where it is of norms that add one."""
    if not names:
        return []
    return [
        f"note: {len(names)} weights of norms are rounded, as '{names[0]}': 1 + it times its "
        "factor is no value of its type. All else is exact"
    ]
