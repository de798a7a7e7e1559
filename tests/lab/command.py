"""The laboratory's commands as the tests call them."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ingot.lab.commands import app


def invoke(*words: str):
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, words)


def finish(directories: pytest.TempPathFactory, command: str, *words: str) -> tuple[Path, str]:
    """The output directory of a short run of a command, and what it printed."""
    out = directories.mktemp("lab") / "new" / command
    result = invoke(command, *words, "--seeds", "1", "--out", str(out))
    assert result.exit_code == 0, result.output
    return out, result.stdout


def plain(text: str) -> str:
    """Text without colours, box and line breaks, all of which depend on where the tests run."""
    colourless = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return " ".join(re.sub(r"[╭╮╰╯─│]", " ", colourless).split())
