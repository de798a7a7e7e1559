"""Structures named by text, shrunk to the layer, refused with what is possible, registered by users."""

from dataclasses import dataclass

import pytest
import torch

from ingot.structures import (
    BlockDiagonal,
    Dense,
    Diagonal,
    Hierarchical,
    Lower,
    Structure,
    Upper,
    UpperToeplitz,
    bind,
    parse,
    register,
    registered,
    resolve,
)


@pytest.mark.parametrize(
    ("text", "dim", "expected"),
    [
        ("dense", 5, Dense(5)),
        ("diagonal", 5, Diagonal(5)),
        ("block_diagonal(3)", 8, BlockDiagonal(8, 3)),
        ("triu_toeplitz", 8, UpperToeplitz(8)),
        ("rank_triu(2)", 8, Hierarchical(2, Diagonal(6), 0)),
        ("rank_tril", 8, Lower(Dense(1), Diagonal(7))),
        ("rank_triu_mirrored(2)", 8, Upper(Diagonal(6), Dense(2))),
        ("rank_tril_mirrored(2)", 8, Hierarchical(0, Diagonal(6), 2)),
        ("hierarchical(2,3)", 9, Hierarchical(2, Diagonal(4), 3)),
        ("upper(dense(16),diagonal)", 20, Hierarchical(16, Diagonal(4), 0)),
        (" upper( block_diagonal(2, 6) , diagonal ) ", 9, Upper(BlockDiagonal(6, 2), Diagonal(3))),
        # Sizes larger than the layer shrink; a part without rows drops out.
        ("block_diagonal(30)", 4, BlockDiagonal(4, 4)),
        ("rank_triu(16)", 3, Dense(3)),
        ("upper(dense(16),diagonal)", 16, Dense(16)),
        ("hierarchical(15,15)", 20, Hierarchical(15, Dense(5), 0)),
        ("hierarchical(15,15)", 12, Dense(12)),
        ("upper(diagonal,dense(4))", 4, Dense(4)),
    ],
)
def test_text(text, dim, expected):
    assert bind(parse(text), dim) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("densee", "did you mean 'dense'"),
        ("", "'' is no structure"),
        ("dense(", "is no structure"),
        ("dense)", "comes after its end"),
        ("dense diagonal", "comes after its end"),
        ("block_diagonal(0)", "at least 1"),
        ("block_diagonal(dense)", "'block' is a number"),
        ("block_diagonal(2,3,4)", "is written block_diagonal"),
        ("upper(dense(3))", "is written upper"),
        ("upper(3,diagonal)", "'first' is a structure"),
        ("upper(dense(3) diagonal)", "expected ',' or ')'"),
        ("hierarchical(15,15,15,15)", "is written hierarchical"),
        ("block_diagonal(-3)", "'-' is no structure"),
    ],
)
def test_bad_text_says_what_is_wrong_and_what_is_possible(text, reason):
    with pytest.raises(ValueError, match="cannot read the structure") as error:
        parse(text)
    assert reason in str(error.value)
    assert all(name in str(error.value) for name in registered())


@pytest.mark.parametrize("text", ["upper(dense(2),dense(3))", "dense(4)", "hierarchical(1,1,9)"])
def test_a_structure_of_fixed_size_does_not_stretch(text):
    with pytest.raises(ValueError, match="cannot fill 10"):
        bind(parse(text), 10)


def test_a_combination_needs_to_know_where_to_split():
    with pytest.raises(ValueError, match="give one part a size"):
        bind(parse("upper(dense,diagonal)"), 10)


def test_classes_and_functions_are_structures_too():
    assert bind(resolve(Diagonal), 4) == Diagonal(4)
    assert bind(resolve(lambda dim: Hierarchical(1, Diagonal(dim - 1), 0)), 4) == bind(
        parse("rank_triu(1)"), 4
    )
    with pytest.raises(TypeError, match="a structure is text"):
        resolve(3)
    with pytest.raises(ValueError, match="was asked for dimension 4"):
        bind(lambda dim: Diagonal(dim + 1), 4)


@pytest.mark.parametrize(
    ("name", "low_rank"),
    [
        ("rank_tril", "K Kᵀ"),
        ("rank_triu_mirrored", "K Kᵀ"),
        ("rank_triu", "inverse"),
        ("rank_tril_mirrored", "inverse"),
    ],
)
def test_which_product_is_diagonal_plus_low_rank(name, low_rank):
    """As the docstrings in the catalogue say."""
    s = bind(parse(f"{name}(2)"), 9)
    k = s.dense(s.identity(dtype=torch.float64) + 0.3 * torch.randn(s.numel, dtype=torch.float64))
    product = k @ k.mT if low_rank == "K Kᵀ" else torch.linalg.inv(k @ k.mT)
    on_diagonal = k.diagonal().square() if low_rank == "K Kᵀ" else k.diagonal().square().reciprocal()
    dense_rows = slice(7, 9) if name.endswith("mirrored") else slice(0, 2)
    on_diagonal[dense_rows] = 0
    assert torch.linalg.matrix_rank(product - on_diagonal.diag(), rtol=1e-9) == 2


@pytest.mark.usefixtures("registry")
def test_users_register_their_own():
    @register("scalar")
    @dataclass(frozen=True)
    class Scalar(Structure):
        dim: int

        @property
        def numel(self):
            return 1

        def identity(self, *, dtype=None, device=None):
            return torch.ones(1, dtype=dtype, device=device)

        def matmul(self, a, b):
            return a * b

        def apply(self, a, x):
            return a.unsqueeze(-1) * x

        apply_t = apply

        def gram(self, x):
            return x.square().sum((-2, -1)).unsqueeze(-1) / self.dim

        def self_gram(self, a):
            return a.square()

        def inner(self, a, b):
            return self.dim * a * b

    @register("two_scalars")
    def two_scalars(dim: int, size: int = 2) -> Structure:
        return bind(parse(f"upper(scalar({size}),scalar)"), dim)

    assert bind(parse("scalar"), 7) == Scalar(7)
    assert str(bind(parse("two_scalars(3)"), 7)) == "upper(scalar(3),scalar(4))"
    assert bind(parse("upper(two_scalars(1,3),diagonal)"), 7).numel == 1 + 2 + 1 + 3 * 4 + 4
    for wrong in ("No Name", two_scalars):  # the latter by @register without a name
        with pytest.raises(ValueError, match=r"lower-case .* as in @register\('my_blocks'\)"):
            register(wrong)
    for wrong in (3, lambda: Scalar(1)):
        with pytest.raises(TypeError, match="a function of the dimension"):
            register("nothing")(wrong)
    assert "nothing" not in registered()
