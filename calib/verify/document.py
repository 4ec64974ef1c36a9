"""docs/engines.md, from the rules: `python -m calib.verify.document > docs/engines.md`."""

import sys

from jinja2 import Environment, PackageLoader

from calib.verify.classes import NAMES, Classes, load_classes
from calib.verify.rules import Remap, Rules, all_rules


def page() -> str:
    """The whole page."""
    template = Environment(loader=PackageLoader("calib.verify", ".")).get_template("engines.md.j2")
    tables = [load_classes(name) for name in ("vllm", "sglang")]
    told = template.render(
        engines=[*all_rules().values()], names=_names, classes=_classes(*tables), tables=tables
    )
    return f"{told.rstrip()}\n"


def _names(rules: Rules) -> list[Remap]:
    """What becomes of names on disk: methods' own entries, then the engine's, each once."""
    own = (entry for method in rules.methods.values() for entry in method.remap)
    return [*dict.fromkeys((*own, *rules.remap))]


def _classes(vllm: Classes, sglang: Classes) -> list[tuple[str, ...]]:
    """Each architecture: in vLLM one scale per layer, per head, ModelOpt's config; in SGLang."""
    per_layer, per_head = "compressed-tensors", "compressed-tensors attn_head"
    columns = ((vllm, per_layer), (vllm, per_head), (vllm, "modelopt"), (sglang, per_layer))
    architectures = sorted({*vllm.results, *sglang.results, *vllm.not_built, *sglang.not_built})
    return [(name, *(_cell(*column, name) for column in columns)) for name in architectures]


def _cell(classes: Classes, kind: str, architecture: str) -> str:
    """Whether our outputs load there, under whatever name does."""
    fates = classes.fates({"architectures": [architecture]}, kind)
    if isinstance(fates, str):
        return "not known"
    if any(fates.get(name) == "loaded" for name in NAMES):
        return "**loads**"
    fate = fates[NAMES[0]].partition(":")[0]
    return {"crash": "does not start", "refused": "does not start"}.get(fate, fate)


if __name__ == "__main__":
    sys.stdout.write(page())
