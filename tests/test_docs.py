"""What README, CONTRIBUTING and docs say is so: blocks run, commands exist, messages and numbers are real."""

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

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


@pytest.mark.parametrize("page", ["README.md", "docs/laboratory.md"])
def test_the_shown_task_of_ones_own_can_be_compared(page):
    from ingot.lab.optimizers import choose
    from ingot.lab.task import from_function
    from ingot.lab.training import Loop, Trainer

    (block,) = re.findall(r"```python\n(# my\w+\.py\n.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(block, namespace)
    task = from_function("make_task", namespace["make_task"])
    assert Trainer(task, choose("SINGD"), 0, Loop(epochs=1)).train().state == "done"


def test_eight_lines_are_eight():
    section = (ROOT / "README.md").read_text("utf-8").split("## Eight lines\n")[1]
    (block,) = re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.DOTALL)
    assert len([line for line in block.splitlines() if line]) == 8


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


# --- Every block is run, or comes from a file that is -----------------------------------------------------


def test_every_block_is_of_a_kind_that_is_checked():
    for page in MARKDOWN:
        text = page.read_text("utf-8")
        fences = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        assert len(fences) == text.count("```") // 2
        for kind, block in fences:
            where = (page.name, block[:80])
            assert kind in ("python", "text", "console", " { .python }"), where
            if kind == " { .python }":  # which test_code_blocks does not run
                assert re.fullmatch(r'--8<-- "examples/\w+\.py"\n', block), where
        outputs = re.findall(r"```python\n[^`]*?```\n\n```text\n", text)
        assert len(outputs) == sum(kind == "text" for kind, _ in fences), page.name


# --- Commands ---------------------------------------------------------------------------------------------


def _commands() -> Iterator[tuple[str, str]]:
    """All commands in blocks and in the running text, each with its page."""
    for page in MARKDOWN:
        text = page.read_text("utf-8")
        for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
            for line in block.splitlines():
                yield page.name, line.removeprefix("$ ")
        for command in re.findall(
            r"`((?:ingot|make) [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        ):
            yield page.name, " ".join(command.split())


def test_commands_exist_with_their_options():
    from ingot.lab.commands import app

    group: Any = get_command(app)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    checked = 0
    for page, command in _commands():
        program, *arguments = shlex.split(command, comments=True)
        if program == "make":
            assert set(arguments) <= set(targets), (page, command)
        elif program == "ingot":
            with group.context_class(group) as context:
                found = group.get_command(context, arguments[0])
                assert found is not None, (page, command)
                if len(arguments) > 1:
                    found.make_context(arguments[0], arguments[1:], parent=context)
        elif program not in ("pip", "source"):
            pytest.fail(f"{command!r} on {page} is not checked")
        checked += 1
    assert checked > 40


def test_commands_name_recipes_and_optimizers_that_exist():
    from ingot.lab.optimizers import choose
    from ingot.lab.recipes import RECIPES

    checked = 0
    for _, command in _commands():
        program, *arguments = shlex.split(command, comments=True)
        if program == "ingot" and arguments[0] in ("compare", "tune", "bench") and len(arguments) > 1:
            recipe, *rest = arguments[1:]
            assert recipe in RECIPES or ":" in recipe, command
            options = [i for i, word in enumerate(rest) if word.startswith("-")]
            for text in rest[: options[0] if options else None]:
                choose(text)
                checked += 1
    assert checked > 20


# --- Messages and numbers ---------------------------------------------------------------------------------


def _literals() -> Iterator[str]:
    """All text in the library's code."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.mark.parametrize("name", ["troubleshooting.md", "checkpoints.md"])
def test_messages_are_those_of_the_library(name):
    literals = list(_literals())
    quoted = re.findall(r"“([^”]+)”", (ROOT / "docs" / name).read_text("utf-8"))
    assert len(quoted) > 6
    for message in quoted:
        assert any(message in text for text in literals), message


def test_what_was_measured_is_what_other_pages_have():
    """Reproduce the paper quotes results of other pages, which commands write anew."""
    pages = ("laboratory", "precision", "benchmarks")
    sources = "".join((ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in pages)
    text = (ROOT / "docs" / "reproduce.md").read_text("utf-8")
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    checked = 0
    for table in tables:
        if "paper, VGG" in table:  # the paper's own
            continue
        for row in table.splitlines()[2:]:
            for value in re.findall(r"\d+\.\d+(?: ± \d+\.\d+)?", row):
                assert value in sources, row
                checked += 1
    assert checked > 40
