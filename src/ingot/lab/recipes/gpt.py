"""Beyond the paper: a language model of characters."""

from __future__ import annotations

from ingot.lab.data.text import load_text
from ingot.lab.models.gpt import GPT, GPTSize
from ingot.lab.recipes.base import Options, recipe
from ingot.lab.task import Classification, Task, Training


@recipe("gpt", "character GPT on a text file", ("text",))
def gpt(options: Options) -> Task:
    """The error is the share of characters that were not expected."""
    size = options.sized(full=GPTSize(), small=GPTSize(2, 64, 4, 64), tiny=GPTSize(2, 32, 2, 32))
    text = load_text(options.folder, size.length)
    return Task(
        title="GPT on characters",
        model=lambda: GPT(text.symbols, size),
        train=text.train,
        test=text.test,
        objective=Classification(),
        training=Training(
            epochs=options.sized(full=10, small=3, tiny=2),
            batch_size=32,
            common={"loss_average": "token", "momentum": 0.9},
        ),
    )
