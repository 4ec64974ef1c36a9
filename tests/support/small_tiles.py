"""Small tiles for kernels in the interpreter, so that short sequences have several."""

import json


def table_of_small_tiles(directory):
    """Write a tuning table, for `FP8KV_TUNING`, in which the interpreter takes tiles of 32."""
    decode = {"on": "interpreter", "head_dim": 256, "tile": 32, "num_warps": 4, "least": 1}
    rows = [decode | {"bits": bits} for bits in (8, 16)]
    path = directory / "small_tiles.json"
    path.write_text(json.dumps({"decode": rows, "extend": rows}))
    return path
