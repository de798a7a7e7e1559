"""Things by name, with a word on what may have been meant where there is no such name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ingot.naming import suggestion

__all__ = ["find", "suggestion"]

T = TypeVar("T")


def find(name: str, known: Mapping[str, T], what: str) -> T:
    """The thing of a name, whatever its case; a ValueError that names the nearest ones if there is none."""
    by_lower = {key.lower(): value for key, value in known.items()}
    if name.lower() not in by_lower:
        raise ValueError(f"there is no {what} {name!r}{suggestion(name, known)}")
    return by_lower[name.lower()]
