"""Every Python block of the README, of CONTRIBUTING and of the docs runs, top to bottom, page by page."""

import re
from pathlib import Path

import pytest

from ingot.structures import bind, parse

ROOT = Path(__file__).parents[1]
PAGES = [
    p for p in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]) if "```python" in p.read_text("utf-8")
]


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL):
        exec(compile(block, str(page), "exec"), namespace)


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
