"""`fp8kv recipes`."""

from typing import Annotated

import typer

from commands.running import print_table, run


def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this recipe in full.")] = None,
) -> None:
    """List the bundled recipes, or print one in full."""

    def work() -> None:
        from calib.recipe import load_recipe, recipe_names, recipe_text

        if name:
            print(recipe_text(name), end="")
            return
        rows = [(each, load_recipe(each).description) for each in recipe_names()]
        print_table("Bundled recipes", ("recipe", "what it does"), rows)

    run(work)
