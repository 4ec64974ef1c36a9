"""docs/engines.md, from the rules: `python -m calib.verify.document > docs/engines.md`."""

import sys

from jinja2 import Environment, PackageLoader

from calib.verify.rules import Remap, Rules, all_rules

_METHODS = ("compressed-tensors", "modelopt", "fp8", "quark")


def page() -> str:
    """The whole page."""
    template = Environment(loader=PackageLoader("calib.verify", ".")).get_template("engines.md.j2")
    engines = [*all_rules().values()]
    told = template.render(engines=engines, methods=_METHODS, names=_names, sentence=_sentence)
    return f"{told.rstrip()}\n"


def _names(rules: Rules) -> list[Remap]:
    """What becomes of names on disk: methods' own entries, then the engine's, each once."""
    own = (entry for method in rules.methods.values() for entry in method.remap)
    return [*dict.fromkeys((*own, *rules.remap))]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


if __name__ == "__main__":
    sys.stdout.write(page())
