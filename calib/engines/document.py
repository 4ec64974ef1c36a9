"""docs/engines.md, from the rules: `python -m calib.engines.document > docs/engines.md`."""

import sys

from jinja2 import Environment, PackageLoader

from calib.engines.classes import NAMES, OTHER, Classes, load_classes
from calib.engines.rules import Remap, Rules, all_rules

_LATENTS = "#multi-head-latent-attention"


def page() -> str:
    """The whole page."""
    template = Environment(loader=PackageLoader("calib.engines", ".")).get_template("engines.md.j2")
    tables = [load_classes(name) for name in ("vllm", "sglang")]
    told = template.render(
        engines=[*all_rules().values()], names=_names, classes=class_rows(*tables), tables=tables
    )
    return f"{told.rstrip()}\n"


def _names(rules: Rules) -> list[Remap]:
    """What becomes of names on disk: methods' own entries, then the engine's, each once."""
    own = (entry for method in rules.methods.values() for entry in method.remap)
    return [*dict.fromkeys((*own, *rules.remap))]


def class_rows(vllm: Classes, sglang: Classes, *, page: str = "") -> list[tuple[str, ...]]:
    """Each architecture: in vLLM one scale per layer, per head, ModelOpt's config; in SGLang.

    Links about latents lead to `page`, where that is another one.
    """
    per_layer, per_head = "compressed-tensors", "compressed-tensors attn_head"
    columns = ((vllm, per_layer), (vllm, per_head), (vllm, "modelopt"), (sglang, per_layer))
    architectures = sorted({*vllm.results, *sglang.results, *vllm.not_built, *sglang.not_built})
    latents = f"{page}{_LATENTS}"
    return [(name, *(_cell(*column, name, latents) for column in columns)) for name in architectures]


def _cell(classes: Classes, kind: str, architecture: str, latents: str) -> str:
    """Whether our outputs load there, under whatever name does; `latents`: a link about them."""
    fates = classes.fates({"architectures": [architecture]}, kind)
    if isinstance(fates, str):
        return "not known"
    if architecture in classes.latent:
        return _of_latents(classes, kind, architecture, latents)
    if any(fates.get(name) == "loaded" for name in NAMES):
        latent = any(architecture in load_classes(each).latent for each in ("vllm", "sglang"))
        return f"[of K and V]({latents})" if latent else "**loads**"
    fate = fates[NAMES[0]].partition(":")[0]
    return {"crash": "does not start", "refused": "does not start"}.get(fate, fate)


def _of_latents(classes: Classes, kind: str, architecture: str, latents: str) -> str:
    """The same of a class that caches latents (MLA), under any name."""
    of_class = classes.results[architecture]
    words = {fate.partition(":")[0] for fate in of_class[kind].values()}
    if "loaded" in words:
        spoils = all_rules()[classes.engine.lower()].latent_spoils
        return f"loads, [spoils]({latents})" if spoils else "**loads**"
    if "loaded" in of_class.get(f"{kind}{OTHER}", {}).values():
        return f"[with a flag]({latents})"
    return next((word for word in ("dropped", "no place") if word in words), "does not start")


if __name__ == "__main__":
    sys.stdout.write(page())
