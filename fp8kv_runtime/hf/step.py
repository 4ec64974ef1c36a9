"""`LayerStep`: one layer's next tokens on a CPU, prepared for all layers before a forward pass.

A model's weights fill the processor's caches, so an operation between two layers takes several times
as long as one of many in a row.
"""

import torch
from torch import Tensor

from fp8kv_runtime.fp8 import fp8_max
from fp8kv_runtime.storage import KVBlocks


class StepTokens:
    """The next tokens of the rows: where they go in blocks, and memory for those of one layer at a time.

    `shape` is that of K and V, [B, K, T, D]; `block_ids` and `offsets` in these are [B, T] int64.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, block_ids: Tensor, offsets: Tensor
    ) -> None:
        self.shape = shape
        self.scaled = torch.empty((2, *shape))
        self.key, self.value = self.scaled
        self.codes = torch.empty((2, *shape), dtype=dtype)
        # numpy takes less time to begin than torch
        self.bytes = self.codes.view(torch.uint8).permute(1, 3, 0, 2, 4).numpy()
        place = block_ids.numpy(), offsets.numpy()
        self.place = (place[0].item(), place[1].item()) if block_ids.numel() == 1 else place
        self.limit = fp8_max(dtype)


class LayerStep:
    """Storing and reading one layer's next tokens, where all before them are decoded already.

    `decoded` [2, B, K, n, D] float32 has room for these: n is at least `length`, which counts them.
    """

    def __init__(self, blocks: KVBlocks, decoded: Tensor, length: int, tokens: StepTokens) -> None:
        self.tokens = tokens
        self.scales = blocks.scales
        self.stored = blocks.token_bytes.numpy()
        num_tokens = tokens.shape[2]
        self.new = decoded.narrow(3, length - num_tokens, num_tokens)
        self.key, self.value = decoded.narrow(3, 0, length).unbind(0)

    def run(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the next K and V [B, K, T, D]; return all [B, K, N, D].

        They are what `KVBlocks.encode`, `write` and `decode` make of them.
        """
        tokens = self.tokens
        tokens.key.copy_(key)
        tokens.value.copy_(value)
        tokens.codes.copy_(tokens.scaled.div_(self.scales).clamp_(-tokens.limit, tokens.limit))
        self.stored[tokens.place] = tokens.bytes
        self.new.copy_(tokens.codes).mul_(self.scales)
        return self.key, self.value
