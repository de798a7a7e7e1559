"""The tables of the report, each from what was measured alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.complexity import KINDS, PAPER, expected_exponent, exponent
from benchmarks.contenders import OFFICIAL_NAMES, STATE_REFERENCE
from benchmarks.measured import Memory, PathResult, Results, Scaling, Spread, Times, ratio, spread
from benchmarks.targets import (
    EXPONENT_TOLERANCE,
    MODELS,
    Part,
    Verdict,
    alone_beside_adamw,
    defaults_beside_adamw,
    exponent_gap,
    iteration,
    plain_step,
    speedup,
    step,
    update_step,
)
from ingot.lab.tables import markdown_table

NAMES = {"mlp": "MLP", "vgg": "VGG", "vit": "ViT", "gpt": "GPT"}
NOTHING = "–"


# --- Targets ----------------------------------------------------------------------------------------------


def verdict_counts(found: Sequence[Verdict]) -> str:
    """How many were reached, of those that were measured."""
    answers = [verdict.reached for verdict in found]
    known = sum(answer is not None for answer in answers)
    unknown = f", {len(found) - known} were not measured" if known < len(found) else ""
    return f"{answers.count(True)} of {known} reached{unknown}"


def verdict_table(found: Sequence[Verdict]) -> str:
    """A column for each model, one for targets of no model; rows without any measurement are left out."""
    rows: dict[str, dict[str, str]] = {}
    measured = {_name(verdict) for verdict in found if verdict.measured}
    for verdict in found:
        if _name(verdict) in measured:
            rows.setdefault(_name(verdict), {})[verdict.target.model] = _cell(verdict)
    models = [model for model in (*MODELS, "") if any(model in row for row in rows.values())]
    columns = ("target", *(NAMES.get(model, "measured") for model in models))
    cells = ((name, *(row.get(model, "") for model in models)) for name, row in rows.items())
    return markdown_table(columns, list(cells)) + "\n"


def _name(verdict: Verdict) -> str:
    return f"{verdict.target.structure}: {verdict.target.claim}"


def _cell(verdict: Verdict) -> str:
    target, measured = verdict.target, verdict.measured
    if measured is None:
        return NOTHING
    sign = "≥" if target.at_least else "≤"
    mark = "✓" if verdict.reached else "✗"
    return _unbroken(f"{mark} {_number(measured.median)} ({sign} {target.limit:g})")


def _unbroken(value: object) -> str:
    """Text that a narrow column does not break into lines."""
    return str(value).replace(" ", "\N{NO-BREAK SPACE}")


def _number(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


# --- Times ------------------------------------------------------------------------------------------------


def official_table(results: Results) -> str:
    """How many times as long the official package takes, for each structure and model."""
    models = [model for model in results.times if has_official(results.times[model])]
    rows = []
    for structure in OFFICIAL_NAMES:
        for what, every, part in _compared(results):
            cells = [speedup(results, model, structure, every, part) for model in models]
            if any(cells):
                rows.append((f"{structure}: {what}", *map(_spread, cells)))
    return markdown_table(("official / ingot", *(_model(m) for m in models)), rows) + "\n"


def has_official(times: Times) -> bool:
    return any(timing.package == "singd" for timing in times.timings)


def _compared(results: Results) -> Iterator[tuple[str, int, Part]]:
    """What is compared, for all the T that were measured."""
    intervals = sorted({t.every for times in results.times.values() for t in times.timings if t.every})
    for every in intervals:
        yield f"step, T={every}", every, step
    if intervals and intervals[-1] > 1:
        yield "step with update", intervals[-1], update_step
        yield "step without update", intervals[-1], plain_step
    for every in intervals:
        yield f"iteration, T={every}", every, iteration


def times_table(times: Times) -> str:
    """One model's results."""
    sgd, adamw = times.reference, times.find(STATE_REFERENCE)
    lines = [
        f"Rounds: {len(sgd.iterations())}. SGD: {median(sgd.iterations()):.3g} ms an iteration, "
        f"{median(sgd.steps()):.3g} ms a step.\n"
    ]
    rows = []
    for timing in times.timings:
        both = [
            _spread(ratio(mine, its))
            for mine, its in ((timing.iterations(), sgd.iterations()), (timing.steps(), sgd.steps()))
        ]
        # Where every step is an update, or nobody can tell, there is nothing to tell apart.
        update = ratio(timing.step.update if timing.step.plain else [], sgd.steps())
        plain = ratio(timing.step.plain, sgd.steps())
        apart = (_number(kind.median) if kind else NOTHING for kind in (update, plain))
        state = f"{timing.state_bytes / adamw.state_bytes:.2f}" if adamw else NOTHING
        rows.append((timing.name, *both, *apart, state))
    columns = ("optimizer", "iteration", "step", "with update", "without", "state / AdamW")
    lines.append(markdown_table(columns, rows) + "\n")
    wild = [timing.name for timing in times.timings if not timing.finite]
    if wild:
        lines.append(f"The loss was not finite, so distrust the times of: {', '.join(wild)}.\n")
    return "\n".join(lines)


