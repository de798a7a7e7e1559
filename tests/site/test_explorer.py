"""The page of structures knows what the library knows: the same texts, matrices, entries and operations."""

import json
import re
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ingot
from ingot.structures import Structure, bind, parse, registered
from tests.browser import look, needs_browser

FOLDER = Path(__file__).parents[2] / "docs" / "explorer"

TEXTS = [
    *("dense", "diagonal", "tril", "triu", "tril_toeplitz", "triu_toeplitz"),
    *("block_diagonal(4)", "block_diagonal(5)", "block_diagonal"),
    *("rank_triu(2)", "rank_tril(2)", "rank_triu_mirrored(3)", "rank_tril_mirrored", "rank_tril(99)"),
    *("hierarchical(3,2)", "hierarchical", "hierarchical(9,9)"),
    *("upper(dense(2),tril_toeplitz)", "upper(diagonal,dense(2))", "upper(tril(3),lower(diagonal,dense(2)))"),
    *("lower(block_diagonal(4,8),diagonal)", "lower(diagonal,dense(3))", "lower(triu_toeplitz(4), triu)"),
    *("upper(dense(2),lower(triu,dense(3)))", "upper(upper(diagonal(2),tril(3)),block_diagonal(2))"),
]
DIMS = (1, 2, 7, 12)
LAYERS = [
    {"inputs": 24, "outputs": 40, "rows": 64, "every": 20},
    {"inputs": 1000, "outputs": 300, "rows": 8, "every": 7},
    {"inputs": 48, "outputs": 48, "rows": 4096, "every": 1},
]


@pytest.fixture
def page(tmp_path) -> Path:
    """The scripts on a page with nothing else."""
    names = ("structures.js", "explorer.js")
    scripts = "".join(f'<script src="{(FOLDER / name).as_uri()}"></script>' for name in names)
    style = f'<link rel="stylesheet" href="{(FOLDER / "explorer.css").as_uri()}">'
    path = tmp_path / "page.html"
    body = f'<body class="md-typeset"><div id="structure-explorer"></div>{scripts}</body>'
    path.write_text(f'<!doctype html><head><meta charset="utf-8">{style}</head>{body}', "utf-8")
    return path


def _basis(structure: Structure) -> Tensor:
    """The matrix of each entry, ``[numel, dim * dim]``."""
    return structure.dense(torch.eye(structure.numel, dtype=torch.float64)).flatten(1)


def _pattern(matrix: Tensor) -> Tensor:
    return matrix.abs() > 1e-9 * matrix.abs().max()


@needs_browser
def test_matrices_are_those_of_the_library(page):
    asked = list(product(TEXTS, DIMS))
    found = look(
        page,
        f"""return {json.dumps(asked)}.map(([text, dim]) => {{
            const s = Structures.bind(text, dim), m = Structures.matrices(s, 3);
            return [s.text, s.numel, ...[m.k, m.square, m.inverse].map(a => [...a])];
        }});""",
    )
    for (text, dim), (said, numel, *matrices) in zip(asked, found, strict=True):
        structure = bind(parse(text), dim)
        assert (said, numel) == (str(structure), structure.numel), text
        k, square, inverse = (torch.tensor(m, dtype=torch.float64).view(dim, dim) for m in matrices)
        # K is an element, and no special one: the library's entries give it back, and none of them is zero.
        basis = _basis(structure)
        entries = torch.linalg.lstsq(basis.mT, k.flatten()).solution
        torch.testing.assert_close(structure.dense(entries), k)
        assert entries.abs().min() > 0
        assert torch.equal(_pattern(k), (basis.abs() > 1e-9).any(0).view(dim, dim))
        ours = k @ k.mT
        torch.testing.assert_close(square, ours)
        assert torch.equal(_pattern(square), _pattern(ours))
        torch.testing.assert_close(inverse @ ours, torch.eye(dim, dtype=torch.float64), atol=1e-6, rtol=0)
        assert torch.equal(_pattern(inverse), _pattern(torch.linalg.inv(ours)))


@needs_browser
def test_memory_and_operations_are_those_of_a_plan(page):
    asked = list(product(TEXTS, LAYERS))
    found = look(page, f"return {json.dumps(asked)}.map(([text, layer]) => Structures.costs(text, layer));")
    for (text, layer), costs in zip(asked, found, strict=True):
        model = nn.Linear(layer["inputs"], layer["outputs"], bias=False, device="meta")
        settings = {"structure": text, "precond_every": layer["every"], "cache_products": False}
        plan = ingot.plan(model, example=torch.zeros(layer["rows"], layer["inputs"]), **settings)
        (row,) = plan.rows
        assert row.flops == tuple(costs[key] for key in ("gradient", "update", "statistics")), (text, layer)
        assert row.flops_per_step == pytest.approx(costs["perStep"])
        assert row.adamw_bytes == 4 * costs["adamw"] + 4  # and how many steps there were
        assert 0 < row.state_bytes - 4 * costs["state"] < 64  # a layer's few single numbers
        assert 3 * plan.model_flops == 2 * costs["passes"]  # without the way back to the data


