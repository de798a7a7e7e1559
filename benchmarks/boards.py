"""Tables of what `ingot evaluate` found, for README and docs."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from itertools import chain
from math import hypot, inf, isfinite

from benchmarks.headline import MAIN, NAMES, TITLES, relative, tasks_in_order
from benchmarks.stored import Boards
from ingot.lab.scoreboard import REFERENCE, Standing, Verdict, geometric_mean, verdict
from ingot.lab.suite import SUITE
from ingot.lab.tables import markdown_table

Board = Mapping[str, Mapping[str, Standing]]
CONTROL = "control"


def loss(one: Standing | None, digits: int = 3) -> str:
    """A loss with its standard error."""
    if one is None:
        return "–"
    if not isfinite(one.loss):
        return "diverged"
    return f"{one.loss:.{digits}f}" + (f" ± {one.loss_error:.{digits}f}" if isfinite(one.loss_error) else "")


def losses_and_errors(board: Board, without: Container[str] = ()) -> str:
    """Optimizers on all tasks: losses with standard errors, and how many classes are wrong."""
    labels = [label for label in dict.fromkeys(chain(*board.values())) if label not in without]
    rows = []
    for task, of in board.items():
        cells = [loss(of.get(label), _digits([of])) + _error(of.get(label)) for label in labels]
        rows.append((f"`{task}`", *cells))
    return markdown_table(("task", *labels), rows)


def shares(board: Board, chosen_on: bool) -> dict[str, dict[str, float]]:
    """Losses in units of the reference's: of each other optimizer on the tasks for choosing, or the others.

    One that did not train all of them is left out.
    """
    tasks = [task for task in board if SUITE[task].chosen_on == chosen_on]
    labels = [label for label in dict.fromkeys(chain(*board.values())) if label != REFERENCE]
    return {
        label: {task: board[task][label].loss / board[task][REFERENCE].loss for task in tasks}
        for label in labels
        if all(label in board[task] for task in tasks)
    }


def ablation(board: Board, chosen_on: bool) -> str:
    """What each setting is worth: losses relative to the reference's, the default in bold."""
    found = shares(board, chosen_on)
    rows = []
    for label, of in found.items():
        cells = [f"{share:.2f}" if isfinite(share) else "diverged" for share in of.values()]
        mean = geometric_mean([*of.values()])
        rows.append((_setting(label), *cells, f"{mean:.3f}" if isfinite(mean) else "diverged"))
    tasks = next(iter(found.values()))
    return markdown_table(("", *(f"`{task}`" for task in tasks), "geometric mean"), rows)


def _setting(label: str) -> str:
    """What differs from the default, which is in bold."""
    if label == MAIN:
        return f"**{MAIN}**"
    return f"`{label.removeprefix(MAIN).strip()}`" if label.startswith(MAIN) else label


def validated(board: Board, tolerance: float = 0.005) -> str:
    """Which of the choices hold on tasks that had no say in them, in a sentence."""
    means = {label: geometric_mean([*of.values()]) for label, of in shares(board, chosen_on=False).items()}
    others = [label for label in means if label != MAIN]
    worse = [label for label in others if means[label] >= (1 - tolerance) * means[MAIN]]
    better = [_setting(label) for label in others if label not in worse]
    text = f"On these, {len(worse)} of {len(others)} choices hold: "
    text += f"what they were made against is not better by more than {tolerance:.1%}"
    return f"{text}." if not better else f"{text}. Better are {', '.join(better)}."


def _digits(phases: Iterable[Mapping[str, Standing]]) -> int:
    """Decimals that tell the optimizers of a task apart, and leave something of their standard errors."""
    found = [one for of in phases for one in of.values() if isfinite(one.loss)]
    digits = 4 if any(one.loss < 0.1 for one in found) else 3
    return digits + any(0 < one.loss_error < 0.5 * 10**-digits for one in found)


def _error(one: Standing | None) -> str:
    # A regression's error is its loss.
    return "" if one is None or one.error == one.loss or not isfinite(one.error) else f" ({one.error:.1f} %)"


def results(boards: Boards) -> str:
    """The README's table: the library's default optimizer beside the reference, phase by phase."""
    shown = {phase: board for phase, board in boards.items() if phase in TITLES and tasks_in_order(board)}
    tasks = list(dict.fromkeys(task for board in shown.values() for task in tasks_in_order(board)))
    columns, rows = ["test loss"], [[NAMES.get(task, task)] for task in tasks]
    last, means = ["ahead of AdamW"], ["geometric mean"]
    for phase, board in shown.items():
        named = "" if phase == "defaults" else f", {phase}"
        columns += [f"{REFERENCE}{named}", f"{MAIN}{named}"]
        for task, row in zip(tasks, rows, strict=True):
            digits = _digits(other.get(task, {}) for other in shown.values())
            row += _pair(board.get(task, {}), digits)
        found = verdict(board, MAIN, REFERENCE)
        last += ["", f"{len(found.ahead)} of {len(found.tasks)}"]
        means += ["1", f"{found.loss_ratio:.2f}" if found.loss_ratio < inf else "diverged"]
    return markdown_table(columns, [*rows, means, last])


