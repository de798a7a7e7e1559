"""The commands of ``ingot``, one file for each group of them."""

from ingot.lab.commands import evaluating, looking, measuring, training
from ingot.lab.commands.app import app

__all__ = ["app", "evaluating", "looking", "measuring", "training"]