def _spread(value: Spread | None) -> str:
    return _unbroken(value) if value else NOTHING


def _model(key: str) -> str:
    return NAMES.get(key, key)


# --- Memory, growth, fast paths ---------------------------------------------------------------------------


def alone_table(results: Results) -> str:
    """A row for each optimizer, a column for each model."""
    models = [model for model in MODELS if model in results.alone]
    titles = dict.fromkeys(title for model in models for title in results.alone[model])
    rows = []
    for title in titles:
        pairs = [(results.alone[m].get(title, []), results.alone[m][STATE_REFERENCE]) for m in models]
        rows.append((title, *(str(ratio(mine, adamw) or NOTHING) for mine, adamw in pairs)))
    return markdown_table(("iteration / AdamW's", *(NAMES[model] for model in models)), rows) + "\n"


def cost_of_defaults(results: Results) -> str:
    """Iterations of SINGD as it comes in units of AdamW's, a column for each model."""
    models = [model for model in MODELS if model in results.times]
    rows = [
        (where, *(_spread(measure(results, model)) for model in models))
        for where, measure in (
            ("in turns with all others in one process", defaults_beside_adamw),
            ("each in a process of its own", alone_beside_adamw),
        )
    ]
    return markdown_table(("", *(results.times[model].title for model in models)), rows)


def memory_table(found: dict[str, Memory]) -> str:
    """One model's memory in units of AdamW's."""
    reference = found[STATE_REFERENCE]
    rows = []
    for title, used in found.items():
        ratios = (f"{mine / its:.3f}" for mine, its in zip(used, reference, strict=True))
        rows.append((title, f"{used.state / 2**20:.1f}", f"{used.peak / 2**20:.1f}", *ratios))
    columns = ("optimizer", "state in MiB", "peak in MiB", "state", "peak", "peak with update")
    return markdown_table(columns, rows) + "\n"


def growth_table(scaling: Scaling) -> str:
    """Fitted exponents of time beside the paper's."""
    rows = []
    for structure, terms in PAPER.items():
        cells = []
        for kind in KINDS:
            fitted = exponent(scaling.dims, scaling.seconds[kind][structure])
            paper = expected_exponent(scaling.dims, terms[kind])
            mark = "✓" if abs(fitted - paper) <= EXPONENT_TOLERANCE else "✗"
            cells.append(_unbroken(f"{mark} {fitted:.2f} / {paper:.2f} ({terms[kind].text})"))
        rows.append((structure, *cells))
    return markdown_table(("structure", *KINDS), rows) + "\n"


def gaps_table(results: Results) -> str:
    """How far fitted exponents are from those of the paper's formulas, and where that is most."""
    gaps = {
        (structure, kind): gap.median
        for structure in PAPER
        for kind in KINDS
        if (gap := exponent_gap(results, structure, kind))
    }
    rows = [(structure, *(f"{gaps[structure, kind]:.2f}" for kind in KINDS)) for structure in PAPER]
    worst = max(gaps, key=lambda place: gaps[place])
    where = f"{gaps[worst]:.2f} at most ({', '.join(worst)})"
    table = markdown_table(("difference of the exponent to the paper's", *KINDS), rows)
    scaling = results.scaling
    assert scaling is not None
    sgd = f"{exponent(scaling.dims, scaling.sgd_seconds):.2f}"
    return (
        f"{table}\n\nExponents of time differ from the paper's by {where}. SGD's own step, whose work grows "
        f"with d², takes d^{sgd} on this machine: small weights are in its caches, large ones are not."
    )


def storage_table(scaling: Scaling) -> str:
    """Fitted exponents of memory beside the paper's, and the largest allocation beside a d x d matrix."""
    rows = []
    for structure, terms in PAPER.items():
        state, largest = scaling.state_bytes[structure], scaling.largest_bytes[structure]
        paper = terms["storage"]
        share = largest[-1] / (4 * scaling.dims[-1] ** 2)
        fits = (f"{exponent(scaling.dims, points):.2f}" for points in (state, largest))
        expected = f"{expected_exponent(scaling.dims, paper):.0f} ({paper.text})"
        rows.append((structure, expected, *fits, f"{share:.3f}"))
    largest_d = f"largest allocation at d = {scaling.dims[-1]}, in d x d matrices"
    return markdown_table(("structure", "paper", "state", "largest allocation", largest_d), rows) + "\n"


def paths_table(found: Sequence[PathResult]) -> str:
    """How many times as fast each fast path is as what it replaces."""
    rows = [
        (f"{r.name}, not {r.replaces}", r.shape, _spread(spread(r.speedups)), f"{r.error:.0e}") for r in found
    ]
    return markdown_table(("fast path", "shapes", "times as fast", "difference"), rows) + "\n"