def _pair(of: Mapping[str, Standing], digits: int) -> list[str]:
    """The reference and the other, with the lower one in bold."""
    if not {MAIN, REFERENCE} <= of.keys():
        return ["–", "–"]
    cells = [loss(of[label], digits) for label in (REFERENCE, MAIN)]
    ahead = int(of[MAIN].loss < of[REFERENCE].loss)
    cells[ahead] = f"**{cells[ahead]}**"
    return cells


def summary(boards: Boards) -> str:
    """What the default settings come to, in a sentence."""
    found = verdict(boards["defaults"], MAIN, REFERENCE)
    text = (
        f"With default settings {MAIN} is ahead of {REFERENCE} in test loss on {_of_all(found.ahead, found)} "
        f"tasks. {_way(found)} (geometric means)."
    )
    if "tuned" in boards:
        tuned = verdict(boards["tuned"], MAIN, REFERENCE)
        names = {task: NAMES.get(task, task) for task in tuned.tasks}
        text += f" With both tuned it is ahead on {_of_all(tuned.ahead, tuned)}{_not_ahead(tuned, names)}."
    return text


def beside_reference(board: Board) -> str:
    """How the default optimizer stands beside the reference and the control, in sentences."""
    found = verdict(board, MAIN, REFERENCE)
    text = f"{MAIN} is ahead of {REFERENCE} in loss on {_of_all(found.ahead, found)} tasks and in error on "
    text += str(len(found.ahead_in_error))
    if any(CONTROL in of for of in board.values()):
        control = verdict(board, MAIN, CONTROL)
        behind = [f"`{task}`" for task in control.tasks if task not in control.ahead]
        text += f", and ahead of the control on all{' but ' if behind else ''}{', '.join(behind)}"
    text += (
        f". {_way(found)} (geometric means; a step takes {found.step_seconds:.2f} of {REFERENCE}'s time). "
    )
    text += f"{found.diverged or 'None'} of its runs diverged."
    task, share, errors = _smallest_lead(board)
    lead = f"{1 - share:.1%}, {errors:.1f} standard errors of the difference"
    return f"{text} Its lead is smallest on `{task}`: {lead}."


def in_time(board: Board) -> str:
    """How it stands with as many steps as the reference's time has room for, in a sentence."""
    found = verdict(board, MAIN, REFERENCE)
    names = {task: f"`{task}`" for task in found.tasks}
    text = f"{MAIN} is ahead in loss on {_of_all(found.ahead, found)} and in error on "
    return f"{text}{len(found.ahead_in_error)}{_not_ahead(found, names)}."


def beside_others(board: Board, others: Iterable[str]) -> str:
    """On how many tasks it is ahead of each of some others, and where these are, in a sentence."""
    parts = []
    for other in others:
        found = verdict(board, MAIN, other)
        rest = [f"`{task}`" for task in found.tasks if task not in found.ahead]
        where = f", which is ahead on {', '.join(rest)}" if rest else ""
        parts.append(f"of {other} on {_of_all(found.ahead, found)}{where}")
    return f"{MAIN} is ahead {'; '.join(parts)}."


def _of_all(tasks: Collection[str], found: Verdict) -> str:
    return f"{len(tasks)} of {len(found.tasks)}"


def _way(found: Verdict) -> str:
    """How far it is to the reference's best loss."""
    if found.steps == inf:
        return f"It does not come to {REFERENCE}'s best loss everywhere"
    shares = f"{found.steps:.2f} of the steps and {found.seconds:.2f} of the time"
    return f"To {REFERENCE}'s best loss it takes {shares}"


def _not_ahead(found: Verdict, names: Mapping[str, str]) -> str:
    """On which tasks it is level with the reference, and on which behind."""
    level = [names[task] for task in found.level if task not in found.ahead]
    behind = [names[task] for task in found.tasks if task not in found.level]
    parts = ((f"within a standard error of {REFERENCE}", level), ("behind", behind))
    return "".join(f", {words} on {len(tasks)} ({'; '.join(tasks)})" for words, tasks in parts if tasks)


def _smallest_lead(board: Board) -> tuple[str, float, float]:
    """The task where it is, the share of the reference's loss, and the lead in standard errors of it."""
    shares = {task: relative(of, MAIN)[0] for task, of in board.items() if {MAIN, REFERENCE} <= of.keys()}
    task = max(shares, key=lambda task: shares[task])
    this, other = board[task][MAIN], board[task][REFERENCE]
    return task, shares[task], (other.loss - this.loss) / hypot(this.loss_error, other.loss_error)
