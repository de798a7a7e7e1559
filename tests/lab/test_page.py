"""The report: what is on it, and how it works in a browser without a network."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from ingot.lab.page import write_report
from ingot.lab.plot import plot_layers, plot_memory
from ingot.lab.records import Record, Run
from ingot.lab.summary import by_task, columns, rows

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def run(
    label: str, seed: int, start: float = 50.0, task: str = "A task", state: str = "done", **settings
) -> Run:
    chosen = {"learning rate": 0.01, "epochs": 3, "steps": 30, "batch size": 8, "parameters": 100}
    chosen |= {"precision": "fp32", "device": "cpu"} | settings
    made = Run(
        task, label, seed, chosen, state=state, state_bytes=1 << 20, peak_bytes=1 << 22, started=len(label)
    )
    for epoch in range(4):
        error = (start + seed) / 2**epoch
        made.records.append(
            Record(10 * epoch, epoch, 0.5 * epoch, 0.01, error / 40, error / 50, error, 1 << 28)
        )
    if label.startswith("SINGD"):
        made.diagnostics = [
            {"step": 10 * epoch, "0/gain": 1.0 * epoch, "1/gain": 2.0, "0/size": 3.0} for epoch in range(1, 4)
        ]
    return made


def all_runs() -> list[Run]:
    """Three optimizers from two seeds, one of which diverged with one."""
    labels = {"SGD": 60.0, "AdamW": 50.0, "SINGD <diagonal>": 40.0}
    made = [run(label, seed, start) for label, start in labels.items() for seed in (0, 1)]
    made[1].state = "diverged"
    made[1].records = made[1].records[:2]
    made[1].records[-1].test_loss = made[1].records[-1].error = float("nan")
    return made


def test_the_table_has_the_numbers():
    (groups,) = by_task(all_runs()).values()
    head, table = columns(groups), {row[0]: row for row in rows(groups)}
    cells = dict(zip(head, table["SINGD <diagonal>"], strict=True))
    assert cells["test error (%)"] == "5.06 ± 0.09"  # of 5 and 5.125
    assert cells["best"] == "5.06 ± 0.09"
    assert cells["test loss"] == "0.101 ± 0.002"
    assert cells["state / AdamW's"] == cells["peak / AdamW's"] == "1.00"
    assert cells["diverged"] == "–"
    lost = dict(zip(head, table["SGD"], strict=True))
    assert lost["diverged"] == "1 of 2"
    assert lost["test error (%)"] == "7.50"


def test_the_best_error_may_have_been_on_the_way():
    risen, fallen = run("AdamW", 0), run("AdamW", 1)
    risen.records[1].error = 2.0
    (groups,) = by_task([risen, fallen]).values()
    cells = dict(zip(columns(groups), rows(groups)[0], strict=True))
    assert cells["best"] == "4.19 ± 3.09"  # of 2 and 6.375
    assert cells["test error (%)"] == "6.31 ± 0.09"


def test_a_run_that_diverged_counts_for_no_mean_even_if_it_came_back():
    wild = run("AdamW", 1, start=1000.0, state="diverged")
    (groups,) = by_task([run("AdamW", 0), wild]).values()
    cells = dict(zip(columns(groups), rows(groups)[0], strict=True))
    assert cells["test error (%)"] == "6.25"
    assert cells["diverged"] == "1 of 2"


def test_without_baselines_numbers_have_units():
    (groups,) = by_task([run("SINGD", 0)]).values()
    assert "state" in columns(groups)
    assert "1.0 MiB" in rows(groups)[0]


def test_files(tmp_path):
    page = write_report(all_runs(), tmp_path / "new")
    assert page == tmp_path / "new" / "report.html"
    found = {path.name for path in page.parent.iterdir()}
    assert found == {
        "report.html",
        "report.md",
        *(f"{n}.{k}" for n in ("error", "loss", "memory", "layers_SINGD_diagonal") for k in ("png", "svg")),
    }
    text = page.read_text(encoding="utf-8")
    assert not re.findall(
        r"""(?:src|href)=["'](?!data:|#)""", re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    )
    assert "SINGD &lt;diagonal&gt;" in text
    assert "| SINGD <diagonal> |" in (page.parent / "report.md").read_text(encoding="utf-8")