@needs_browser
def test_texts_are_taken_and_refused_as_by_the_library(page):
    wrong = ["", "nothing", "dense(", "dense(4,4)", "upper(dense,diagonal)", "hierarchical(1,2,3,4)"]
    wrong += ["block_diagonal(0)", "upper(2,3)", "dense)", "upper(dense(2),diagonal(3))", "rank_tril(dense)"]
    for text in wrong:
        with pytest.raises(ValueError, match=r"structure|split"):
            bind(parse(text), 12)
    names, refused = look(
        page,
        f"""return [Object.keys(Structures.BUILDERS), {json.dumps(wrong)}.map(text => {{
            try {{ Structures.bind(text, 12); return 'taken'; }} catch (error) {{ return error.message; }}
        }})];""",
    )
    assert "taken" not in refused
    assert all(refused)
    assert sorted(names) == sorted(registered())
    assert {name for name in names if any(re.search(rf"\b{name}\b", text) for text in TEXTS)} == set(names)


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_controls(page, dark):
    """Choosing changes text, pictures and tables; what cannot be read is said, and the pictures stay."""
    scheme = "slate" if dark else "default"
    seen = look(
        page,
        f"""document.body.setAttribute('data-md-color-scheme', '{scheme}');"""
        """
        const get = id => document.getElementById(id);
        const set = (id, value) => {
            const control = get(id);
            control.value = value;
            control.dispatchEvent(new Event('input', {bubbles: true}));
            control.dispatchEvent(new Event('change', {bubbles: true}));
        };
        const pixels = id => {
            const canvas = get(id), context = canvas.getContext('2d');
            const {data} = context.getImageData(0, 0, canvas.width, canvas.height);
            return [...Array(canvas.width ** 2).keys()].map(i => [...data.slice(4 * i, 4 * i + 3)].join());
        };
        const now = () => ({
            text: get('ex-text').value, code: get('ex-code').textContent, error: get('ex-error').textContent,
            k: pixels('ex-k'), inverse: pixels('ex-inverse'),
            captions: [...document.querySelectorAll('#ex-pictures small')].map(e => e.textContent),
            memory: [...document.querySelectorAll('#ex-memory tbody tr')].map(
                row => [...row.cells].map(cell => cell.textContent)),
            numbers: [...document.querySelectorAll('#ex-own input')].map(e => e.id),
        });
        await new Promise(resolve => setTimeout(resolve, 50));
        const first = now();
        set('ex-name', 'block_diagonal'); set('ex-block', 2); set('ex-dim', 8); set('ex-inputs', 64);
        set('ex-outputs', 32); set('ex-bytes', 2);
        const second = now();
        get('ex-shuffle').click();
        const third = now();
        set('ex-text', 'upper(dense(2)');
        const fourth = now();
        get('ex-k').dispatchEvent(new PointerEvent('pointermove', {clientX: 0, clientY: 0}));
        return {first, second, third, fourth, pointed: get('ex-pointed').textContent};
        """,
    )
    first, second, third, fourth = (seen[key] for key in ("first", "second", "third", "fourth"))
    assert (first["text"], first["error"]) == ("hierarchical(3,3)", "")
    assert first["numbers"] == ["ex-first", "ex-last"]
    assert first["captions"][0] == "97 of 256 places differ from zero, 97 free"
    zero = "44,48,58" if dark else "242,242,242"
    assert first["k"].count(zero) == 256 - 97
    assert first["inverse"].count(zero) == 0
    assert second["text"] == "block_diagonal(2)"
    assert second["code"] == 'SINGD(model, structure="block_diagonal(2)")'
    assert second["k"].count(zero) == second["inverse"].count(zero) == 64 - 16
    memory = {row[0]: row[1:] for row in second["memory"]}
    assert memory["K, for the inputs"] == ["128", "256 B", "3.13 %"]
    assert memory["together"] == ["2,240", "4.4 KiB", "54.7 %"]
    assert memory["AdamW"] == ["4,096", "8.0 KiB", "100 %"]
    assert third["k"] != second["k"]
    assert third["captions"] == second["captions"]
    assert "upper" in fourth["error"] or "bracket" in fourth["error"]
    assert fourth["k"] == third["k"]
    assert re.match(r"Row 1, column 1: K -?\d", seen["pointed"])
