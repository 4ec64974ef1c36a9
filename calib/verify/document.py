"""docs/engines.md, from the rules: `python -m calib.verify.document > docs/engines.md`."""

import sys

from jinja2 import Environment, PackageLoader

from calib.verify.rules import Remap, Rules, all_rules


def page() -> str:
    """The whole page."""
    template = Environment(loader=PackageLoader("calib.verify", ".")).get_template("engines.md.j2")
    told = template.render(engines=[*all_rules().values()], names=_names)
    return f"{told.rstrip()}\n"


def _names(rules: Rules) -> list[Remap]:
    """What becomes of names on disk: methods' own entries, then the engine's, each once."""
    own = (entry for method in rules.methods.values() for entry in method.remap)
    return [*dict.fromkeys((*own, *rules.remap))]


if __name__ == "__main__":
    sys.stdout.write(page())
