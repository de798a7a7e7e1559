"""A task by its name: a recipe's, or a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingot.lab.naming import find
from ingot.lab.own_code import function_named
from ingot.lab.recipes import RECIPES, Options
from ingot.lab.task import Task, from_function

FORMS = (
    "a recipe (see `ingot list`), or 'package.module:function' for a function that returns a task of your own"
)


def named_task(name: str, options: Options) -> Task:
    """The task; a ValueError that says what there is if there is none of this name."""
    if ":" not in name:
        if name not in RECIPES and Path(f"{name}.py").is_file():
            raise ValueError(f"{name!r} is no recipe: for a function in {name}.py write {name}:function")
        return find(name, RECIPES, "recipe").task(options)
    given = [
        key for key, value in vars(options).items() if value != getattr(Options(), key) and key != "data_dir"
    ]
    if given:
        raise ValueError(f"{', '.join(given)} is for recipes: let the function {name} see to it")
    function: Callable[[], Any] = function_named(name, FORMS)
    return from_function(name, function)
