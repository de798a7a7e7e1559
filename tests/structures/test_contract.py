"""One contract for every structure: those in the registry, and compositions of them."""

from itertools import pairwise, product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ingot.structures import Dense, Diagonal, Hierarchical, Lower, Structure, Upper, bind, parse, registered
from ingot.structures.base import Anew, InTurn
from tests.structures.oracle import project

# Everything that has a name is tested as it is; what needs arguments is tested in the compositions.
NAMED = sorted(set(registered()) - {"upper", "lower"})
COMPOSED = [
    "block_diagonal(1)",
    "block_diagonal(7)",
    "block_diagonal(100)",
    "rank_triu(3)",
    "rank_tril(4)",
    "rank_triu_mirrored(5)",
    "rank_tril_mirrored(2)",
    "hierarchical(2,3)",
    "hierarchical(15,15)",
    "upper(dense(4),diagonal)",
    "upper(dense(5),triu_toeplitz)",
    "lower(tril_toeplitz(6),block_diagonal(3))",
    "upper(diagonal,tril_toeplitz(7))",
    "lower(triu(5),tril)",
    "upper(block_diagonal(2,9),lower(diagonal,dense(3)))",
    "lower(upper(dense(2),diagonal(6)),upper(triu_toeplitz(4),tril_toeplitz))",
]
DIMS = range(1, 41)
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}


@pytest.fixture(params=NAMED + COMPOSED)
def text(request) -> str:
    return request.param


