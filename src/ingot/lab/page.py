"""The report as one page of HTML that needs no network, and its figures as files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from matplotlib.figure import Figure
from plotly.io import to_html
from plotly.offline import get_plotlyjs

from ingot.lab import plot, summary
from ingot.lab.comparing import folder_name
from ingot.lab.plot import Curves, colour, is_baseline, keys_of, plain_ticks, split_key
from ingot.lab.records import Run
from ingot.lab.summary import Group, by_task
from ingot.lab.tables import markdown_table
from ingot.lab.tuning import complete, importances, is_finished

STYLE = """
:root { color-scheme: light dark;
  --ink: #1d2430; --paper: #ffffff; --faint: #667085; --line: #d9dee7; --band: #f5f7fa }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ef; --paper: #12161d; --faint: #98a2b3; --line: #2c3440; --band: #1a202a }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1240px; padding: 1.5rem 1rem 4rem;
  background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 0 .3rem }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem }
h3 { font-size: 1rem }
p.note { color: var(--faint); margin: .2rem 0 .8rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; width: 100% }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child { text-align: left }
tbody tr:hover { background: var(--band) }
th { color: var(--faint); font-weight: 600 }
details { margin: 1rem 0 } summary { cursor: pointer; color: var(--faint) }
.figure { min-width: 0 }
@media (min-width: 900px) { .pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem } }
"""

# Plotly's colours follow the page's, now and when the reader's system changes between light and dark.
SCRIPT = """
const dark = window.matchMedia('(prefers-color-scheme: dark)');
function paint() {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue('--ink').trim(), line = style.getPropertyValue('--line').trim();
  for (const figure of document.querySelectorAll('.js-plotly-plot')) {
    const change = {'font.color': ink, 'paper_bgcolor': 'rgba(0,0,0,0)', 'plot_bgcolor': 'rgba(0,0,0,0)'};
    for (const key of Object.keys(figure.layout).filter(key => /^[xy]axis/.test(key))) {
      for (const part of ['gridcolor', 'linecolor', 'zerolinecolor']) change[key + '.' + part] = line;
    }
    Plotly.relayout(figure, change);
  }
}
dark.addEventListener('change', paint);
window.addEventListener('load', paint);
"""


def write_report(runs: Sequence[Run], out: Path, studies: Mapping[str, Any] | None = None) -> Path:
    """Write the page, the figures and the tables into a folder; returns the page's path."""
    tasks, studies = by_task(runs), studies or {}
    if not tasks and not studies:
        raise ValueError("no run has been evaluated yet: there is nothing to report")
    out.mkdir(parents=True, exist_ok=True)
    sections = []
    for task, groups in tasks.items():
        sections.append("".join(_section(task, groups)))
        stem = folder_name(task) if len(tasks) > 1 else ""
        for name, figure in _figures(task, groups):
            plot.save(figure, out / "_".join(filter(None, (stem, name))))
    for name, study in studies.items():
        found = importances(study)
        sections.append("".join(_study(name, study, found)))
        if found:
            plot.save(plot.plot_importances(found, name), out / f"importances_{folder_name(name)}")
    if tasks:
        markdown = "\n\n".join(_markdown(task, groups) for task, groups in tasks.items())
        (out / "report.md").write_text(markdown + "\n", encoding="utf-8")
    page = out / "report.html"
    heading = "Optimizers compared" if tasks else "Settings searched"
    page.write_text(_page(heading, [*tasks, *studies], sections), encoding="utf-8")
    return page


def _figures(task: str, groups: Sequence[Group]) -> Iterator[tuple[str, Figure]]:
    """The figures of a task as files, by name."""
    for name, y_title in _judged(groups).items():
        yield name.removeprefix("test_"), plot.plot_curves(groups, name, y_title, task)
    yield "memory", plot.plot_memory(groups, task)
    for group in groups:
        if group.runs[0].diagnostics:
            yield f"layers_{folder_name(group.label)}", plot.plot_layers(group, task)


def _judged(groups: Sequence[Group]) -> dict[str, str]:
    """What is drawn against epochs and time: the error, and the loss where that is another thing."""
    error = groups[0].runs[0].error_name
    return {"error": error, **({"test_loss": "test loss"} if error != "test loss" else {})}


def _page(heading: str, titles: Sequence[str], sections: Sequence[str]) -> str:
    title = titles[0] if len(titles) == 1 else f"{len(titles)} experiments"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}: {heading.lower()}</title>\n<style>{STYLE}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n"
        f"<h1>{heading}</h1>\n{''.join(sections)}\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _section(task: str, groups: Sequence[Group]) -> Iterator[str]:
    seeds = max(len(group.runs) for group in groups)
    settings = groups[0].runs[0].settings
    yield f"<section>\n<h2>{escape(task)}</h2>\n"
    yield (
        f'<p class="note">{seeds} seed{"s" if seeds > 1 else ""}, {settings["epochs"]} epochs of '
        f"{settings['steps'] // settings['epochs']} steps, batches of {settings['batch size']}, "
        f"{settings['parameters']:,} parameters, {settings['precision']} on {settings['device']}</p>\n"
    )
    yield table(summary.columns(groups), summary.rows(groups))
    yield (
        '<p class="note">Means over seeds ± standard deviation. Error and loss are those at the end, "best" '
        "is the lowest error on the way. Seconds are those of the training steps.</p>\n"
    )
    yield '<div class="pair">\n'
    for name, heading in _judged(groups).items():
        for against, x_title in (("epochs", "epochs"), ("seconds", "seconds of training")):
            yield _figure(curves(groups, name, against, heading, x_title))
    yield "</div>\n"
    yield _figure(memory_bars(groups), 140 + 46 * len(groups))
    for group in groups:
        if group.runs[0].diagnostics:
            yield f"<details><summary>Layers of {escape(group.label)}</summary>\n"
            yield _figure(layer_curves(group))
            yield "</details>\n"
    yield "<details><summary>Settings</summary>\n"
    yield table(
        ("setting", "value"), [(k, str(v)) for k, v in settings.items() if not k.startswith("optimizer")]
    )
    yield "</details>\n</section>\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of HTML."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>\n'