def test_layers_have_a_panel_for_each_kind():
    (groups,) = by_task(all_runs()).values()
    panels = [axes for axes in plot_layers(groups[-1], "A task").axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == ["gain", "size"]
    assert [line.get_label() for line in panels[0].lines] == ["0", "1"]
    assert panels[0].lines[0].get_ydata().tolist() == [1.0, 2.0, 3.0]


def test_bars_are_in_the_order_of_the_table():
    (groups,) = by_task(all_runs()).values()
    for axes in plot_memory(groups, "A task").axes:
        bottom, top = axes.get_ylim()
        assert bottom > top  # the first is the uppermost


def test_tasks_have_sections_and_figures_of_their_own(tmp_path):
    page = write_report([*all_runs(), run("AdamW", 0, task="Another, one")], tmp_path)
    assert page.read_text(encoding="utf-8").count("<h2>") == 2
    assert (tmp_path / "Another_one_error.png").is_file()
    assert (tmp_path / "A_task_memory.svg").is_file()


def test_nothing_to_report(tmp_path):
    empty = run("AdamW", 0)
    empty.records = []
    with pytest.raises(ValueError, match="nothing to report"):
        write_report([empty], tmp_path)


# Looks at the page from inside, after a click on an entry of a legend, and leaves what it saw in the page.
PROBE = """
<script>
const errors = [];
window.addEventListener('error', event => errors.push(event.message));
console.error = (...words) => errors.push(words.join(' '));
function click(element) {
  const where = element.getBoundingClientRect();
  for (const kind of ['mousedown', 'mouseup', 'click'])
    element.dispatchEvent(new MouseEvent(kind,
      {bubbles: true, clientX: where.x + 5, clientY: where.y + 5, view: window}));
}
window.addEventListener('load', () => setTimeout(() => {
  const figures = [...document.querySelectorAll('.js-plotly-plot')];
  const lines = figures.map(figure => figure.querySelectorAll('.scatterlayer path.js-line').length);
  const bars = figures.map(figure => figure.querySelectorAll('.bars path').length);
  click(figures[0].querySelector('.legendtoggle'));
  setTimeout(() => {
    const style = getComputedStyle(document.body);
    const seen = {
      errors, lines, bars,
      hidden: figures[0].data.filter(trace => trace.visible === 'legendonly')
        .map(trace => trace.name || 'band'),
      cells: [...document.querySelectorAll('tbody tr:first-child td')].map(cell => cell.textContent),
      wider: document.documentElement.scrollWidth - document.documentElement.clientWidth,
      paper: style.backgroundColor, ink: figures[0].layout.font.color, title: document.title,
    };
    const out = document.createElement('pre');
    out.id = 'seen';
    out.textContent = JSON.stringify(seen);
    document.body.append(out);
  }, 900);
}, 300));
</script>
"""


def looked_at(page: Path, width: int = 1280, dark: bool = False) -> dict:
    """What the page is in a browser."""
    probed = page.with_name("probed.html")
    probed.write_text(page.read_text(encoding="utf-8").replace("<head>", "<head>" + PROBE), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},1600"]
    options += ["--virtual-time-budget=8000", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    command = [CHROMIUM, *options, "--dump-dom", probed.as_uri()]
    text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    return json.loads(unescape(re.search(r'<pre id="seen">(.*?)</pre>', text, re.S).group(1)))


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_in_a_browser(tmp_path, dark):
    page = write_report(all_runs(), tmp_path)
    seen = looked_at(page, dark=dark)
    assert seen["errors"] == []
    assert seen["lines"][:4] == [6, 6, 6, 6]  # a mean and a band of each optimizer
    assert max(seen["bars"]) == 6  # state and peak
    assert sorted(seen["hidden"]) == ["SGD", "band"]
    assert seen["cells"][0] == "SGD"
    assert "7.50" in seen["cells"]
    assert seen["paper"] == ("rgb(18, 22, 29)" if dark else "rgb(255, 255, 255)")
    assert seen["ink"] == ("#e4e8ef" if dark else "#1d2430")
    assert seen["wider"] <= 0


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_on_a_narrow_screen_nothing_sticks_out(tmp_path):
    assert looked_at(write_report(all_runs(), tmp_path), width=500)["wider"] <= 0
