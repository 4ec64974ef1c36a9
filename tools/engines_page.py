"""Write docs/engines.md from the catalogue: `make pages`."""

import sys
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from prose import fold

sys.path.insert(0, str(Path(__file__).parents[1]))

from calib.engines.catalogue import Engine, Remap, find_engine, load_catalogue
from calib.engines.model_classes import NAMES, TRANSFORMERS

PAGE = Path(__file__).parents[1] / "docs" / "engines.md"
_LATENTS = "#multi-head-latent-attention"


def page() -> str:
    """Render the whole page."""
    folder = FileSystemLoader(Path(__file__).parent)
    template = Environment(loader=folder).get_template("engines.md.j2")
    newest_first = reversed(load_catalogue().values())
    engines = sorted([*newest_first], key=lambda engine: engine.name)
    text = template.render(
        engines=engines,
        same_copies={each.title: _first_with_copies(each, engines) for each in engines},
        names=_names,
        classes=class_rows(),
        tables=[find_engine(name) for name in ("vllm", "sglang")],
        latents=latent_classes(find_engine("vllm")),
    )
    return f"{fold(text.rstrip())}\n"


def _names(engine: Engine) -> list[Remap]:
    """Return what becomes of names on disk: methods' own entries, then the engine's, each once."""
    own = (entry for method in engine.methods.values() for entry in method.remap)
    return [*dict.fromkeys((*own, *engine.remap))]


def _first_with_copies(engine: Engine, engines: list[Engine]) -> Engine:
    """Return the first version of the engine whose table of copies is this one's."""

    def facts(each: Engine) -> tuple[object, ...]:
        return each.name, each.scale_copies, each.backends

    return next(each for each in engines if facts(each) == facts(engine))


def latent_classes(engine: Engine) -> dict[str, list[str]]:
    """Return the classes that cache latents (MLA), by the fate of ModelOpt's scales; those per head too."""
    if not engine.classes:
        return {}
    words = ("loaded", "dropped", "no place", "crash", "crash per head")
    found: dict[str, list[str]] = {word: [] for word in words}
    for name in engine.classes.latent:
        results = engine.classes.results[name]
        per_layer = _words(results["modelopt"])
        word = next(word for word in words if word in per_layer)
        found[word].append(name)
        if word != "crash" and _words(results["compressed-tensors attn_head"]) == {"crash"}:
            found["crash per head"].append(name)
    return found


def _words(fates: dict[str, str]) -> set[str]:
    """Return what became of scales under any name, without the errors."""
    return {fate.partition(":")[0] for fate in fates.values()}


def class_rows(*, page: str = "") -> list[tuple[str, ...]]:
    """Return a row for each architecture: in vLLM a scale per layer, per head, ModelOpt's config; in SGLang.

    Links about latents lead to `page`, where that is another one.
    """
    vllm, sglang = find_engine("vllm"), find_engine("sglang")
    per_layer = "compressed-tensors"
    columns = ((vllm, per_layer), (vllm, f"{per_layer} attn_head"), (vllm, "modelopt"), (sglang, per_layer))
    tables = [engine.classes for engine in (vllm, sglang) if engine.classes]
    architectures = sorted({name for table in tables for name in (*table.results, *table.not_built)})
    latents = f"{page}{_LATENTS}"
    return [(name, *(_cell(*column, name, latents) for column in columns)) for name in architectures]


def _cell(engine: Engine, kind: str, architecture: str, latents: str) -> str:
    """Say whether our outputs load there, under whatever name does; `latents` is a link about them."""
    config = {"architectures": [architecture]}
    fates = engine.fates(config, kind)
    if fates is None or isinstance(fates, str):
        return "not known"
    if engine.class_caches_latents(config):
        return _latent_cell(engine, kind, architecture, latents)
    if any(fates.get(name) == "loaded" for name in NAMES):
        is_latent = any(find_engine(name).class_caches_latents(config) for name in ("vllm", "sglang"))
        return f"[of K and V]({latents})" if is_latent else "**loads**"
    fate = fates[NAMES[0]].partition(":")[0]
    return {"crash": "does not start", "refused": "does not start"}.get(fate, fate)


def _latent_cell(engine: Engine, kind: str, architecture: str, latents: str) -> str:
    """Say the same of a class that caches latents (MLA), under any name."""
    results = engine.classes.results[architecture] if engine.classes else {}
    words = _words(results[kind])
    if "loaded" in words:
        return f"loads, [spoils]({latents})" if engine.latent_spoils else "**loads**"
    if "loaded" in results.get(f"{kind}{TRANSFORMERS}", {}).values():
        return f"[with a flag]({latents})"
    return next((word for word in ("dropped", "no place") if word in words), "does not start")


if __name__ == "__main__":
    PAGE.write_text(page())
