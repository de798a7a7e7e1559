"""Every short cut leads where the long way leads: the same training with and without it."""

import copy
import warnings
from contextlib import ExitStack, nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import ingot
from ingot import (
    compiled,
    natural,
    rows,
    rules,
    scalars,
    shortcuts,
    small,
    stability,
    statistics,
    stepping,
    updating,
)
from ingot.health import HealthWarning
from ingot.structures import BlockDiagonal, Dense, Diagonal, dense, registered

OPTIMIZERS = [ingot.SINGD, ingot.INGD, ingot.IKFAC, ingot.KFAC]
STRUCTURES = sorted(set(registered()) - {"upper", "lower"})
KINDS = [
    *((ingot.SINGD, s) for s in STRUCTURES),
    *((ingot.IKFAC, s) for s in ("dense", "diagonal", "hierarchical")),
    *((ingot.KFAC, s) for s in ("dense", "diagonal", "block_diagonal")),
    (ingot.SINGD, ("diagonal", "dense")),
    (ingot.SINGD, ("block_diagonal(4)", "diagonal")),
]


class Attention(nn.Module):
    """Three projections of the same inputs, and two layers of the same shape behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out, self.last = (nn.Linear(12, 12) for _ in range(5))

    def forward(self, x):
        mixed = scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
        return self.last(self.out(mixed).tanh())


def network() -> nn.Module:
    """Layers with and without bias, convolutions with groups and strides, a transposed weight, norms."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, groups=3, stride=2, bias=False),
        nn.ConvTranspose2d(6, 4, 3, stride=2),
        nn.Flatten(),
        nn.Linear(4 * 7 * 7, 12),
        nn.Unflatten(1, (1, 12)),
        Attention(),
        nn.Flatten(),
        nn.Linear(12, 12, bias=False),
        nn.Linear(12, 5),
    ).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        images = torch.randn(6, 2, 8, 8, generator=generator, dtype=torch.float64)
        labels = torch.randint(5, (6,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def trained(kind, **settings) -> list[torch.Tensor]:
    make, structure = kind
    model = network()
    settings = {"lr": 0.01, "precond_every": 2, "precond_warmup": 2} | settings
    return train(model, make(model, structure=structure, **settings))


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)


def on_a_device():
    """Pretend that no number is at hand, as on a GPU."""
    return patch.object(scalars, "is_at_hand", lambda tensor: False)


# --- Numbers, which nobody waits for ----------------------------------------------------------------------


class Waits(TorchDispatchMode):
    """Counts the times that a program waits for a number.

    AdamW's counts of steps do not count: torch keeps them on the CPU, wherever the parameters are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        states = optimizer.state.values() if optimizer is not None else ()
        self.known = {state["step"].data_ptr() for state in states if "step" in state}
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            self.count += args[0].data_ptr() not in self.known
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_step_waits_for_nothing(kind, paper):
    make, structure = kind
    model = network()
    settings = ingot.PAPER if paper else {"precond_warmup": 0}
    optimizer = make(model, structure=structure, precond_every=2, **settings)
    train(model, optimizer, 1)
    for is_elsewhere in (False, True, True):  # a plain step, and one with an update; both kinds elsewhere
        optimizer.zero_grad()
        mse_loss(model(torch.randn(6, 2, 8, 8, dtype=torch.float64)), torch.zeros(6, 5).double()).backward()
        with Waits(optimizer) as waits:
            if is_elsewhere:
                with on_a_device():
                    optimizer.step()
            else:
                optimizer.step()
        assert waits.count == 0


def test_waiting_is_seen():
    with Waits() as waits:
        torch.ones(3).sum().item()
    assert waits.count == 1


@pytest.mark.parametrize(
    "settings", [{}, ingot.PAPER, {"momentum": 0.0}], ids=["default", "paper", "no momentum"]
)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_numbers_elsewhere_give_the_same_steps(kind, settings):
    at_hand = trained(kind, **settings)
    with on_a_device():
        assert_same(trained(kind, **settings), at_hand)


# --- Products that are kept -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_kept_products_give_the_same_steps(kind):
    assert_same(trained(kind, cache_products=True), trained(kind, cache_products=False))


def test_products_are_made_anew_when_factors_change():
    model = nn.Sequential(nn.Linear(6, 5))
    optimizer = ingot.SINGD(model, structure="dense", precond_every=3, precond_warmup=0, cache_products=True)
    layer = optimizer._layers[model[0].weight]

    def step() -> object:
        optimizer.zero_grad()
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        return layer.kept

    kept = [step() for _ in range(7)]
    assert [kept[n] is kept[n - 1] for n in range(1, 7)] == [True, True, False, True, True, False]

    before = layer.kept.k.entries.clone()
    optimizer.state[model[0].weight]["K"].mul_(2)  # by hand
    changed = step()
    assert changed is not kept[-1]
    torch.testing.assert_close(changed.k.entries, 4 * before)

    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert step() is not changed


def test_products_are_in_no_checkpoint():
    model = nn.Linear(6, 5)
    sizes = []
    for keep in (True, False):
        optimizer = ingot.SINGD(model, structure="dense", cache_products=keep)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        assert bool(optimizer._layers[model.weight].kept.k.square.numel) == keep
        state = optimizer.state_dict()["state"].values()
        sizes.append(sum(v.numel() for values in state for v in values.values() if torch.is_tensor(v)))
    assert sizes[0] == sizes[1]


def test_what_is_not_kept_takes_no_memory():
    """Factors in bfloat16 are applied in float32, without a copy that stays."""
    model = nn.Linear(6, 5)
    optimizer = ingot.SINGD(model, structure="dense", cache_products=False, factor_dtype=torch.bfloat16)
    for _ in range(2):  # new factors do not take the memory of old ones, which would stay
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        kept, state = optimizer._layers[model.weight].kept, optimizer.state[model.weight]
        assert kept.k.entries is state["K"]
        assert kept.c.entries is state["C"]
        assert state["K"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("structure", "keeps"), [("diagonal", True), ("block_diagonal(2)", True), ("dense", False)]
)
def test_by_default_products_are_kept_within_the_memory_of_adamw(structure, keeps):
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    plan = ingot.plan(model, structure=structure)
    assert (plan.cached_bytes > 0) == keeps
    assert keeps == (plan.state_bytes <= plan.adamw_bytes)
    assert ingot.plan(model, structure=structure, cache_products=True).cached_bytes > 0
    assert ingot.plan(model, structure=structure, cache_products=False).cached_bytes == 0
    kept = ingot.SINGD(model, structure=structure)._layers[model[0].weight]
    assert kept.kept is None  # until the first step


def test_products_that_take_longer_than_they_save_are_not_kept():
    k, c = Dense(300), Dense(10)
    rule = ingot.SINGD.rule
    assert [square.numel for square in rule.squares((k, c), kept_for=10)] == [0, 100]
    assert [square.numel for square in rule.squares((k, c), kept_for=40)] == [90000, 100]
    assert [square.numel for square in rule.squares((k, c), kept_for=0)] == [0, 0]
    assert [square.numel for square in ingot.KFAC.rule.squares((k, c), kept_for=40)] == [0, 0]


# --- Statistics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("structure", ["dense", "diagonal", "block_diagonal(4)", "block_diagonal(5)"])
def test_gram_matrices_first_or_last(structure, approx):
    kind = ingot.SINGD, structure
    ways = []
    for way in (lambda self, n: True, lambda self, n: False):
        with ExitStack() as patches:
            for cls in (Dense, BlockDiagonal, Diagonal):
                patches.enter_context(patch.object(cls, "gram_first", way))
            ways.append(trained(kind, approx=approx))
    assert_same(*ways)


@pytest.mark.parametrize("structure", ["dense", "hierarchical(2,3)", "triu_toeplitz"])
def test_inputs_in_parts(structure):
    whole = trained((ingot.SINGD, structure))
    with patch.object(statistics, "CHUNK", 2000):
        assert_same(trained((ingot.SINGD, structure)), whole)


def test_parts_are_as_small_as_they_should_be():
    seen = []
    inputs = ingot.layers.convolution.ConvolutionAdapter.inputs

    def watched(self, module, x, g):
        seen.append(len(x))
        return inputs(self, module, x, g)

    with (
        patch.object(statistics, "CHUNK", 2 * 2 * 64 * 9),  # two samples of the first layer, unfolded
        patch.object(ingot.layers.convolution.ConvolutionAdapter, "inputs", watched),
    ):
        trained((ingot.SINGD, "dense"), precond_every=100, precond_warmup=0)
    assert seen[-3:] == [2, 2, 2]


@pytest.mark.parametrize("structure", ["diagonal", "dense", "block_diagonal(4)"])
def test_layers_beside_each_other_share_their_inputs_gram_matrix(structure):
    model = Attention().double()
    optimizer = ingot.SINGD(model, structure=structure)
    x = torch.randn(3, 40, 12, dtype=torch.float64)
    counted = []
    cls = type(optimizer._layers[model.q.weight].structures[0])
    gram_beside = cls.gram_beside

    def watched(self, x, constant):
        counted.append(constant)
        return gram_beside(self, x, constant)

    with patch.object(cls, "gram_beside", watched):
        model(x).square().sum().backward()
    # Five layers have five sides of gradients, and three different inputs.
    assert (counted.count(None), counted.count(1.0)) == (5, 3)
    assert optimizer._now.grams._last is not None
    optimizer.step()
    assert optimizer._now.grams._last is None  # the inputs are let go


def test_inputs_that_change_in_place_are_not_taken_for_the_same():
    grams, x = statistics.Grams(), torch.randn(4, 30)
    before = grams.of(Dense(4), x, None)
    assert grams.of(Dense(4), x, None) is before
    x.mul_(2)
    torch.testing.assert_close(grams.of(Dense(4), x, None), 4 * before)
    assert grams.of(Dense(5), x, 1.0).numel() == 25
    assert grams.of(Diagonal(4), x, None).numel() == 4


# --- Batches of layers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_layers_updated_together_or_one_by_one(kind):
    together = trained(kind)
    with patch.object(updating, "LARGE", -1):
        assert_same(trained(kind), together)
    with patch.object(updating, "MANY", 1):
        assert_same(trained(kind), together)


def test_layers_of_one_kind_are_updated_at_once():
    model = network()
    optimizer = ingot.SINGD(model, structure="diagonal")
    batches = []
    update = type(optimizer.rule).update

    def watched(self, structures, state, *rest):
        batches.append(tuple(state["K"].shape))
        return update(self, structures, state, *rest)

    with patch.object(type(optimizer.rule), "update", watched):
        train(model, optimizer, 1)
    assert (5, 13) in batches  # the five of the attention, with bias
    assert sum(shape[0] if len(shape) > 1 and shape[1:] != (18,) else 1 for shape in batches) == 11
    for layer in optimizer._layers.values():  # and nobody keeps the whole batch alive
        for value in optimizer.state[layer.weight].values():
            if torch.is_tensor(value):
                assert value.untyped_storage().nbytes() == value.nbytes


def test_a_bad_batch_of_one_layer_does_not_touch_the_others():
    model = Attention().double()
    optimizer = ingot.SINGD(model, structure="diagonal", precond_every=1)
    for step in range(2):
        optimizer.zero_grad()
        mixed = model(torch.randn(3, 4, 12, dtype=torch.float64))
        if step:
            before = {p: optimizer.state[p]["K"].clone() for p in (model.out.weight, model.last.weight)}
            model.last.weight.register_hook(lambda g: g)
            mixed.register_hook(lambda g: g * torch.nan)
        mixed.square().sum().backward()
        if step:
            for layer in (model.q, model.k, model.v, model.out):
                optimizer._layers[layer.weight].pending = None
        with pytest.warns(ingot.HealthWarning) if step else nullcontext():
            optimizer.step()
    assert torch.equal(optimizer.state[model.last.weight]["K"], before[model.last.weight])
    assert optimizer.state[model.last.weight]["skipped"].item() == 1
    assert optimizer.state[model.out.weight]["skipped"].item() == 0


# --- Weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, ingot.PAPER, {"momentum": 0.0}, {"maximize": True}], ids=str)
def test_diagonal_factors_as_numbers_for_rows_and_columns(settings):
    kind = ingot.SINGD, "diagonal"
    scaled = trained(kind, **settings)
    with patch.object(natural, "scales", lambda *_: None):
        assert_same(trained(kind, **settings), scaled)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_layers_in_one_bucket_or_each_in_its_own(kind):
    together = trained(kind)
    with patch.object(stepping, "_buckets", lambda layers: [[layer] for layer in layers]):
        assert_same(trained(kind), together)


def test_no_bucket_is_larger_than_the_largest_layer():
    model = network()
    layers = list(ingot.SINGD(model)._layers.values())
    buckets = stepping._buckets(layers)
    assert [layer for bucket in buckets for layer in bucket] == layers
    sizes = [sum(layer.weight.numel() for layer in bucket) for bucket in buckets]
    assert max(sizes) == max(layer.weight.numel() for layer in layers)
    assert 1 < len(buckets) < len(layers) / 2
    assert stepping._buckets([]) == []


def test_momenta_have_memory_of_their_own():
    model = network()
    optimizer = ingot.SINGD(model, structure="block_diagonal(4)")
    train(model, optimizer, 2)
    for p in model.parameters():
        momentum = optimizer.state[p].get("momentum_buffer")
        if momentum is not None:
            assert momentum.untyped_storage().nbytes() == momentum.nbytes
            assert momentum.stride() == p.stride()


def test_gradients_stay_as_they_are():
    class Nothing(Diagonal):
        """A structure that changes nothing, and makes nothing new."""

        square = None

        def apply(self, a, x):
            return x

    for bias in (True, False):
        model = nn.Linear(4, 3, bias=bias)
        optimizer = ingot.SINGD(model, structure=Nothing)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().sum().backward()
            before = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_a_natural_gradient_that_overflows_counts_as_zero():
    model = nn.Linear(3, 2)
    optimizer = ingot.SINGD(model, structure="diagonal", precond_every=100, precond_warmup=0)
    for factor in (1.0, 1e25):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        before = optimizer.state[model.weight].get("momentum_buffer", torch.ones(1)).clone()
        with nullcontext() if factor == 1 else pytest.warns(ingot.HealthWarning):
            optimizer.state[model.weight].get("K", torch.ones(1)).mul_(factor)
            optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(optimizer.state[model.weight]["momentum_buffer"], 0.9 * before)
    assert optimizer.state[model.weight]["dropped"].item() == 1


# --- Weights in one go, or in parts -----------------------------------------------------------------------


def faulty_training(**settings) -> list[torch.Tensor]:
    """Past the first steps, with bad and with far too large gradients among the good ones."""
    model = network()
    optimizer = ingot.SINGD(model, structure="diagonal", lr=0.01, precond_every=3, **settings)
    train(model, optimizer, 11)
    for name, factor in (("", 1.0), ("6.weight", torch.nan), ("", 1.0), ("11.weight", 1e6), ("", 1.0)):
        optimizer.zero_grad()
        images = torch.randn(6, 2, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        cross_entropy(model(images), torch.arange(6) % 5).backward()
        if name:
            model.get_parameter(name).grad.mul_(factor)
        with warnings.catch_warnings(action="ignore", category=HealthWarning):
            optimizer.step()
    found = [state[k] for state in optimizer.state.values() for k in ("size", "dropped") if k in state]
    assert sum(state["dropped"] for state in optimizer.state.values() if "dropped" in state) == 2
    momenta = [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
    return [*(p.detach().clone() for p in model.parameters()), *momenta, *found]


@pytest.mark.parametrize("settings", [{}, {"max_relative_step": None}, {"weight_decay": 0.0}], ids=str)
def test_large_weights_in_parts(settings):
    expected = faulty_training(**settings)
    descend, calls = rows.RowSteps.descend, []

    def watched(self, *args, **kwargs):
        calls.append(len(self._all[0]))
        return descend(self, *args, **kwargs)

    with (
        patch.object(rows, "LARGE", 20),
        patch.object(rows, "CHUNK", 30),
        patch.object(rows.RowSteps, "descend", watched),
    ):
        assert_same(faulty_training(**settings), expected)
    assert len(calls) > 20


@pytest.mark.parametrize("case", ["no learning rate", "stored by columns"])
def test_large_weights_that_are_no_usual_ones(case):
    def trained_layer() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(7, 6).double()
        if case == "stored by columns":
            layer.weight = nn.Parameter(layer.weight.detach().mT.contiguous().mT)
        optimizer = ingot.SINGD(layer, structure="diagonal", precond_every=20, precond_warmup=0)
        for step in range(14):
            optimizer.zero_grad()
            layer(torch.randn(4, 7, dtype=torch.float64)).square().sum().backward()
            for group in optimizer.param_groups:
                group["lr"] = 0.0 if case == "no learning rate" and step > 11 else 1e-2
            optimizer.step()
        return layer.weight.detach(), optimizer.state[layer.weight]["momentum_buffer"]

    expected = trained_layer()
    with patch.object(rows, "LARGE", 20), patch.object(rows, "CHUNK", 16):
        assert_same(trained_layer(), expected)


def test_steps_in_parts_allocate_nothing_of_the_size_of_the_weight():
    layer = nn.Linear(64, 48)
    optimizer = ingot.SINGD(layer, structure="diagonal", precond_every=20, precond_warmup=0)
    for _ in range(12):
        layer(torch.randn(4, 64)).square().sum().backward()
        with patch.object(rows, "LARGE", 100), patch.object(rows, "CHUNK", 128), Largest() as watch:
            optimizer.step()
        optimizer.zero_grad()
    assert 128 <= watch.numel < 64 * 48 / 4


class Largest(TorchDispatchMode):
    """Watches how large what is allocated becomes."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in given:
            self.numel = max(self.numel, found.untyped_storage().nbytes() // found.itemsize)
        return found


# --- Small weights in few calls ---------------------------------------------------------------------------


@pytest.fixture
def small_steps():
    """Which steps of small layers were taken, and which were left to the long way."""
    taken = []

    def watched(*args):
        sizes = move_momenta(*args)
        taken.append(sizes is not None)
        return sizes

    move_momenta = small.Plan.move_momenta
    with patch.object(small.Plan, "move_momenta", watched):
        yield taken


WITHOUT_SMALL = patch.object(small, "SMALL", -1)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_small_weights_in_few_calls(kind, small_steps):
    def settled() -> list[torch.Tensor]:
        model = network()
        settings = {"lr": 0.01, "precond_every": 3, "precond_warmup": 2}
        return train(model, kind[0](model, structure=kind[1], **settings), 16)

    with WITHOUT_SMALL:
        expected = settled()
    assert not small_steps
    assert_same(settled(), expected)
    assert len(small_steps) >= 4 * 10  # layers
    assert all(small_steps)


@pytest.mark.parametrize(
    "structure",
    ["block_diagonal(4)", ("dense", "block_diagonal(2)"), ("diagonal", "block_diagonal(5)")],
    ids=str,
)
@pytest.mark.parametrize("keep", [True, False])
def test_small_weights_whose_rows_are_taken_in_parts(structure, keep, small_steps):
    def settled() -> list[torch.Tensor]:
        model = network()
        settings = {"lr": 0.01, "precond_every": 3, "precond_warmup": 2, "cache_products": keep}
        optimizer = ingot.SINGD(model, structure=structure, **settings)
        found = train(model, optimizer, 16)
        plans = [layer.plan for layer in optimizer._layers.values() if layer.plan is not None]
        apart.extend(piece.height < plan._matrix.shape[-2] for plan in plans for piece in plan._pieces)
        return found

    apart: list[bool] = []
    with WITHOUT_SMALL:
        expected = settled()
    with patch.object(small, "PART", 20):
        assert_same(settled(), expected)
    assert len(small_steps) >= 4 * 10
    assert all(small_steps)
    assert any(apart) == keep  # squares that are made anew are made for all rows at once


def test_small_weights_with_gradients_that_are_refused(small_steps):
    with WITHOUT_SMALL:
        expected = faulty_training()
    assert_same(faulty_training(), expected)
    assert small_steps.count(False) == 2


def test_small_weights_with_schedules_and_groups(small_steps):
    with WITHOUT_SMALL:
        expected = scheduled_training()
    assert_same(scheduled_training(), expected)
    assert all(small_steps)
    assert len(small_steps) == 2 * 5  # of 6 settled ones: at one, natural gradients are looked at


@pytest.mark.parametrize("structure", ["block_diagonal(2)", "diagonal"])
def test_small_weights_without_learning_rate_or_stored_by_columns(structure, small_steps):
    def trained_layers() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 6), nn.Embedding(6, 6), nn.Linear(6, 5)).double()
        model[2].weight = nn.Parameter(model[2].weight.detach().mT.contiguous().mT)
        optimizer = ingot.SINGD(model, structure=structure, precond_every=20, precond_warmup=0)
        for step in range(16):
            optimizer.zero_grad()
            x = model[0](torch.randn(4, 7, dtype=torch.float64)) + model[1](torch.arange(4))
            model[2](x).square().sum().backward()
            for group in optimizer.param_groups:
                group["lr"] = 0.0 if step > 13 else 1e-2
            gradients = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
        return [p.detach() for p in model.parameters()]

    with WITHOUT_SMALL:
        expected = trained_layers()
    assert_same(trained_layers(), expected)
    assert len(small_steps) == 3 * 6


