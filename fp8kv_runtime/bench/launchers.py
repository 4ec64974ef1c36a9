"""What is measured: the kernels' launchers, by name."""

from fp8kv_runtime.bench.cases import Launchers
from fp8kv_runtime.kernels import append_kv, decode, extend


def load_launchers() -> Launchers:
    """The launchers, with the names of their references."""
    return {
        "append_kv": append_kv.append_kv,
        "decode_attention": decode.decode_attention,
        "extend_attention": extend.extend_attention,
    }
