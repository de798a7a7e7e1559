"""What may have been meant by a name that does not exist."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar, cast

Init = TypeVar("Init", bound=Callable[..., None])


def suggestion(name: str, known: Iterable[str]) -> str:
    """What may have been meant, as the end of a sentence; all there is if nothing comes near."""
    by_lower = {key.lower(): key for key in known}
    near = [by_lower[key] for key in get_close_matches(name.lower(), by_lower, n=3)]
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; there are {', '.join(by_lower.values())}"


def names_keywords(remedies: Mapping[str, str]) -> Callable[[Init], Init]:
    """Let a constructor say what may have been meant by a keyword that it does not have.

    Python itself names the wrong one alone, before version 3.13. ``**keywords`` would do as well, but hide
    the mistake from type checkers. ``remedies`` are for keywords that users bring from elsewhere.
    """

    def decorate(init: Init) -> Init:
        known = list(inspect.signature(init).parameters)[1:]

        @wraps(init)
        def checked(self: object, *args: Any, **keywords: Any) -> None:
            for name in keywords:
                if name not in known:
                    remedy = f": {remedies[name]}" if name in remedies else suggestion(name, known)
                    raise TypeError(f"{type(self).__name__} has no keyword {name!r}{remedy}")
            init(self, *args, **keywords)

        return cast(Init, checked)

    return decorate
