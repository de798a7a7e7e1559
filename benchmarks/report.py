"""The page of a run's results in Markdown, made from what was measured alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.complexity import KINDS, exponent
from benchmarks.measured import Results, Scaling
from benchmarks.targets import Verdict, verdicts

BEGIN, END = "<!-- results -->\n", "<!-- end of results -->"
TIME_FIGURE, MEMORY_FIGURE = "scaling_time.png", "scaling_memory.png"


def page(results: Results, images: str) -> str:
    """A section for each part that was measured; ``images`` is where the page finds the figures."""
    parts = [environment(results.conditions)]
    if results.times or results.memory or results.scaling:
        parts += targets_section(verdicts(results))
    if results.times:
        parts += times_section(results)
    if results.alone:
        parts += alone_section(results)
    if results.memory:
        parts += memory_section(results)
    if results.scaling is not None:
        parts += scaling_section(results.scaling, images)
    if results.fast_paths:
        parts += ["## Fast paths\n", tables.paths_table(results.fast_paths)]
    return "\n".join(parts)


def environment(about: dict[str, Any]) -> str:
    """Where and when it was measured; packages that are missing are named."""
    peers = about["peers"]
    versions = [f"{name} {about[name.lower()]}" for name in ("torch", "Python", "ingot")]
    versions += [f"{name} {version}" for name, version in peers.items() if version]
    text = (
        f"Measured on {about['date']}: {about['processor']}, {about['cores']} cores, "
        f"{about['threads']} thread(s), float32; {', '.join(versions)}.\n"
    )
    missing = [name for name, version in peers.items() if not version]
    return text + (f"\nNot installed and therefore skipped: {', '.join(missing)}.\n" if missing else "")


def targets_section(found: list[Verdict]) -> Iterator[str]:
    by_model = [v for v in found if v.target.model and "never" not in v.target.claim]
    never_slower = [v for v in found if "never" in v.target.claim]
    growth = [v for v in found if not v.target.model]
    yield "## Targets\n"
    yield (
        "What is promised, and what was measured: medians of ratios, with the bound in brackets. "
        f"Of all targets, {tables.verdict_counts(found)}.\n"
    )
    if any(v.measured for v in by_model):
        yield tables.verdict_table(by_model)
    yield from folded("Never slower than the official package", never_slower)
    yield from folded("Growth with the dimension", growth)


def folded(title: str, found: list[Verdict]) -> Iterator[str]:
    """A table that is shown when it is clicked on."""
    if any(v.measured for v in found):
        counts = tables.verdict_counts(found)
        yield f'<details markdown="1"><summary>{title}: {counts}</summary>\n'
        yield tables.verdict_table(found)
        yield "</details>\n"


def times_section(results: Results) -> Iterator[str]:
    if any(tables.has_official(times) for times in results.times.values()):
        yield "## Against the official package\n"
        yield (
            "How many times as long the official package takes, with the quartiles over the rounds in "
            "brackets. It has no guards; ingot runs with its default settings.\n"
        )
        yield tables.official_table(results)
    for times in results.times.values():
        yield f"## {times.title}\n"
        yield "Times are in units of SGD's: of iterations, steps, and steps with an update and without.\n"
        yield tables.times_table(times)


def alone_section(results: Results) -> Iterator[str]:
    yield "## Each in a process of its own\n"
    yield (
        "Times of iterations in units of AdamW's, each optimizer in a process of its own, as in a training "
        "script; processes take turns. What is above was measured in one process, where the C library keeps "
        "as much memory as the greediest optimizer asks for. By itself AdamW may give the memory of its "
        "intermediate results back in each step, and get it anew page by page.\n"
    )
    yield tables.alone_table(results)


def memory_section(results: Results) -> Iterator[str]:
    yield "## Memory\n"
    yield (
        "Weights, gradients, activations, state and all, in float32; the three columns at the right are in "
        "units of AdamW's. Where factor updates cannot be told apart, both peaks are the higher one.\n"
    )
    for model, found in results.memory.items():
        title = results.times[model].title if model in results.times else tables.NAMES.get(model, model)
        yield f"**{title}**\n"
        yield tables.memory_table(found)


def scaling_section(scaling: Scaling, images: str) -> Iterator[str]:
    yield "## Growth with the dimension\n"
    first, last = scaling.dims[0], scaling.dims[-1]
    yield (
        f"Exponents that were fitted to the times from d = {first} to {last}, beside those of the paper's "
        "formulas over the same range (a logarithm is no power, so these are fitted, too):\n"
    )
    yield "\n".join(f"- *{kind}*: {meaning}" for kind, meaning in KINDS.items()) + "\n"
    yield tables.growth_table(scaling)
    yield (
        f"The step of SGD with momentum, which does the same to every entry whatever d is, takes "
        f"d^{exponent(scaling.dims, scaling.sgd_seconds):.2f} over this range: small weights are in the "
        "processor's caches, large ones are not. That much of the first column is the machine's.\n"
    )
    yield f"![Time against the dimension]({images}{TIME_FIGURE})\n"
    yield (
        "Memory is that of the whole optimizer while it trains a layer with d inputs and few outputs, so "
        "that whatever has d x d entries is a factor or was made from one:\n"
    )
    yield tables.storage_table(scaling)
    yield f"![Memory against the dimension]({images}{MEMORY_FIGURE})\n"


# --- Files ------------------------------------------------------------------------------------------------


def write(results: Results, folder: Path) -> str:
    """The page as a file of its own, with its figures beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = page(results, images="")
    (folder / "results.md").write_text(text, encoding="utf-8")
    write_figures(results, folder)
    return text


def write_figures(results: Results, folder: Path) -> None:
    if results.scaling is None:
        return
    from benchmarks.figures import plot_memory, plot_times  # matplotlib takes a while

    plot_times(results.scaling).savefig(folder / TIME_FIGURE, dpi=110)
    plot_memory(results.scaling).savefig(folder / MEMORY_FIGURE, dpi=110)


def write_between(target: Path, begin: str, end: str, text: str) -> None:
    """Put a text between a page's marks."""
    before, rest = target.read_text("utf-8").split(begin)
    target.write_text(f"{before}{begin}\n{text}\n{rest[rest.index(end) :]}", "utf-8")
