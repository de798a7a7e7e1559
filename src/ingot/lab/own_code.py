"""Functions of the user's own, by the names of their modules."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ingot.lab.naming import suggestion


def function_named(name: str, forms: str) -> Callable[[], Any]:
    """The function ``package.module:function``; a ValueError that says what is wrong if there is none."""
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where a user's own modules are, also if a script was started
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not module_name.startswith(error.name):
            raise
        raise ValueError(f"there is no module {module_name!r} for {name!r}: write {forms}") from error
    functions = [key for key, value in vars(module).items() if callable(value)]
    if function_name not in functions:
        raise ValueError(
            f"{module_name!r} has no function {function_name!r}{suggestion(function_name, functions)}"
        )
    function = getattr(module, function_name)
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    if any(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in needed):
        raise ValueError(f"{name!r} wants arguments: write a function without any")
    found: Callable[[], Any] = function
    return found