@pytest.mark.parametrize("structure", ["block_diagonal(4)", "diagonal", "dense"])
def test_small_weights_that_are_stored_in_another_order_from_some_step_on(structure, small_steps):
    def ended() -> list[torch.Tensor]:
        model = network()
        optimizer = ingot.SINGD(model, lr=0.01, structure=structure, precond_every=9, precond_warmup=1)
        train(model, optimizer, 13)
        model.to(memory_format=torch.channels_last)
        return train(model, optimizer, 4)

    with WITHOUT_SMALL:
        expected = ended()
    assert not small_steps
    assert_same(ended(), expected)
    assert all(small_steps)


def _load(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _replace(key: str, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        if key in state:
            state[key] = state[key] * torch.linspace(1, 3, state[key].numel()).view(state[key].shape)


def _scale(key: str, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        if key in state:
            state[key].mul_(3)


def _set(name: str, value: object, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0][name] = value


def _reorder(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["lr"] = 0.03
    optimizer.param_groups.reverse()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})  # which looks where all others are


CHANGES = {
    "loaded": _load,
    "another K": partial(_replace, "K"),
    "another C": partial(_replace, "C"),
    "another momentum": partial(_replace, "momentum_buffer"),
    "K in its place": partial(_scale, "K"),
    "C in its place": partial(_scale, "C"),
    "less momentum": partial(_set, "momentum", 0.5),
    "no momentum": partial(_set, "momentum", 0.0),
    "other momentum for biases": lambda optimizer: optimizer.param_groups[1].update(momentum=0.5),
    "groups in another order": _reorder,
    "upwards": partial(_set, "maximize", True),
    "paper's length": partial(_set, "normalize_step", False),
    "paper's decay": partial(_set, "decoupled_weight_decay", False),
    "no cache": partial(_set, "cache_products", False),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_small_weights_when_something_changes_between_steps(change, small_steps):
    """What their plans were made of is another tensor, number or setting at the next step."""

    def ended() -> list[torch.Tensor]:
        model = network()
        optimizer = ingot.SINGD(
            model,
            [{"params": "*.bias"}],
            lr=0.01,
            structure="block_diagonal(4)",
            cache_products=True,
            precond_every=30,
            precond_warmup=1,
        )
        train(model, optimizer, 12)
        change(optimizer)
        weights = train(model, optimizer, 2)
        return [*weights, *(state["momentum_buffer"] for state in optimizer.state.values() if "K" in state)]

    with WITHOUT_SMALL:
        expected = ended()
    assert not small_steps
    assert_same(ended(), expected)
    assert small_steps.count(True) >= 11


def test_small_weights_whose_natural_gradients_are_looked_at(small_steps):
    def gains() -> list[torch.Tensor]:
        model = network()
        optimizer = ingot.SINGD(model, lr=0.01, structure="block_diagonal(4)", precond_warmup=30)
        train(model, optimizer, 15)
        before = [state["gain"].clone() for state in optimizer.state.values() if "K" in state]
        train(model, optimizer, 7)  # among them the 21st update
        after = [state["gain"] for state in optimizer.state.values() if "K" in state]
        # Attention to a single place leaves queries and keys without gradients.
        assert sum(bool(one != other) for one, other in zip(before, after, strict=True)) == len(after) - 2
        return after

    with WITHOUT_SMALL:
        expected = gains()
    assert not small_steps
    assert_same(gains(), expected)
    # The first of 12 settled steps of 11 layers is such a one, and there were no plans before it.
    assert small_steps == [True] * 11 * 11


@pytest.mark.parametrize("structure", ["block_diagonal(4)", "diagonal", "dense"])
def test_products_of_new_factors_take_the_place_of_the_old_ones(structure):
    torch.manual_seed(0)
    layer = nn.Linear(12, 8)
    optimizer = ingot.SINGD(layer, structure=structure, cache_products=True, precond_warmup=30)
    watched = next(iter(optimizer._layers.values()))

    def products() -> list[rules.Product]:
        layer(torch.randn(4, 12, dtype=layer.weight.dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [watched.kept.k, watched.kept.c]

    for dtype in (torch.float32, torch.float64):  # for the second, the first one's place will not do
        layer.to(dtype)
        first = products()
        before = [product.entries.clone() for product in first]
        for name, product, old, now in zip("KC", first, before, products(), strict=True):
            assert now is product
            assert not torch.equal(now.entries, old)
            new = product.square.of(optimizer.state[layer.weight][name])
            torch.testing.assert_close(now.entries, new, rtol=0, atol=0)


def test_factors_of_another_dtype_are_left_to_the_long_way(small_steps):
    for dtype in (None, torch.bfloat16):
        model = network()
        train(model, ingot.SINGD(model, factor_dtype=dtype, precond_every=3, precond_warmup=2), 12)
        assert bool(small_steps) == (dtype is None)
        small_steps.clear()


def test_small_weights_share_memory_that_is_there_in_steps_alone():
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(6)))
    optimizer = ingot.SINGD(model, structure="block_diagonal(8)", precond_every=30, precond_warmup=0)
    for _ in range(13):
        model(torch.randn(4, 48)).square().sum().backward()
        with Allocated() as watch:
            optimizer.step()
        optimizer.zero_grad()
    assert watch.large == 0
    (scratch,) = optimizer._now.scratch.values()
    assert scratch.size == 48 * 49  # that of one layer
    assert memory_of(scratch) == [0, 0]


def test_products_in_parts_take_less_memory():
    def lent(part: int) -> list[int]:
        def watched(plan, rates):
            sizes.append(memory_of(plan.scratch))
            return move_momenta(plan, rates)

        sizes: list[list[int]] = []
        model = nn.Linear(48, 48)
        optimizer = ingot.SINGD(model, structure="block_diagonal(8)", precond_every=30, precond_warmup=0)
        with patch.object(small, "PART", part), patch.object(small.Plan, "move_momenta", watched):
            for _ in range(13):
                model(torch.randn(4, 48)).square().sum().backward()
                optimizer.step()
        return sizes[-1]

    move_momenta = small.Plan.move_momenta
    assert lent(48 * 48) == [4 * 48 * 49, 4 * 48 * 48]  # the bias is by itself
    assert lent(48 * 16) == [4 * 48 * 49, 4 * 48 * 16]


def memory_of(scratch: small.Scratch) -> list[int]:
    """Bytes of natural gradients, and of what is on the way to them."""
    return [tensor.untyped_storage().nbytes() for tensor in (scratch.natural, scratch._spare)]


class Allocated(TorchDispatchMode):
    """Counts how often memory of the size of a weight is asked for."""

    large = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        is_new = function in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)
        self.large += is_new and found.numel() >= 48 * 48
        return found


COMPILED = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@COMPILED
def test_compiled_steps():
    with patch.object(shortcuts, "take_steps", wraps=compiled.take_steps) as taken:
        found = faulty_training(compile=True)
    assert taken.call_count == 5
    # Where a gradient was refused, steps have other lengths, but none is longer than three usual ones.
    for actual, expected in zip(found[:20], faulty_training()[:20], strict=True):
        assert (actual - expected).abs().max() < 0.03


@COMPILED
def test_compiled_steps_are_those_of_the_operations_one_by_one():
    kind, settings = (ingot.SINGD, "diagonal"), {"precond_warmup": 0}
    with patch.object(stability, "SETTLED_STEPS", 2):
        assert_same(trained(kind, compile=True, **settings), trained(kind, **settings))


@COMPILED
def test_steps_that_are_to_be_compiled_from_some_step_on():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))
    optimizer = ingot.SINGD(model, structure="diagonal", precond_every=30, precond_warmup=0)
    with patch.object(shortcuts, "take_steps", wraps=compiled.take_steps) as taken:
        for step in range(13):
            optimizer.param_groups[0]["compile"] = step == 12
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
    assert [len(call.args[0]) for call in taken.call_args_list] == [2]


