"""The recipes: each file makes one model's task, with the paper's schedule, and says so by ``@recipe``."""

from ingot.lab.recipes import autoencoder, cct, convmixer, dhvt, digits, gcn, gcvit, gpt, repvit, swin, vgg
from ingot.lab.recipes.base import RECIPES, Options, Recipe, recipe

__all__ = [
    "RECIPES",
    "Options",
    "Recipe",
    "autoencoder",
    "cct",
    "convmixer",
    "dhvt",
    "digits",
    "gcn",
    "gcvit",
    "gpt",
    "recipe",
    "repvit",
    "swin",
    "vgg",
]
