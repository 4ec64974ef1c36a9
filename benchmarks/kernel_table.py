"""The rows of `kernel_speed.py`: batch x context, then heads, head_dim and block size."""

from fp8kv_runtime.bench.cases import Case

_K = 1024


def _decode(name: str, lengths: tuple[int, ...], **changes: int | bool) -> Case:
    return Case("decode_attention", name, lengths, **changes)


_LONG = (16 * _K,) * 8

CASES: tuple[Case, ...] = (
    Case("append_kv", "2,048 tokens, 32 heads of 256", (2048,), 2048, 32, 32, 256, quick=True),
    Case("append_kv", "the same, counting", (2048,), 2048, 32, 32, 256, count=True),
    Case("append_kv", "1 token of each of 64", (2 * _K,) * 64, quick=True),
    _decode("1 x 1k", (_K,), quick=True),
    _decode("1 x 8k", (8 * _K,)),
    _decode("1 x 32k", (32 * _K,), quick=True),
    _decode("1 x 128k", (128 * _K,)),
    _decode("8 x 16k", _LONG),
    _decode("8 x 32k", (32 * _K,) * 8, quick=True),
    _decode("32 x 4k", (4 * _K,) * 32),
    _decode("64 x 2k", (2 * _K,) * 64),
    _decode("128 x 8k", (8 * _K,) * 128),
    _decode("1 x 128k + 31 x 4k", (128 * _K, *(4 * _K,) * 31)),
    _decode("32 x 8,064: the same, evenly", (8064,) * 32),
    _decode("8 x 16k, 32 KV heads", _LONG, num_kv_heads=32),
    _decode("8 x 16k, 64 / 8 heads", _LONG, num_heads=64),
    _decode("8 x 16k, 28 / 4 heads", _LONG, num_heads=28, num_kv_heads=4),
    _decode("8 x 16k, 16 / 1 heads", _LONG, num_heads=16, num_kv_heads=1),
    _decode("8 x 16k, head_dim 64", _LONG, head_dim=64),
    _decode("8 x 16k, head_dim 80", _LONG, head_dim=80),
    _decode("8 x 16k, head_dim 256", _LONG, head_dim=256),
    _decode("8 x 16k, block 16", _LONG, block_size=16),
    _decode("8 x 16k, block 32", _LONG, block_size=32),
    _decode("8 x 16k, block 128", _LONG, block_size=128),
    _decode("8 x 16k, FP8 query", _LONG, q_fp8=True),
    Case("extend_attention", "prompt of 8k", (8 * _K,), 8 * _K, quick=True),
    Case("extend_attention", "2k after 32k", (34 * _K,), 2 * _K),
    # KV is split: alone these are fewer programs than processors
    Case("extend_attention", "4 after 128k", (128 * _K,), 4, quick=True),
    Case("extend_attention", "64 after 32k", (32 * _K,), 64),
)
