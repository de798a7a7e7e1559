"""The laboratory's commands as the tests call them."""

import re

from typer.testing import CliRunner

from ingot.lab.cli import app


def invoke(*words: str):
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, words)


def plain(text: str) -> str:
    """Text without colours, box and line breaks, all of which depend on where the tests run."""
    colourless = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return " ".join(re.sub(r"[╭╮╰╯─│]", " ", colourless).split())
