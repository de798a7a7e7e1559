"""Every Python block of the README, of CONTRIBUTING and of the docs runs, top to bottom, page by page."""

import inspect
import re
from pathlib import Path

import pytest

import ingot
from ingot.structures import bind, parse
from tests.frameworks import IGNORED_WARNINGS, start_afresh

ROOT = Path(__file__).parents[1]
MARKDOWN = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FRAMEWORKS = ROOT / "docs" / "frameworks.md"
PAGES = [
    pytest.param(
        page, marks=IGNORED_WARNINGS if page == FRAMEWORKS else [], id=page.relative_to(ROOT).as_posix()
    )
    for page in MARKDOWN
    if "```python" in page.read_text("utf-8")
]


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_run_and_print_what_is_shown(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if page == FRAMEWORKS:
        start_afresh()
    namespace: dict[str, object] = {"__name__": "page"}
    blocks = re.findall(
        r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", page.read_text("utf-8"), flags=re.DOTALL
    )
    for block, shown in blocks:
        exec(compile(block, str(page), "exec"), namespace)
        printed = capsys.readouterr().out
        assert not shown or printed == shown


def test_the_table_of_structures_counts_right():
    """The README's formulas, against the structures themselves."""
    rows = re.findall(r"^\| `(.+)` \| .+ \| (.+) \|$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    checked = 0
    for names, formula in rows:
        if not re.fullmatch(r"[dk12()+−/² ]+", formula):
            continue
        formula = formula.replace("−", "-").replace("d²", "d*d").replace("k1 k2", "k1*k2")
        formula = re.sub(r"(\)|k|d) (?=d|\()", r"\1*", formula)
        for name in names.split("`, `"):
            text = name.replace("k1,k2", "3,2").replace("(k)", "(3)")
            expected = eval(formula, {"d": 12, "k": 3, "k1": 3, "k2": 2})
            assert bind(parse(text), 12).numel == expected, (name, formula)
            checked += 1
    assert checked >= 12


def test_the_documented_defaults_are_the_real_ones():
    defaults = {name: p.default for name, p in inspect.signature(ingot.SINGD).parameters.items()}
    page = (ROOT / "docs" / "settings.md").read_text("utf-8")
    of_update, of_additions = page.split("## What is added")
    shown = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]+) \|", of_update, re.MULTILINE))
    added = re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \| `?([^|`]+)`? \|", of_additions, re.MULTILINE)
    assert set(shown) | {name for name, *_ in added} == set(defaults) - {"model", "params", "adamw"}
    shown |= {name: default for name, default, _ in added}
    for name, default in shown.items():
        if name not in ("structure", "factor_dtype"):  # told in words
            assert eval(default.strip("`")) == defaults[name], name
    assert {name: eval(paper) for name, _, paper in added} == dict(ingot.PAPER)
