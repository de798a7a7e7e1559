"""structure="auto": what is chosen, within which memory, and that it stays."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ingot import IKFAC, INGD, KFAC, SINGD
from ingot.budget import BLOCKS, LARGEST_DENSE, Budget, Side, choose, ladder, read, recognised
from ingot.structures import BlockDiagonal, Dense, Diagonal
from tests.behaviour.training import hooks
from tests.zoo import BUILDERS, build

# --- The budget as text and numbers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        ("1.0x adamw", Budget(1.0, "adamw")),
        ("1x AdamW", Budget(1.0, "adamw")),
        (" .6 X sgd ", Budget(0.6, "sgd")),
        ("500MB", Budget(500e6, "bytes")),
        ("500 mb", Budget(500e6, "bytes")),
        ("1.5 GiB", Budget(1.5 * 2**30, "bytes")),
        ("2kib", Budget(2048, "bytes")),
        ("1TB", Budget(1e12, "bytes")),
        ("100B", Budget(100, "bytes")),
        (12345, Budget(12345, "bytes")),
        (0.8, Budget(0.8, "adamw")),
    ],
)
def test_budgets_are_read(given, budget):
    assert read(given) == budget


@pytest.mark.parametrize(
    "given", ["", "adamw", "1.0", "1x", "x adamw", "1x lion", "5 bytes", "-1MB", "1..5GB", -1, -0.5, True]
)
def test_other_budgets_are_refused(given):
    with pytest.raises(ValueError, match=r"memory_budget must be text such as '1\.0x adamw'"):
        read(given)


@pytest.mark.parametrize("given", [float("nan"), float("inf"), None, [1.0]])
def test_what_is_no_amount_is_refused(given):
    with pytest.raises(ValueError, match="memory_budget must be"):
        read(given)


# --- The choice, without any model ----------------------------------------------------------------------

SIDES = st.builds(
    Side,
    of=st.sampled_from("KC"),
    dim=st.sampled_from((1, 2, 7, 8, 9, 33, 100, 768, 769, 2048, 2049, 50257)),
    other=st.sampled_from((1, 10, 100, 3072)),
    matrices=st.integers(1, 3),
    bytes_per_entry=st.sampled_from((2, 4, 8)),
    is_small=st.booleans(),
)


def price(sides, structures):
    pairs = zip(sides, structures, strict=True)
    return sum(side.matrices * side.bytes_per_entry * (s.numel - side.dim) for side, s in pairs)


@given(st.lists(SIDES, max_size=8), st.integers(0, 10**9), st.integers(0, 10**9))
def test_choices_fit_and_a_larger_budget_is_used(sides, room, more):
    chosen, richer = choose(sides, room), choose(sides, room + more)
    assert price(sides, chosen) <= room
    assert price(sides, chosen) <= price(sides, richer) <= room + more
    assert chosen == choose(sides, room)
    for side, structure in zip(sides, chosen, strict=True):
        assert structure in ladder(side.dim)
        assert structure == chosen[sides.index(side)]  # equal sides are treated alike


@given(st.lists(SIDES, min_size=1, max_size=8), st.integers(0, 10**9))
def test_no_step_that_would_fit_is_left_out(sides, room):
    chosen = choose(sides, room)
    left = room - price(sides, chosen)
    for side, structure in zip(sides, chosen, strict=True):
        larger = [s for s in ladder(side.dim) if s.numel > structure.numel]
        extra = [side.matrices * side.bytes_per_entry * (s.numel - structure.numel) for s in larger]
        assert all(sides.count(side) * e > left for e in extra)


@pytest.mark.parametrize("dim", [1, 2, 8, 9, 33, 80, 256, 257, 300, 768, 2048, 2049, 50257])
def test_structures_grow_and_are_told_apart_by_their_size(dim):
    structures = ladder(dim)
    assert structures[0] == Diagonal(dim)
    assert all(a.numel < b.numel for a, b in pairwise(structures))
    assert all(recognised(dim, s.numel) == s for s in structures)
    assert all(s.invertible for s in structures)  # which KFAC needs
    assert (structures[-1] == Dense(dim)) == (1 < dim <= LARGEST_DENSE)
    with pytest.raises(ValueError, match="no structure that 'auto' chooses"):
        recognised(dim, structures[-1].numel + 1)


def test_each_structure_contains_the_one_before_it():
    for a, b in pairwise(ladder(100)):
        full = torch.ones(100, 100)
        places = [s.dense(s.gram(full)) != 0 for s in (a, b)]
        assert bool((~places[0] | places[1]).all())


def test_small_sides_come_first_but_not_before_the_usual_blocks():
    small, large = Side("K", 300, 400, 1, 4, True), Side("C", 400, 300, 1, 4, False)
    usual = [BlockDiagonal(400, 32), BlockDiagonal(300, 32)]
    assert choose([large, small], price([large, small], usual)) == usual
    one_dense = [BlockDiagonal(400, 32), Dense(300)]
    assert choose([large, small], price([large, small], one_dense)) == one_dense
    assert choose([large, small], 10**9) == [Dense(400), Dense(300)]


# --- Optimizers -----------------------------------------------------------------------------------------


def mlp(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.LayerNorm(b), nn.Tanh())]
    return nn.Sequential(*layers[:-2])


def train(model: nn.Module, optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        x = torch.randn(5, next(m for m in model if isinstance(m, nn.Linear)).in_features)
        optimizer.zero_grad()
        cross_entropy(model(x), torch.arange(5) % 3).backward()
        optimizer.step()


def held(optimizer) -> int:
    states = optimizer.state.values()
    return sum(
        v.numel() * v.element_size() for state in states for v in state.values() if isinstance(v, Tensor)
    )


def bytes_of(optimizer) -> tuple[int, int]:
    """The state as it is planned, with the products that are kept and without."""
    rows = optimizer.describe().rows
    total = sum(row.state_bytes for row in rows)
    return total, total - sum(row.cached_bytes for row in rows)


def adamw_bytes(optimizer) -> int:
    return sum(row.adamw_bytes for row in optimizer.describe().rows)


def structures(optimizer) -> list:
    return [layer.structures for layer in optimizer._layers.values()]


@pytest.mark.parametrize("name", BUILDERS)
def test_the_state_of_real_models_is_as_planned_and_no_larger_than_adamws(name):
    case = build(name)
    optimizer = SINGD(case.model, structure="auto")
    total, planned = bytes_of(optimizer)
    assert 0.9 * adamw_bytes(optimizer) < total <= adamw_bytes(optimizer)
    case.loss(case.model).backward()
    optimizer.step()
    reached = {p for p in case.model.parameters() if p.grad is not None}
    if reached == set(case.model.parameters()):
        assert held(optimizer) == planned
    assert held(optimizer) <= adamw_bytes(optimizer)


@pytest.mark.parametrize("optimizer_class", [SINGD, INGD, IKFAC, KFAC])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.0},
        {"factor_dtype": torch.bfloat16},
        {"cache_products": False},
        {"precond_every": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("budget", ["1.0x adamw", 0.8, 1.3, "2.2x sgd", "45kB", 50000])
def test_every_optimizer_keeps_to_its_budget(optimizer_class, options, budget):
    model = mlp(40, 60, 60, 3)
    optimizer = optimizer_class(model, memory_budget=budget, **options)
    total, planned = bytes_of(optimizer)
    sgd = sum(row.sgd_bytes for row in optimizer.describe().rows)
    allowed = read(budget).in_bytes(adamw_bytes(optimizer), sgd)
    assert 0.7 * allowed < total <= allowed
    train(model, optimizer)
    assert held(optimizer) == planned


def test_momentum_of_factors_counts():
    optimizer = SINGD(mlp(40, 60, 3), structure="auto", precond_momentum=0.5)
    assert bytes_of(optimizer)[0] <= adamw_bytes(optimizer)
    assert structures(optimizer) != structures(SINGD(mlp(40, 60, 3), structure="auto"))


@given(share=st.floats(0.6, 3.0), more=st.floats(0, 2.0))
@settings(max_examples=25, deadline=None)
def test_a_larger_budget_never_makes_the_state_smaller(share, more):
    model = mlp(30, 70, 70, 20, 3)
    a, b = (SINGD(model, structure="auto", memory_budget=float(s)) for s in (share, share + more))
    assert bytes_of(a)[0] <= bytes_of(b)[0] <= (share + more) * adamw_bytes(b)
    assert bytes_of(a)[1] <= bytes_of(b)[1]
    assert structures(a) == structures(SINGD(model, structure="auto", memory_budget=float(share)))


def test_a_budget_alone_means_auto():
    model = mlp(40, 60, 3)
    assert structures(SINGD(model, memory_budget=0.9)) == structures(
        SINGD(model, structure="auto", memory_budget=0.9)
    )


def test_a_budget_is_refused_where_nothing_is_chosen():
    model = mlp(4, 5, 3)
    with pytest.raises(ValueError, match="memory_budget is for structure='auto'"):
        SINGD(model, structure="dense", memory_budget=1.0)
    assert not hooks(model)


def test_the_smallest_state_is_told_where_nothing_fits():
    model = mlp(40, 60, 3)
    with pytest.raises(
        ValueError, match=r"is 0\.2x AdamW, .*the smallest state takes 1[0-9.]+ KiB, 0\.[5-6]"
    ):
        SINGD(model, memory_budget=0.2)
    assert not hooks(model)
    smallest = bytes_of(SINGD(model, structure="diagonal", cache_products=False))[0]
    optimizer = SINGD(model, memory_budget=smallest)
    assert bytes_of(optimizer)[0] == smallest
    with pytest.raises(ValueError, match="the smallest state"):
        SINGD(model, memory_budget=smallest - 1)


def test_equal_layers_are_given_equal_structures():
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(12)))
    for share in (0.7, 0.8, 0.9, 1.0, 1.2):
        optimizer = SINGD(model, memory_budget=share)
        assert len(set(structures(optimizer))) == 1
        assert len({optimizer._kept_squares(layer) for layer in optimizer._layers.values()}) == 1


@pytest.mark.parametrize(
    ("d_i", "d_o", "small"), [(400, 400, 0), (400, 800, 0), (800, 400, 1), (400, 399, 1)]
)
def test_the_smaller_side_is_dense_and_the_inputs_of_a_square_layer(d_i, d_o, small):
    optimizer = SINGD(nn.Linear(d_i, d_o), memory_budget=1.2)
    (pair,) = structures(optimizer)
    assert isinstance(pair[small], Dense)
    assert isinstance(pair[1 - small], BlockDiagonal)


def test_one_side_may_be_given():
    optimizer = SINGD(mlp(40, 60, 3), structure=("auto", "hierarchical(2,2)"), memory_budget=2.0)
    pairs = structures(optimizer)
    assert str(pairs[0][1]) == "upper(dense(2),lower(diagonal(56),dense(2)))"
    assert pairs[0][0] == Dense(41)


def test_an_embeddings_inputs_stay_diagonal():
    optimizer = SINGD(nn.Sequential(nn.Embedding(30, 12), nn.Linear(12, 3)), memory_budget=10.0)
    assert structures(optimizer)[0] == (Diagonal(30), Dense(12))


def test_some_groups_may_be_chosen_for():
    model = mlp(40, 60, 60, 3)
    groups = [{"params": "0.*", "structure": "auto"}]
    optimizer = SINGD(model, groups, structure="diagonal")
    first, *others = (
        structures(optimizer)[::-1] if structures(optimizer)[0][0].dim != 41 else structures(optimizer)
    )
    assert not isinstance(first[0], Diagonal)
    assert all(isinstance(s, Diagonal) for pair in others for s in pair)
    assert bytes_of(optimizer)[0] <= adamw_bytes(optimizer)


def test_products_are_kept_where_there_is_room_only():
    model = mlp(40, 60, 60, 3)
    tight, wide = SINGD(model, memory_budget=1.0), SINGD(model, memory_budget=20.0)
    every = SINGD(model, structure=("dense", "dense"), cache_products=True)
    cached = [sum(row.cached_bytes for row in o.describe().rows) for o in (tight, wide, every)]
    assert cached[0] < cached[1] == cached[2]
    assert bytes_of(SINGD(model, memory_budget=20.0, cache_products=False))[0] == bytes_of(wide)[1]


# --- What was chosen stays ------------------------------------------------------------------------------


def test_frozen_layers_cost_nothing_until_they_are_trained():
    model = mlp(40, 60, 60, 3)
    model[0].requires_grad_(False)
    optimizer = SINGD(model, structure="auto")
    chosen = structures(optimizer)
    assert all(isinstance(s, BlockDiagonal) for s in chosen[0])
    assert 0.8 < bytes_of(optimizer)[0] / adamw_bytes(optimizer) <= 1
    model[0].requires_grad_(True)
    train(model, optimizer)
    assert structures(optimizer) == chosen
    assert 0.8 < bytes_of(optimizer)[0] / adamw_bytes(optimizer) <= 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_have_the_same_structures_even_if_they_would_be_chosen_otherwise(copied):
    model = mlp(40, 60, 60, 3)
    optimizer = SINGD(model, [*model[0].parameters()], memory_budget="75 kB")
    optimizer.add_param_group({"params": [p for layer in model[1:] for p in layer.parameters()]})
    assert structures(optimizer) != structures(SINGD(model, memory_budget="75 kB"))
    train(model, optimizer)
    model2, optimizer2 = copied((model, optimizer))
    assert structures(optimizer2) == structures(optimizer)
    assert bytes_of(optimizer2) == bytes_of(optimizer)
    torch.manual_seed(1)
    train(model, optimizer)
    torch.manual_seed(1)
    train(model2, optimizer2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), model2.parameters(), strict=True))


@pytest.mark.parametrize("optimizer_class", [SINGD, KFAC])
def test_a_checkpoint_goes_on_as_if_nothing_had_happened(optimizer_class):
    model = mlp(40, 60, 60, 3)
    optimizer = optimizer_class(model, structure="auto", precond_every=1)
    train(model, optimizer)
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    assert saved["param_groups"][0]["structure"] == "auto"
    other = copy.deepcopy(model)
    resumed = optimizer_class(other, structure="auto", precond_every=1)
    resumed.load_state_dict(saved)
    for seed in (1, 2):
        for m, o in ((model, optimizer), (other, resumed)):
            torch.manual_seed(seed)
            train(m, o)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        ({"memory_budget": 1.0}, {"memory_budget": 0.7}),
        ({"memory_budget": 0.7}, {"memory_budget": 3.0}),
        ({"memory_budget": 1.0}, {"structure": "hierarchical(2,2)"}),
        ({"structure": ("auto", "diagonal")}, {"structure": "dense"}),
        ({"structure": "hierarchical(2,2)"}, {"memory_budget": 1.0}),
    ],
)
def test_checkpoints_of_other_structures_are_converted(saving, loading):
    model = mlp(40, 60, 60, 3)
    optimizer, other = SINGD(model, **saving), SINGD(model, **loading)
    train(model, optimizer)
    expected = SINGD(model, **loading)
    expected_structures = structures(other)
    other.load_state_dict(optimizer.state_dict())
    assert structures(other) == expected_structures == structures(expected)
    assert held(other) == bytes_of(other)[1]
    train(model, other)
    for layer in other._layers.values():
        for key, structure in zip("KC", layer.structures, strict=True):
            assert other.state[layer.weight][key].shape[-1] == structure.numel


def test_a_checkpoint_with_sizes_that_auto_does_not_choose_is_refused():
    model = mlp(40, 60, 3)
    optimizer = SINGD(model, structure="auto")
    train(model, optimizer)
    saved = optimizer.state_dict()
    saved["state"][0]["K"] = torch.ones(77)
    with pytest.raises(ValueError, match="no structure that 'auto' chooses for 41 rows has 77 entries"):
        optimizer.load_state_dict(saved)


def test_layers_that_come_later_share_what_is_left():
    model = mlp(40, 60, 60, 3)
    optimizer = SINGD(model, [*model[0].parameters(), *model[1].parameters()], structure="auto")
    first = structures(optimizer)
    train(model, optimizer)
    optimizer.add_param_group({"params": [p for layer in model[2:] for p in layer.parameters()]})
    assert structures(optimizer)[: len(first)] == first
    assert bytes_of(optimizer)[0] <= adamw_bytes(optimizer)
    assert not all(isinstance(s, Diagonal) for pair in structures(optimizer)[len(first) :] for s in pair)
    train(model, optimizer)
    assert held(optimizer) == bytes_of(optimizer)[1]


def test_a_group_for_which_nothing_is_left_is_refused():
    model = mlp(40, 60, 60, 3)
    optimizer = SINGD(model, [*model[0].parameters()], structure="auto", memory_budget="15 kB")
    hooked, groups = len(hooks(model)), len(optimizer.param_groups)
    with pytest.raises(ValueError, match="the smallest state takes"):
        optimizer.add_param_group({"params": [p for layer in model[1:] for p in layer.parameters()]})
    assert (len(hooks(model)), len(optimizer.param_groups)) == (hooked, groups)
    train(model, optimizer)


def test_replaced_parameters_keep_structures_and_state():
    model = mlp(40, 60, 60, 3)
    optimizer = SINGD(model, structure="auto")
    train(model, optimizer)
    chosen, steps = structures(optimizer), optimizer.state[model[0].weight]["steps"]
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    train(model, optimizer)
    assert sorted(map(str, structures(optimizer))) == sorted(map(str, chosen))
    assert optimizer.state[model[0].weight]["steps"] == 2 + steps


def test_a_resized_layer_is_chosen_for_anew():
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 30))
    optimizer = SINGD(model, structure="auto")
    train(model, optimizer)
    before = structures(optimizer)
    model[2].weight.data, model[2].bias.data = torch.randn(35, 60), torch.randn(35)
    model[2].out_features = 35
    model[2].weight.grad = model[2].bias.grad = None
    train(model, optimizer)
    after = structures(optimizer)
    assert after[0] == before[0]
    assert [s.dim for s in after[1]] == [61, 35]
    assert not any(isinstance(s, Diagonal) for s in after[1])
    assert bytes_of(optimizer)[0] <= adamw_bytes(optimizer)


def test_blocks_are_whole_parts_of_each_other():
    """Or a larger one would not contain a smaller one."""
    assert all(b % a == 0 for a, b in pairwise(BLOCKS))
