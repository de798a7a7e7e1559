"""The commands of ``ingot``, one file for each group of them."""

from ingot.lab.commands import training

# isort: split
# The help lists commands as they are imported: what most want comes first.
from ingot.lab.commands import evaluating, looking, measuring
from ingot.lab.commands.app import app

__all__ = ["app", "evaluating", "looking", "measuring", "training"]
