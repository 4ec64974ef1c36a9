"""docs/engines.md, from the rules: `python -m calib.verify.document > docs/engines.md`."""

import sys
from collections.abc import Iterable

from calib.verify.rules import Method, Rules, all_rules

_INTRO = """# Engines

What each engine's loader does with FP8 KV-cache scales, as `fp8kv verify` simulates it. This page
is made from the rules in `calib/verify/*.yaml` (`python -m calib.verify.document >
docs/engines.md`): another engine or version is another file there.

**Ran** means that the rules were compared with the engine itself, in the version under "Source".
`make interop` has vLLM load the hand-made directories of `tests/interop/scale_cases.py`, good and
bad, on a CPU, some of them split over two and four ranks and some as if on an MI300, and compares
every scale that its attention layers hold with the prediction. Of SGLang it runs what decides about
scales (config, attention layer, names, weight loader) on the same directories, without a server,
and its model classes named below on every way to name scales. Other classes of SGLang drop scales,
have no place for them, or do not start; `verify` says "not known" for them and exits with 1.

**Read** means that the rules were taken from that source, and nothing was run.

"""
_METHODS = ("compressed-tensors", "modelopt", "fp8", "quark")
_KINDS = {
    "one_or_per_head": "per layer or per head",
    "scalar": "per layer",
    "pair": "per layer",
    "none": "ignored: 1.0",
}


def page() -> str:
    """The whole page."""
    rules = [*all_rules().values()]
    methods = [f"`{method}`" for method in _METHODS]
    headings = ["Engine", "Versions", "Rules", *methods, "no config", "FP8 cache"]
    lines = [_row(headings), _row(["---"] * len(headings)), *map(_engine, rules), ""]
    return _INTRO + "\n".join([*lines, *(line for each in rules for line in _details(each))])


def _engine(rules: Rules) -> str:
    cells = [_cell(rules.methods.get(m, rules.methods.get("*"))) for m in _METHODS]
    cells = ["ignored: 1.0"] * len(_METHODS) if rules.reads == "json" else cells
    without = _cell(rules.without_method) if rules.without_method else rules.without_config
    ran = "**ran**" if rules.ran else "read"
    return _row([rules.engine, rules.versions, ran, *cells, without, f"`{rules.flag}`"])


def _cell(method: Method | None) -> str:
    if method is None:
        return "refused"
    text = _KINDS[method.kind]
    text += ", `quant_algo` needed" if method.needs_algo else ""
    text += ", rounded to bfloat16" if method.through_bf16 else ""
    return text + (", doubled on MI300" if method.doubles_fnuz else "")


def _details(rules: Rules) -> list[str]:
    files = {
        "index": "Reads the safetensors files that the index names, or all where there is none.",
        "all": "Reads every safetensors file of the directory; the index is not looked at.",
        "json": "Reads `kv_cache_scales.json` alone; one mistake in it and every scale is 1.0.",
    }
    lines = [f"## {rules.engine} {rules.versions}", "", f"Source: {rules.source}.", ""]
    lines += [files[rules.reads]]
    if rules.reads != "json":
        lines += [f"Scales under a name that the model does not have: {rules.unknown}."]
    if rules.architectures:
        classes = ", ".join(f"`{name}`" for name in rules.architectures)
        lines += [f"What becomes of scales is known for {classes}; `verify` says so of all others."]
    lines += [f"{rules.note[0].upper()}{rules.note[1:]}." if rules.note else ""]
    whys = dict.fromkeys(method.why for method in rules.methods.values() if method.why)
    lines += [f"{why[0].upper()}{why[1:]}." for why in whys]
    if rules.remap:
        extra = [entry for method in rules.methods.values() for entry in method.remap]
        entries = dict.fromkeys((entry.pattern, entry.to) for entry in (*extra, *rules.remap))
        lines += ["", _row(["name on disk", "becomes"]), _row(["---", "---"])]
        lines += [_row([f"`{a}`".replace("|", "\\|"), f"`{b}`"]) for a, b in entries]
    return [*(line for line in lines if line is not None), ""]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(page())
