"""YAML from others, read strictly."""

from typing import Any

import yaml

from calib.errors import InputError

_MAX_ALIASES = 20  # each may stand for all before it, so that few lines could fill the memory
_MAX_QUOTED = 300


class _Loader(yaml.SafeLoader):
    aliases = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.aliases += self.check_event(yaml.AliasEvent)
        if self.aliases > _MAX_ALIASES:
            raise yaml.YAMLError(f"more than {_MAX_ALIASES} aliases")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        names = [key.value for key in keys]
        for number, key in enumerate(keys):
            if key.value in names[:number]:
                raise yaml.YAMLError(f"'{key.value}' is given twice{key.start_mark}")
        return super().construct_mapping(node, deep)


def read_yaml(text: str, source: str) -> Any:
    """Read a YAML document, or raise an InputError that names `source`."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        reason = "nested too deep"
    except (yaml.YAMLError, ValueError) as error:  # ValueError: dates and numbers that are none
        reason = " ".join(str(error).split())[:_MAX_QUOTED]
    raise InputError(f"cannot read {source[:_MAX_QUOTED]}: {reason}")