# --- Figures ----------------------------------------------------------------------------------------------


def curves(groups: Sequence[Group], name: str, against: str, y_title: str, x_title: str) -> go.Figure:
    """A number against epochs or seconds, in bands from the lowest to the highest seed."""
    figure = go.Figure()
    for index, group in enumerate(groups):
        found = Curves(group, name)
        x, mean = getattr(found, against).tolist(), found.mean.tolist()
        low, high = found.values.min(axis=0).tolist(), found.values.max(axis=0).tolist()
        shared = {"legendgroup": group.label}
        figure.add_scatter(
            x=[*x, *x[::-1]],
            y=[*high, *low[::-1]],
            mode="lines",
            fill="toself",
            fillcolor=_faint(colour(index)),
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            **shared,
        )
        dash = "dash" if is_baseline(group.label) else "solid"
        figure.add_scatter(
            x=x,
            y=mean,
            name=group.label,
            mode="lines+markers",
            marker={"size": 4},
            line={"color": colour(index), "width": 2, "dash": dash},
            **shared,
        )
    seen = [v for group in groups for run in group.runs for v in run.column(name) if isfinite(v)]
    positive = all(value > 0 for value in seen)
    figure.update_layout(title=f"{y_title} against {x_title}", xaxis_title=x_title, yaxis_title=y_title)
    if positive and seen:
        ticks = plain_ticks(min(seen), max(seen))
        figure.update_yaxes(type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    return figure


def memory_bars(groups: Sequence[Group]) -> go.Figure:
    """What optimizers keep, and the most that training takes."""
    figure = go.Figure()
    labels = [group.label for group in groups]
    for name, title, shade in (
        ("state_bytes", "state", "#0072B2"),
        ("peak_bytes", "peak of a step", "#E69F00"),
    ):
        values = [group.mean_bytes(name) / 2**20 for group in groups]
        if any(values):
            figure.add_bar(
                y=labels,
                x=values,
                name=title,
                orientation="h",
                marker_color=shade,
                text=[f"{value:.3g}" for value in values],
                textposition="outside",
                cliponaxis=False,
            )
    figure.update_layout(title="Memory", xaxis_title="MiB", barmode="group")
    figure.update_yaxes(autorange="reversed")
    return figure


def layer_curves(group: Group) -> go.Figure:
    """The diagnostics of each layer while the first seed was trained; a menu chooses which."""
    lines = group.runs[0].diagnostics
    names = keys_of(lines)
    kinds = sorted({split_key(key)[1] for key in names})
    figure = go.Figure()
    shown: list[str] = []
    for key in names:
        layer, kind = split_key(key)
        figure.add_scatter(
            x=[line["step"] for line in lines],
            y=[line.get(key) for line in lines],
            name=layer or kind,
            mode="lines",
            visible=kind == kinds[0],
        )
        shown.append(kind)
    buttons = [
        {"label": kind, "method": "update", "args": [{"visible": [one == kind for one in shown]}]}
        for kind in kinds
    ]
    figure.update_layout(
        title="Diagnostics of the layers",
        xaxis_title="steps",
        updatemenus=[{"buttons": buttons, "x": 1, "y": 1.15}],
    )
    return figure


def _study(name: str, study: Any, found: Mapping[str, float]) -> Iterator[str]:
    trials = complete(study)
    finished = sum(map(is_finished, study.get_trials()))
    yield f"<section>\n<h2>Search: {escape(name)}</h2>\n"
    yield f'<p class="note">{finished} trials, {finished - len(trials)} of them given up or diverged</p>\n'
    if found:
        figure = go.Figure(
            go.Bar(y=list(found), x=list(found.values()), orientation="h", marker_color="#009E73")
        )
        figure.update_layout(title="What the settings matter", xaxis_title="share of the differences")
        figure.update_yaxes(autorange="reversed")
        yield _figure(figure, 180 + 30 * len(found))
    best = trials[:10]
    if best:
        keys = list(best[0].params)
        cells = [
            (str(t.number), f"{t.value:.4f}", *(f"{t.params.get(k, float('nan')):.3g}" for k in keys))
            for t in best
        ]
        yield table(("trial", "validation loss", *keys), cells)
        yield '<p class="note">The best trials.</p>\n'
    yield "</section>\n"


def _figure(figure: go.Figure, height: int = 440) -> str:
    figure.update_layout(
        margin={"l": 20, "r": 20, "t": 50, "b": 20},
        legend={"orientation": "h", "y": -0.2, "yanchor": "top"},
        template="none",
        title={"x": 0.01, "xanchor": "left", "font": {"size": 15}},
        height=height,
        font={"family": "system-ui, sans-serif"},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#98a2b3", "activecolor": "#667085"},
    )
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    settings = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["lasso2d", "select2d"]}
    html: str = to_html(figure, include_plotlyjs=False, full_html=False, config=settings)
    return f'<div class="figure">{html}</div>\n'


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.13)"


def _markdown(task: str, groups: Sequence[Group]) -> str:
    return f"## {task}\n\n{markdown_table(summary.columns(groups), summary.rows(groups))}"
