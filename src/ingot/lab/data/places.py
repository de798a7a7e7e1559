"""Where data lies: in a folder of the user's, or in the caches of the libraries that download it."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "INGOT_DATA"
"""The environment variable with the folder of data sets."""


class MissingDataError(ValueError):
    """Data that is neither here nor to be had; its message says how to get it."""


def data_dir(given: Path | None) -> Path | None:
    """The folder that was named on the command line, or else by the environment."""
    if given is None and os.environ.get(VARIABLE):
        given = Path(os.environ[VARIABLE])
    if given is not None and not given.is_dir():
        raise MissingDataError(f"there is no folder {given}: name another one by --data-dir or {VARIABLE}")
    return given


def look_for(folder: Path | None, *patterns: str) -> Path | None:
    """The first file or folder of these names."""
    if folder is None:
        return None
    return next((found for pattern in patterns for found in sorted(folder.glob(pattern))), None)
