"""`fp8kv recipes`."""

from typing import Annotated

import typer

from calib.commands.flags import AsJson
from calib.commands.running import command, print_json, print_table


@command
def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this recipe in full.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the bundled recipes, or print one in full."""
    from calib.recipe import load_recipe, recipe_names, recipe_text

    if name:
        text = recipe_text(name)
        print(load_recipe(name).model_dump_json() if as_json else text.removesuffix("\n"))
        return
    found = {each: load_recipe(each).description for each in recipe_names()}
    if as_json:
        print_json(found)
    else:
        print_table("Bundled recipes", ("recipe", "what it does"), [*found.items()])
