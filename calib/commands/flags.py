"""Flags that several commands share, and the recipe keys that flags set.

A flag is the default of a command's parameter, and its help text is its first argument. `data`, `scales`,
`output` and `resources` put it into the panel of that name. `option` puts it above the panels.
"""

from functools import partial
from pathlib import Path
from typing import Any

import typer

from calib import __version__, choices


def option(help: str, *names: str, default: Any = None, panel: str | None = None, **settings: Any) -> Any:
    """Return a `typer.Option`."""
    return typer.Option(default, *names, help=help, rich_help_panel=panel, **settings)


data, scales, output, resources = (
    partial(option, panel=panel) for panel in ("Data", "Scales", "Output", "Resources")
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"fp8kv {__version__}")
        raise typer.Exit


MODEL = typer.Argument(
    ..., help="The model: a local directory, a Hub id, or `builtin:smollm2`.", metavar="MODEL"
)
OUTPUT = option("Write the result to this directory.", "-o", "--output", default=...)
DEVICE = option("Run the model on this device. Default: a GPU if there is one.")
DTYPE = resources("Load the weights in this type. Default: the checkpoint's own.")
BACKEND = resources("Run attention to FP8 caches in Triton or torch. Default: Triton on a GPU, else torch.")
ALLOW_FEW_TOKENS = data(
    "Make scales even from fewer than 64 tokens, or from fewer than 16 different ones.",
    "--allow-few-tokens",
    default=False,
)
IMAGES = option(
    "Read the pictures in this column too, with a model that takes pictures. See also the datasets "
    "builtin:pictures and builtin:more-pictures.",
    metavar="COLUMN",
)
AUDIO = option("Read the sound in this column too, with a model that takes sound.", metavar="COLUMN")
SET, SET_EVALUATION, SET_DATA = (
    option(f"Set {keys}, such as data.column=text. Repeatable.", "--set", metavar="KEY=VALUE")
    for keys in ("any key of the recipe", "a key of the recipe's `data` or `evaluation`", "a key of `data`")
)
SEED = data("Choose the text at random with this seed. Default: 42.")
TRUST_REMOTE_CODE = resources(
    "Run Python code that comes with the model.", "--trust-remote-code", default=False
)
IN_PLACE = output(
    "Change the model's own directory. Keep a copy of the files that are replaced.",
    "--in-place",
    default=False,
)
RESUME = resources(
    "Continue where the same command was stopped; without this flag, progress of one is refused.",
    "--resume",
    default=False,
)
PROGRESS = output("Show progress on stderr: `json` prints JSON lines, `none` shows none.", default="auto")
VERSION = option(
    *("Print the version and exit.", "--version"),
    default=False,
    callback=_print_version,
    is_eager=True,
    expose_value=False,
)

# flags that `job_command` adds: type and option
SHARED_FLAGS: dict[str, tuple[Any, Any]] = {
    "overwrite": (
        bool,
        output("Replace what is in the output directory already.", "--overwrite", default=False),
    ),
    "quiet": (bool, output("Print only errors and urgent warnings, no progress.", "--quiet", default=False)),
    "progress": (choices.ProgressForm, PROGRESS),
    "as_json": (bool, output("Print one JSON object in place of text.", "--json", default=False)),
    "debug": (bool, output("Show the traceback of an error.", "--debug", default=False)),
}

# flags that are not called what their recipe key is
_KEYS = {"observer": "observer.name", "format": "export.formats", "search": "evaluation.kl_budget"}
_COMMA_SEPARATED = ("variants", "caches", "tasks")


def recipe_keys(parameters: dict[str, Any], sections: tuple[str, ...] = ("data", "export")) -> dict[str, Any]:
    """Return the recipe keys of flags that were set; the last of `sections` that has a name wins."""
    from calib.errors import InputError
    from calib.recipe import Recipe, load_recipe

    keys = {name: name for name in Recipe.model_fields}
    for section in sections:
        fields = type(getattr(Recipe(), section)).model_fields
        keys |= {name: f"{section}.{name}" for name in fields}
    keys |= _KEYS
    # 0 is a value, and equals False
    values = {name: x for name, x in parameters.items() if x is not False and x not in (None, [], ())}
    values |= {name: _split(values[name]) for name in _COMMA_SEPARATED if name in values}
    values = {name: value for name, value in values.items() if name in keys}
    for name, value in values.items():
        try:
            load_recipe(None, {keys[name]: value})
        except InputError as error:  # what depends on other settings is for the whole recipe
            flag = f"--{name.replace('_', '-')}"
            for separator in (": Input ", f": {flag} "):
                _, is_of_value, problem = str(error).partition(separator)
                if is_of_value:
                    raise InputError(f"{flag} {problem}") from None
    assigned = parse_assignments(parameters.get("set_") or [])
    return {keys[name]: value for name, value in values.items()} | assigned


def _split(names: str) -> list[str]:
    """Return names that commas separate; the name of a file may hold one."""
    return [names] if Path(names).exists() else [name.strip() for name in names.split(",")]


def check_assignments(parameters: dict[str, Any], sections: tuple[str, ...]) -> None:
    """Refuse keys of `--set` that an evaluation does not read: it measures scales of its own making."""
    from calib.errors import InputError

    for key in parse_assignments(parameters.get("set_") or []):
        section = key.partition(".")[0]
        is_read = section in sections or section in ("device", "dtype", "trust_remote_code", "save_minutes")
        if not is_read or key in ("data", "data.samples", "data.seq_len", "data.until"):
            names = " and ".join(f"`{name}`" for name in sections)
            raise InputError(f"--set {key} would not be read here; set keys of {names}, or give a flag")


def parse_assignments(pairs: list[str]) -> dict[str, Any]:
    """Return the recipe keys of `--set KEY=VALUE`, the values read as YAML."""
    from calib.errors import InputError
    from calib.strict_yaml import read_yaml

    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise InputError(f"--set takes KEY=VALUE, such as data.column=text; got '{pair}'")
        values[key] = read_yaml(value, f"--set '{pair}'")
    return values
