"""What an engine runs on, as far as loading scales depends on it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Some GPUs."""

    ranks: int = 1  # that the heads are split over: tensor parallelism
    fnuz: bool = False  # their FP8 type ends at 240, as that of MI300 (gfx942) does

    def __str__(self) -> str:
        kind = "MI300" if self.fnuz else "GPU"
        return f"one {kind}" if self.ranks == 1 else f"{self.ranks} {kind}s, tensor parallel"

    def of_rank(self, rank: int, kv_heads: int) -> slice:
        """Which of all KV heads `rank` holds; several ranks hold one where heads are fewer."""
        if kv_heads >= self.ranks:
            held = kv_heads // self.ranks
            return slice(rank * held, (rank + 1) * held)
        head = rank // (self.ranks // kv_heads)
        return slice(head, head + 1)

    def can_split(self, heads: int, kv_heads: int) -> bool:
        """Whether each rank gets as much as the others."""
        larger, smaller = max(kv_heads, self.ranks), min(kv_heads, self.ranks)
        return heads % self.ranks == 0 and larger % smaller == 0
