"""Things by name, with a word on what may have been meant where there is no such name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

T = TypeVar("T")


def find(name: str, known: Mapping[str, T], what: str) -> T:
    """The thing of a name, whatever its case; a ValueError that names the nearest ones if there is none."""
    by_lower = {key.lower(): value for key, value in known.items()}
    if name.lower() not in by_lower:
        raise ValueError(f"there is no {what} {name!r}{suggestion(name, known)}")
    return by_lower[name.lower()]


def suggestion(name: str, known: Iterable[str]) -> str:
    """What may have been meant, as the end of a sentence; all there is if nothing comes near."""
    by_lower = {key.lower(): key for key in known}
    near = [by_lower[key] for key in get_close_matches(name.lower(), by_lower, n=3)]
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; there are {', '.join(by_lower.values())}"