def _elements(structure: Structure, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Elements in two batch dimensions, no larger in norm for larger dimensions."""
    return torch.randn(count, 2, 3, structure.numel, dtype=dtype) / structure.dim**0.5


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_those_of_the_matrices(text, dtype):
    for dim in DIMS:
        s = bind(parse(text), dim)
        a, b = _elements(s, 2, dtype)
        x = torch.randn(2, 3, dim, 5, dtype=dtype)
        dense_a, dense_b = s.dense(a), s.dense(b)
        assert a.shape == (2, 3, s.numel)
        assert dense_a.shape == (2, 3, dim, dim)
        _close(s.dense(s.matmul(a, b)), dense_a @ dense_b)  # closed under multiplication
        _close(s.apply(a, x), dense_a @ x)
        _close(s.apply_t(a, x), dense_a.mT @ x)
        _close(s.apply(a[0, 0], x), dense_a[0, 0] @ x)  # batch dimensions broadcast
        _close(s.dense(a + 3 * b), dense_a + 3 * dense_b)
        _close(s.inner(a, b).squeeze(-1), (dense_a * dense_b).sum((-2, -1)))
        _close(s.trace(a).squeeze(-1), dense_a.diagonal(dim1=-2, dim2=-1).sum(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identity(text, dtype):
    for dim in DIMS:
        s = bind(parse(text), dim)
        one, a = s.identity(dtype=dtype), _elements(s, 1, dtype)[0]
        assert one.shape == (s.numel,)
        _close(s.dense(one), torch.eye(dim, dtype=dtype))
        _close(s.matmul(one, a), a)
        _close(s.matmul(a, one), a)


def test_entries_are_free_and_each_stands_for_itself(text):
    """No two entries describe the same matrix, and each one alone fills places with ones."""
    for dim in (1, 2, 9, 40):
        s = bind(parse(text), dim)
        matrices = s.dense(torch.eye(s.numel, dtype=torch.float64)).round(decimals=9)
        assert set(matrices.unique().tolist()) <= {0.0, 1.0}
        assert matrices.sum(0).max() <= 1  # disjoint places
        assert matrices.flatten(1).any(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_projections_are_the_smallest_solutions(text, dtype):
    for dim in DIMS:
        s = bind(parse(text), dim)
        a = _elements(s, 1, dtype)[0, :, :1]
        x = torch.randn(2, 1, dim, 4, dtype=dtype)
        for projected, factor in ((s.gram(x), x), (s.self_gram(a), s.dense(a).mT)):
            assert projected.shape == (2, 1, s.numel)
            factor = factor[1, 0].double()
            expected = project(s, factor @ factor.mT).to(dtype)
            _close(projected[1, 0], expected)


def test_inverses_where_they_exist(text):
    for dim in (1, 2, 9, 40):
        s = bind(parse(text), dim)
        root = torch.randn(2, dim, 2 * dim + 4, dtype=torch.float64)
        a = s.gram(root)
        if s.invertible:
            _close(s.dense(s.inverse(a)), torch.linalg.inv(s.dense(a)))
        else:
            with pytest.raises(NotImplementedError, match="IKFAC"):
                s.inverse(a)


def test_text_of_a_structure_names_it(text):
    for dim in DIMS:
        s = bind(parse(text), dim)
        assert s.dim == dim
        assert bind(parse(str(s)), dim) == s
        assert hash(s) == hash(bind(parse(text), dim))


class _Watch(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes() // 4)
        return result


def _largest_allocation(s: Structure) -> int:
    a, x = torch.randn(s.numel), torch.randn(s.dim, 8)
    with _Watch() as watch:
        s.identity()
        s.matmul(a, a)
        s.apply(a, x)
        s.apply_t(a, x)
        s.gram(x)
        s.self_gram(a)
        s.inner(a, a)
        s.trace(a)
        if s.invertible:
            s.inverse(a)
    return watch.largest


SPARSE = [t for t in NAMED if t not in ("dense", "tril", "triu")]
SPARSE += ["rank_triu(30)", "hierarchical(30,30)", "upper(dense(16),lower(triu_toeplitz,dense(16)))"]


@pytest.mark.parametrize("sparse", SPARSE)
def test_nothing_of_dim_times_dim_is_allocated(sparse):
    dim = 4096
    assert _largest_allocation(bind(parse(sparse), dim)) < dim * dim / 8


@pytest.mark.parametrize("full", ["dense", "tril"])
def test_the_watch_sees_what_is_allocated(full):
    dim = 512
    assert _largest_allocation(bind(parse(full), dim)) >= dim * dim


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("by_columns", [False, True])
def test_squares_are_those_of_the_matrices(text, dtype, by_columns):
    """A Aᵀ as it is kept, applied to matrices stored by rows and by columns, alone and in batches."""
    for dim in DIMS:
        s = bind(parse(text), dim)
        if s.square is None:
            continue
        a = _elements(s, 1, dtype)[0]
        kept = s.square.of(a)
        assert kept.shape == (2, 3, s.square.numel)
        x = (
            torch.randn(2, 3, 6, dim, dtype=dtype).mT
            if by_columns
            else torch.randn(2, 3, dim, 6, dtype=dtype)
        )
        expected = s.dense(a) @ s.dense(a).mT @ x
        for of, mine, its in ((kept, x, expected), (kept[1, 2], x[1, 2], expected[1, 2])):
            out = torch.empty_like(mine)
            assert s.square.apply(of, mine, out) is out
            _close(out, its)
            if s.square.works_in_place:
                out.copy_(mine)
                _close(s.square.apply(of, out, out), its)


@pytest.mark.parametrize("anew", [False, True])
def test_squares_of_rows_that_do_not_mix(text, anew):
    """Each part is the square of its rows, kept or made anew, in any layout."""
    for dim in DIMS:
        s = bind(parse(text), dim)
        if s.square is None:
            continue
        square = Anew(s.square) if anew else s.square
        a = _elements(s, 1, torch.float64)[0][1, 2]
        entries, x = square.of(a), torch.randn(dim, 6, dtype=torch.float64)
        expected = s.dense(a) @ s.dense(a).mT @ x
        _close(square.apply(entries, x, torch.empty_like(x)), expected)
        for sections in (
            square.sections(entries),
            *(square.parts(entries, count) for count in (1, 2, 3, 99)),
        ):
            done = 0
            for section in sections:
                assert section.start == done < section.stop
                rows = slice(section.start, section.stop)
                for mine in (x[rows], x.mT.contiguous().mT[rows]):
                    out = torch.empty_like(mine)
                    assert section.square.apply(section.entries, mine, out) is out
                    _close(out, expected[rows])
                done = section.stop
            assert done in (0, dim)


def test_squares_of_rows_that_stay_where_they_are(text):
    """What is made once serves for each X in the same place, however it is stored."""
    for dim in DIMS:
        s = bind(parse(text), dim)
        elements = _elements(s, 1, torch.float64)[0]
        squares = [square for square in (s.square, s.square and Anew(s.square), InTurn(s)) if square]
        for square, a in product(squares, (elements[1, 2], elements[1])):
            x = torch.empty(*a.shape[:-1], 6, dim, dtype=torch.float64)
            for place in (x, torch.empty_like(x.mT).mT):
                room = torch.empty(x.numel(), dtype=torch.float64)
                multiply, result = square.in_place_of(square.of(a), place, room)
                assert result.data_ptr() == room.data_ptr()
                for _ in range(2):
                    place.copy_(torch.randn(x.shape))
                    multiply()
                    _close(result.reshape(x.shape), place @ s.dense(a) @ s.dense(a).mT)


def test_sections_mix_with_no_other_rows(text):
    """Which rows mix across a border, and structure and entries of those between borders where none do."""
    for dim in DIMS:
        s = bind(parse(text), dim)
        a = _elements(s, 1, torch.float64)[0][1, 2]
        matrix = s.dense(a)
        square = matrix @ matrix.mT
        borders = [row for row in range(dim + 1) if s.mixed_at(row) == (row, row)]
        assert {0, dim} <= set(borders)
        for row in range(dim + 1):
            first, last = s.mixed_at(row)
            assert first <= row <= last
            assert {first, last} <= set(borders)
        for start, stop in pairwise(borders):
            section, place = s.section(start, stop)
            assert section.dim == stop - start
            _close(section.dense(a[place]), matrix[start:stop, start:stop])
            assert not square[start:stop, stop:].any()
        if len(borders) > 3:  # several at once
            section, place = s.section(borders[1], borders[3])
            rows = slice(borders[1], borders[3])
            _close(section.dense(a[place]), matrix[rows, rows])


def test_where_squares_are_cut():
    """Before the rows that mix with the last one."""

    def cuts(text, dim):
        s = bind(parse(text), dim)
        return [section.start for section in s.square.sections(s.square.of(s.identity()))]

    assert cuts("diagonal", 7) == [0, 6]
    assert cuts("diagonal", 1) == []
    assert cuts("block_diagonal(4)", 13) == [0, 12]
    assert cuts("block_diagonal(4)", 12) == [0, 8]
    assert cuts("block_diagonal(4)", 14) == [0, 12]
    assert cuts("block_diagonal(4)", 4) == []
    assert cuts("dense", 7) == []


def test_squares_in_parts_of_about_the_same_size():
    def starts(text, dim, count):
        s = bind(parse(text), dim)
        return [part.start for part in s.square.parts(s.square.of(s.identity()), count)]

    assert starts("block_diagonal(4)", 24, 3) == [0, 8, 16]
    assert starts("block_diagonal(4)", 26, 3) == [0, 12, 24]
    assert starts("block_diagonal(4)", 24, 4) == [0, 8, 16]  # not one block here and two there
    assert starts("block_diagonal(4)", 10, 9) == [0, 4, 8]
    assert starts("block_diagonal(4)", 24, 1) == [0]
    assert starts("dense", 7, 2) == []


@pytest.mark.parametrize(("first", "middle", "last"), [(2, 7, 3), (4, 5, 0), (0, 5, 4)])
def test_hierarchical_ones_are_compositions(first, middle, last):
    """The combinators have the same matrices, projections and products, in another order of the entries."""
    s = Hierarchical(first, Diagonal(middle), last)
    other = Lower(Diagonal(middle), Dense(last)) if last else Diagonal(middle)
    other = Upper(Dense(first), other) if first else other
    assert (s.numel, s.dim, str(s)) == (other.numel, other.dim, str(other))
    x, matrix = torch.randn(s.dim, 4, dtype=torch.float64), torch.eye(s.dim, dtype=torch.float64)
    _close(s.dense(s.gram(x)), other.dense(other.gram(x)))
    a, b = s.gram(x), other.gram(x)
    _close(s.dense(s.matmul(a, a)), other.dense(other.matmul(b, b)))
    _close(s.dense(s.self_gram(a)), other.dense(other.self_gram(b)))
    _close(s.apply_t(a, matrix), other.apply_t(b, matrix))


def test_which_structures_have_squares():
    have = {text for text in (*NAMED, *COMPOSED) if bind(parse(text), 40).square is not None}
    without = {"tril_toeplitz", "triu_toeplitz", "rank_tril", "rank_triu_mirrored"}
    assert set(NAMED) - have == without
    assert {"upper(dense(4),diagonal)", "hierarchical(2,3)"} <= have


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sandwich_is_the_projection_of_the_whole(text, dtype):
    for dim in DIMS:
        s = bind(parse(text), dim)
        a = _elements(s, 1, dtype)[0]
        x = torch.randn(2, 3, dim, 7, dtype=dtype)
        if s.gram_first(10**9):
            _close(s.sandwich(a, s.gram(x)), s.gram(s.apply_t(a, x)))
        else:
            with pytest.raises(NotImplementedError, match="does not tell"):
                s.sandwich(a, s.gram(x))


def test_the_symmetric_part_of_a_product(text):
    """``cross_gram``, of structures that have it: those with a ``sandwich``."""
    for dim in (1, 4, 12, 33):
        s = bind(parse(text), dim)
        x, y = torch.randn(2, 2, 3, dim, 5, dtype=torch.float64)
        if s.gram_first(10**9):
            _close(s.cross_gram(x, y), (s.gram(x + y) - s.gram(x - y)) / 4)
        else:
            with pytest.raises(NotImplementedError, match="does not tell"):
                s.cross_gram(x, y)


@pytest.mark.parametrize("constant", [None, 0.0, 1.0, -0.5])
def test_the_inputs_of_a_bias_are_a_row_more(text, constant):
    """Also where there are so many columns that the Gram matrix comes first."""
    for dim in (2, 9, 33):
        for columns in (3, 8 * dim):
            s = bind(parse(text), dim)
            x = torch.randn(2, 3, dim - (constant is not None), columns, dtype=torch.float64)
            row = torch.full((2, 3, 1, columns), 0.0 if constant is None else constant, dtype=torch.float64)
            whole = x if constant is None else torch.cat((x, row), dim=-2)
            _close(s.gram_beside(x, constant), s.gram(whole))


def test_gram_does_not_depend_on_the_layout(text):
    for dim in (1, 9, 40):
        s = bind(parse(text), dim)
        rows = torch.randn(2, 3, 700, dim, dtype=torch.float64)
        _close(s.gram(rows.mT), s.gram(rows.mT.contiguous()))
        _close(s.gram(rows.mT), s.gram(rows[..., :300, :].mT) + s.gram(rows[..., 300:, :].mT))


def test_norms_are_spectral_norms_from_below(text):
    for dim in (1, 2, 9, 40):
        s = bind(parse(text), dim)
        a = _elements(s, 1, torch.float64)[0]
        exact = torch.linalg.matrix_norm(s.dense(a), 2).unsqueeze(-1)
        ratio = s.norm(a) / exact
        assert ratio.max() <= 1 + 1e-9
        assert ratio.min() > 0.3


def test_bounds_on_norms_are_from_above(text):
    for dim in (1, 2, 9, 40):
        s = bind(parse(text), dim)
        a = _elements(s, 1, torch.float64)[0]
        matrices = s.dense(a)
        exact = torch.linalg.matrix_norm(matrices, 2).unsqueeze(-1)
        bound = s.norm_bound(a)
        assert bound.shape == exact.shape
        assert (bound >= exact * (1 - 1e-9)).all()
        assert (bound <= 1.2 * torch.linalg.matrix_norm(matrices).unsqueeze(-1)).all()
        assert s.norm_bound(torch.full_like(a, torch.nan)).isnan().all()


@pytest.mark.parametrize("dim", [9, 64, 65, 130])
def test_bounds_on_norms_hold_for_matrices_of_one_direction(dim):
    """Of which all norms are the same, so that a bound has no room."""
    u, v = torch.randn(2, dim, 1, dtype=torch.float64)
    bound = Dense(dim).norm_bound((u @ v.mT).flatten())
    _close(bound, (u.norm() * v.norm()).view(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_with_products_in_one_go(text, dtype):
    for dim in DIMS:
        s = bind(parse(text), dim)
        a, b, c = _elements(s, 3, dtype)
        for lead in ((), (0,), (0, 1)):  # with and without batch dimensions
            p, q, r = a[lead], b[lead], c[lead]
            before = r.clone()
            _close(s.add_matmul(r, p, q, 0.3), r + 0.3 * s.matmul(p, q))
            _close(s.add_self_gram(r, p, 0.7, 0.3), 0.7 * r + 0.3 * s.self_gram(p))
            assert torch.equal(r, before)