def scheduled_training(**settings) -> list[torch.Tensor]:
    """With another learning rate, momentum and weight decay at each step, and for biases other ones still."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 12)).double()
    bias = {"params": "*.bias", "weight_decay": 0.3, "max_relative_step": None}
    optimizer = ingot.SINGD(model, [bias], structure="diagonal", precond_every=3, **settings)
    for step in range(16):
        for group in optimizer.param_groups:
            group["lr"], group["momentum"] = 1e-3 * (step + 1), 0.95 - 0.01 * step
            group["weight_decay"] += 0.1
        optimizer.zero_grad()
        model(torch.randn(8, 20, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_momenta_that_differ_are_left_to_single_operations():
    model = nn.Linear(20, 16)
    bias = {"params": "bias", "momentum": 0.5}
    optimizer = ingot.SINGD(model, [bias], structure="diagonal", precond_warmup=0, compile=True)
    with patch.object(shortcuts, "take_steps") as taken:
        for _ in range(13):
            optimizer.zero_grad()
            model(torch.randn(8, 20)).square().mean().backward()
            optimizer.step()
    assert not taken.called


@COMPILED
def test_schedules_do_not_compile_anew():
    compiled._function.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert_same(scheduled_training(compile=True), scheduled_training())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(("rows_of", "columns_of"), [(513, 513), (700, 300), (512, 100), (20, 900)])
def test_symmetric_products_by_halves(rows_of, columns_of):
    x = torch.randn(rows_of, columns_of, dtype=torch.float64)
    s = torch.randn(columns_of, columns_of, dtype=torch.float64)
    for a, b in ((x, x), (x.mT.contiguous().mT, x), (x, x @ (s + s.mT))):
        torch.testing.assert_close(dense.symmetric_product(a, b), a @ b.mT)
    s, entries = Dense(rows_of), torch.randn(rows_of**2, dtype=torch.float64)
    torch.testing.assert_close(
        s.add_self_gram(entries, entries, 0.3, 0.7), 0.3 * entries + 0.7 * s.self_gram(entries)
    )
