"""Structures by name: ``"hierarchical(15,15)"`` to a structure of any size, and a place for one's own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeAlias, TypeVar

from ingot.structures.base import Structure

Factory: TypeAlias = Callable[[int], Structure]
"""A structure that waits for its dimension: a class such as ``Diagonal``, a function, or parsed text."""

B = TypeVar("B", bound=Callable[..., Structure])

_BUILDERS: dict[str, Callable[..., Structure]] = {}


def register(name: str) -> Callable[[B], B]:
    """Make a structure known by name: a decorator for a class or a function.

    What is decorated takes the dimension first and then its own numbers or structures, if any::

        @register("two_blocks")
        def two_blocks(dim: int, size: int = 8) -> Structure: ...

    From then on ``structure="two_blocks(16)"`` works everywhere.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(
            "a structure's name is lower-case letters, digits and underscores, as in @register('my_blocks'); "
            f"got {name!r}"
        )

    def decorate(builder: B) -> B:
        if not callable(builder) or not inspect.signature(builder).parameters:
            raise TypeError(
                f"{name!r} is to be a class of structures, or a function of the dimension; got {builder!r}"
            )
        _BUILDERS[name] = builder
        if isinstance(builder, type) and issubclass(builder, Structure):
            builder.name = name
        return builder

    return decorate


def registered() -> dict[str, Callable[..., Structure]]:
    """All structures known by name."""
    return dict(_BUILDERS)


@dataclass(frozen=True)
class Named:
    """A structure in text, waiting for its dimension.

    ``size`` is how many rows it asks for inside ``upper`` or ``lower``; None takes what is left.
    """

    name: str
    arguments: tuple[int | Named, ...] = ()
    size: int | None = None

    def __call__(self, dim: int) -> Structure:
        if self.size is not None and dim > self.size:
            raise ValueError(
                f"the structure '{self}' has a fixed size of {self.size} rows and cannot fill {dim}: leave "
                "the size out, or one part of a combination without one, as in 'upper(dense(16),diagonal)'."
            )
        return _BUILDERS[self.name](dim, *self.arguments)

    def __str__(self) -> str:
        words = [str(argument) for argument in self.arguments]
        # The size of a combination is that of its parts, which already say it.
        own_size = self.size is not None and not any(isinstance(a, Named) for a in self.arguments)
        words += [str(self.size)] if own_size else []
        return f"{self.name}({','.join(words)})" if words else self.name


def parse(text: str) -> Named:
    """Read a structure from text.

    A name is followed by its own numbers and, optionally, by the number of rows that it takes inside
    a combination: ``"dense"``, ``"block_diagonal(30)"``, ``"hierarchical(15,15)"``,
    ``"upper(dense(16),diagonal)"``, ``"lower(block_diagonal(8,64),diagonal)"``.
    """
    words = iter(re.findall(r"\w+|\S", text))
    try:
        spec, following = _read(words, next(words, ""))
        if following:
            raise _SyntaxError(f"{following!r} comes after its end.")
    except _SyntaxError as error:
        possible = ", ".join(_usage(name) for name in sorted(_BUILDERS))
        raise ValueError(f"cannot read the structure {text!r}: {error} Possible: {possible}.") from None
    return spec


class _SyntaxError(Exception):
    pass


def _usage(name: str) -> str:
    own = list(inspect.signature(_BUILDERS[name]).parameters)[1:]
    return f"{name}({','.join(own)})" if own else name


def _read(words: Iterator[str], name: str) -> tuple[Named, str]:
    """A structure whose name was just read, and the word after it."""
    if name not in _BUILDERS:
        near = get_close_matches(name, _BUILDERS, n=1)
        raise _SyntaxError(f"{name!r} is no structure" + (f", did you mean {near[0]!r}?" if near else "."))
    following = next(words, "")
    if following != "(":
        return _named(name, []), following
    arguments: list[int | Named] = []
    while following != ")":
        word = next(words, "")
        if word.isdecimal():
            arguments.append(int(word))
            following = next(words, "")
        else:
            argument, following = _read(words, word)
            arguments.append(argument)
        if following not in (",", ")"):
            raise _SyntaxError(
                f"expected ',' or ')' after {arguments[-1]}, found {following or 'the end'!r}."
            )
    return _named(name, arguments), next(words, "")


def _named(name: str, arguments: list[int | Named]) -> Named:
    """Check the arguments against the builder, and take the size off their end."""
    parameters = list(inspect.signature(_BUILDERS[name]).parameters.values())[1:]
    required = sum(parameter.default is parameter.empty for parameter in parameters)
    size = None
    if len(arguments) == len(parameters) + 1 and isinstance(arguments[-1], int):
        size = arguments.pop()
    if not required <= len(arguments) <= len(parameters):
        raise _SyntaxError(f"{name!r} is written {_usage(name)}.")
    for argument, parameter in zip(arguments, parameters, strict=False):
        wants_structure = "Factory" in str(parameter.annotation)
        if wants_structure != isinstance(argument, Named):
            kind = "a structure" if wants_structure else "a number"
            raise _SyntaxError(f"{name!r} is written {_usage(name)}, and {parameter.name!r} is {kind}.")
        if argument == 0:
            raise _SyntaxError(f"{parameter.name!r} of {name!r} must be at least 1.")
    parts = [argument.size for argument in arguments if isinstance(argument, Named)]
    if parts and all(part is not None for part in parts):
        size = sum(part for part in parts if part is not None)
    return Named(name, tuple(arguments), size if isinstance(size, int) else None)


def resolve(structure: str | Factory) -> Factory:
    """A factory from what a user may give: text, a class, a function of the dimension."""
    if isinstance(structure, str):
        return parse(structure)
    if callable(structure):
        return structure
    raise TypeError(
        f"a structure is text such as 'block_diagonal(30)' or a function of the dimension such as "
        f"ingot.structures.Diagonal; got {structure!r}"
    )


def bind(factory: Factory, dim: int) -> Structure:
    """A structure of dimension ``dim``, checked."""
    structure = factory(dim)
    if not isinstance(structure, Structure) or structure.dim != dim:
        raise ValueError(f"the structure {factory!r} was asked for dimension {dim} and gave {structure!r}")
    return structure
