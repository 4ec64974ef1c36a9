"""Command-line flags to recipe keys."""

from typing import Any

from calib.errors import InputError
from calib.text import read_yaml

# flag -> recipe key
_RECIPE_KEYS = {
    **{name: name for name in ("strategy", "targets", "device", "dtype", "fp8_dtype", "headroom")},
    "center_keys": "center_keys",
    **{name: name for name in ("offload", "max_memory")},
    **{name: f"data.{name}" for name in ("dataset", "samples", "seq_len", "batch_size", "seed")},
    **{name: f"export.{name}" for name in ("reduce", "tp_size", "weights")},
    "observer": "observer.name",
    "format": "export.formats",
    "trust_remote_code": "trust_remote_code",
}
# flags of `fp8kv eval`: some of the same names, about other things
_EVALUATION_KEYS = {
    **{name: name for name in ("device", "dtype", "trust_remote_code")},
    "seed": "data.seed",
    "search": "evaluation.kl_budget",
    **{
        name: f"evaluation.{name}"
        for name in ("suite", "dataset", "samples", "seq_len", "variants", "backend", "fail_if")
    },
    **{name: f"evaluation.{name}" for name in ("tasks", "task_limit")},
}
_COMMA_SEPARATED = ("evaluation.variants", "evaluation.tasks")


def overrides(params: dict[str, Any]) -> dict[str, Any]:
    """Recipe keys of the flags that were given; a flag that a command lacks is not given."""
    flags = {flag: key for flag, key in _RECIPE_KEYS.items() if _was_given(params.get(flag))}
    given = {key: params[flag] for flag, key in flags.items()}
    batch_size = given.get("data.batch_size", "auto")
    return {**given, "data.batch_size": int(batch_size)} if batch_size.isdecimal() else given


def evaluation_overrides(params: dict[str, Any]) -> dict[str, Any]:
    """Recipe keys of the flags of `fp8kv eval` that were given."""
    given = {
        key: params[flag] for flag, key in _EVALUATION_KEYS.items() if _was_given(params.get(flag))
    }
    return given | {key: given[key].split(",") for key in _COMMA_SEPARATED if key in given}


def assignments(pairs: list[str]) -> dict[str, Any]:
    """Recipe keys of `--set KEY=VALUE`, the values read as YAML.

    Raises:
        InputError: a pair has no key or no `=`, or its value is no YAML.
    """
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise InputError(f"--set takes KEY=VALUE, such as data.column=text; got '{pair}'")
        found[key] = read_yaml(value, f"--set '{pair}'")
    return found


def _was_given(value: object) -> bool:
    # 0 is a value, and equals False
    return value is not None and value is not False and value not in ((), [])
