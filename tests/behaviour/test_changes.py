"""Models that change, are copied, wrapped or built without data; optimizers that end."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ingot import KFAC, SINGD
from tests.behaviour.training import (
    FAMILY,
    PLAIN,
    SPARSE,
    LanguageModel,
    Shared,
    Uses,
    assert_identical,
    assert_same,
    backward,
    batches,
    held,
    hooks,
    mlp,
    moved,
    pending,
    squares,
    statistics,
    train,
    train_language,
    trained,
)

pytestmark = pytest.mark.usefixtures("float64")


# --- Models that change -------------------------------------------------------------------------------------


@contextmanager
def overwriting(overwrite: bool = True) -> Iterator[None]:
    """Whether a converted module gets new parameters instead of new data in the old ones."""
    torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
    try:
        yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def in_dtype(model: nn.Module, x: Tensor) -> None:
    backward(model, x.to(next(model.parameters()).dtype))


@pytest.mark.parametrize("overwrite", [False, True], ids=["same parameters", "new parameters"])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("factor_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_state_follows_a_model_that_changes_its_dtype(dtype, factor_dtype, momentum, overwrite):
    """So do the factors, unless they were given a dtype of their own."""
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)).float()
    optimizer = SINGD(model, lr=0.1, factor_dtype=factor_dtype, momentum=momentum)
    train(model, optimizer, backward=in_dtype)
    with overwriting(overwrite):
        model.to(dtype)
    before = held(model, optimizer)
    after = train(model, optimizer, backward=in_dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert all(p.isfinite().all() for p in model.parameters())
    assert moved(before, after) >= {"0.weight", "0.bias", "1.bias", "2.weight", "2.bias"}
    assert set(optimizer.state) == trained(optimizer) == set(model.parameters())
    _, state = after["0.weight"]
    assert state["steps"] == state["updates"] == 6
    assert {state[name].dtype for name in ("K", "C")} == {factor_dtype or dtype}
    buffers = {"momentum_buffer", "exp_avg", "exp_avg_sq"}
    assert {v.dtype for s in optimizer.state.values() for k, v in s.items() if k in buffers} == {dtype}


@pytest.mark.parametrize("optimizer_class", FAMILY)
@pytest.mark.parametrize("settings", [{}, PLAIN], ids=["default", "paper"])
def test_a_longer_dtype_alone_changes_no_step(optimizer_class, settings):
    """Training goes on where it was, up to the rounding of what was in float32."""
    model, other = mlp().float(), mlp()
    optimizer, of_other = (optimizer_class(m, weight_decay=0.1, **settings) for m in (model, other))
    train(model, optimizer, backward=in_dtype)
    train(other, of_other)
    model.double()
    torch.testing.assert_close(
        train(model, optimizer, seed=4), train(other, of_other, seed=4), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("optimizer_class", FAMILY)
@pytest.mark.parametrize("keys", [["weight"], ["bias"], ["weight", "bias"]], ids="+".join)
@pytest.mark.parametrize("steps", [3, 4], ids=["between updates", "before an update"])
def test_a_parameter_replaced_by_one_of_its_shape_carries_its_state_on(optimizer_class, keys, steps):
    def run(replaces: bool) -> dict:
        model = mlp()
        optimizer = optimizer_class(model, **SPARSE)
        train(model, optimizer, steps)
        for key in keys if replaces else ():
            setattr(model[0], key, nn.Parameter(getattr(model[0], key).detach().clone()))
        after = train(model, optimizer, 4, seed=2)
        assert set(optimizer.state) == trained(optimizer) == set(model.parameters())
        return after

    assert_identical(run(True), run(False))


def test_gradients_that_a_conversion_took_along_are_forgotten_by_zero_grad():
    """With new parameters for old ones torch also makes new gradients."""

    def run(converts: bool) -> dict:
        model = mlp()
        optimizer = SINGD(model, **PLAIN)
        train(model, optimizer)
        saved, before = copy.deepcopy(model.state_dict()), set(model.parameters())
        with overwriting(converts):
            if converts:
                model.float().double()
                assert not before & set(model.parameters())
                model.load_state_dict(saved)
        return train(model, optimizer)

    assert_identical(run(True), run(False))


@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_an_embedding_resized_together_with_its_head_starts_afresh(optimizer_class):
    model = LanguageModel()
    optimizer = optimizer_class(model)
    train_language(model, optimizer)
    resized = torch.cat((model.embedding.weight.detach(), torch.randn(2, 4)))
    model.embedding.weight = model.head.weight = nn.Parameter(resized.clone())
    _, state = train_language(model, optimizer)["embedding.weight"]
    assert not torch.equal(model.head.weight[:7], resized[:7])
    assert not torch.equal(model.head.weight[7:], resized[7:])
    assert (state["steps"], state["updates"]) == (3, 3)
    assert "exp_avg" not in state
    assert optimizer.state[model.middle.weight]["steps"] == 6
    assert set(optimizer.state) == trained(optimizer) == set(model.parameters())


def test_a_head_for_more_classes_makes_the_steps_of_one_that_was_always_so_large():
    def run(enlarges: bool) -> dict:
        model = mlp(4, 5, 3 if enlarges else 4)
        optimizer = SINGD(model, [{"params": "0.*", "lr": 0.0}])
        if enlarges:
            train(model, optimizer)
            head = mlp(4, 5, 4)[2]
            model[2].weight, model[2].bias = head.weight, head.bias
        train(model, optimizer, seed=2)
        assert optimizer.state[model[0].weight]["steps"] == (6 if enlarges else 3)
        return held(model[2], optimizer)

    assert_same(run(True), run(False))


@pytest.mark.parametrize("moves", ["head", "embedding"])
def test_an_embedding_and_a_head_untied_in_the_middle_are_both_trained(moves):
    model = LanguageModel()
    optimizer = SINGD(model)
    train_language(model, optimizer)
    layer = model.get_submodule(moves)
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    before = held(model, optimizer)
    after = train_language(model, optimizer)
    assert moved(before, after) == set(before)
    assert not torch.equal(model.head.weight, model.embedding.weight)
    assert set(optimizer.state) == trained(optimizer) == set(model.parameters())
    for layer in (model.head, model.embedding):
        assert optimizer.state[layer.weight]["updates"] >= 3
        assert "exp_avg" not in optimizer.state[layer.weight]
    u, c = (optimizer.state[model.embedding.weight][name].numel() for name in ("K", "C"))
    assert (u, c) == (7, 16)


def test_two_linear_layers_untied_in_the_middle_are_both_trained_as_one_and_a_new_one():
    model = Shared(tied=True)
    optimizer = SINGD(model)
    train(model, optimizer)
    model.second.weight = nn.Parameter(model.second.weight.detach().clone())
    before = held(model, optimizer)
    assert moved(before, train(model, optimizer)) == set(before)
    assert [optimizer.state[m.weight]["steps"] for m in (model.first, model.second)] == [6, 3]
    assert optimizer.state[model.second.weight]["K"].numel() == 16  # no bias


def test_layers_tied_in_the_middle_add_their_statistics_up():
    model = mlp(4, 4, 4, bias=False)
    optimizer, uses = SINGD(model, **PLAIN), Uses(model[0], model[2])
    model[2].weight = model[0].weight
    backward(model, *batches(1))
    u, g = statistics(optimizer, model[0].weight)
    torch.testing.assert_close((u, g), (uses.u(), uses.g(terms=6)))
    optimizer.step()
    assert optimizer.state[model[0].weight]["steps"] == 1
    assert trained(optimizer) == set(model.parameters()) == set(optimizer.state)  # the other one is forgotten


@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_a_module_replaced_by_one_of_its_kind_carries_its_state_on(optimizer_class):
    def run(replaces: bool) -> dict:
        model = mlp()
        optimizer = optimizer_class(model, **SPARSE)
        train(model, optimizer, 4)
        if replaces:
            old = model[0]
            model[0] = copy.deepcopy(old)
        after = train(model, optimizer, 4, seed=2)
        assert not replaces or not old._forward_hooks
        return after

    assert_identical(run(True), run(False))


def test_a_group_added_after_a_change_does_not_hide_the_change():
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    optimizer = SINGD(model, model[0].parameters())
    model[0] = nn.Linear(4, 3)
    optimizer.add_param_group({"params": model[1].parameters()})
    assert trained(optimizer) == set(model.parameters())


def test_a_module_wrapped_by_another_keeps_its_factors():
    """As an adapter does that is injected into a model: the layer's weight gets another name."""
    model = mlp()
    optimizer = SINGD(model)
    train(model, optimizer)
    model[0] = nn.Sequential(model[0], nn.Identity())
    train(model, optimizer)
    assert optimizer.state[model[0][0].weight]["updates"] == 6
    assert optimizer.describe().rows[0].name == "0.0.weight"


def test_a_bias_taken_away_is_forgotten():
    model = mlp()
    optimizer = SINGD(model)
    train(model, optimizer)
    model[0].bias = None
    _, state = train(model, optimizer)["0.weight"]
    assert state["updates"] == 3  # without the bias the factors have other sizes and begin anew
    assert trained(optimizer) == set(model.parameters()) == set(optimizer.state)


# --- Copies, and the end of an optimizer --------------------------------------------------------------------


def test_a_moving_average_of_the_model_leaves_no_trace_in_the_originals_statistics():
    def run(averages: bool) -> dict:
        model = mlp()
        optimizer = SINGD(model, **PLAIN)
        train(model, optimizer, 1)
        average = copy.deepcopy(model)

        def both(model: nn.Module, x: Tensor) -> None:
            backward(model, x)
            if averages:
                backward(average, 2 * x)
            with torch.no_grad():
                for p, q in zip(average.parameters(), model.parameters(), strict=True):
                    p.lerp_(q, 0.1)

        return train(model, optimizer, backward=both)

    assert_identical(run(True), run(False))


COPY = {"deepcopy": copy.deepcopy, "pickle": lambda pair: pickle.loads(pickle.dumps(pair))}


@pytest.mark.parametrize("way", COPY)
@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_a_copied_pair_is_independent_and_goes_on_exactly_like_the_original(optimizer_class, way):
    model = nn.Sequential(mlp(), nn.LayerNorm(3))
    optimizer = optimizer_class(model, factor_dtype=torch.float32, **SPARSE)
    before = train(model, optimizer)
    twin, of_twin = COPY[way]((model, optimizer))
    assert type(of_twin) is optimizer_class
    after = train(twin, of_twin, 4, seed=2)
    assert_identical(held(model, optimizer), before)
    assert_identical(train(model, optimizer, 4, seed=2), after)
    assert_identical(held(twin, of_twin), after)


@pytest.mark.parametrize("way", COPY)
@pytest.mark.parametrize("frozen", ["bias", "weight"])
def test_a_pair_copied_while_a_part_of_a_layer_is_frozen_goes_on_like_the_original(way, frozen):
    model = mlp()
    optimizer = SINGD(model)
    train(model, optimizer)
    model[0].get_parameter(frozen).requires_grad_(False)
    twin, of_twin = COPY[way]((model, optimizer))
    for net, of_net in ((model, optimizer), (twin, of_twin)):
        train(net, of_net)
        net.requires_grad_(True)
        train(net, of_net)
    assert_identical(held(model, optimizer), held(twin, of_twin))


def test_a_layer_frozen_in_part_keeps_its_factors_when_another_parameter_is_replaced():
    def run(replaces: bool) -> dict:
        model = mlp()
        optimizer = SINGD(model)
        train(model, optimizer)
        model[0].bias.requires_grad_(False)
        if replaces:
            model[2].weight = nn.Parameter(model[2].weight.detach().clone())
        return train(model, optimizer)

    assert_identical(run(True), run(False))


@pytest.mark.parametrize("way", COPY)
def test_a_copied_pair_keeps_its_kind_of_fisher(way):
    model = mlp()
    model, optimizer = COPY[way]((model, SINGD(model, fisher="separate")))
    backward(model, *batches(1))
    assert pending(optimizer) == [False, False]
    optimizer.curvature_backward(model(*batches(1)), "mse")
    assert pending(optimizer) == [True, True]


@pytest.mark.parametrize("way", COPY)
def test_a_model_copied_alone_is_like_one_that_never_had_an_optimizer(way):
    model = mlp()
    original = SINGD(model)
    before, twin, plain = train(model, original), COPY[way](model), mlp()
    plain.load_state_dict(model.state_dict())
    assert not any(hook.taps for hook in hooks(twin))
    assert_identical(train(twin, SINGD(twin)), train(plain, SINGD(plain)))
    assert_identical(held(model, original), before)


@pytest.mark.parametrize("way", ["detach", "garbage collection"])
@pytest.mark.parametrize("made", ["anew", *COPY])
def test_hooks_are_removed_with_their_optimizer(made, way):
    model = LanguageModel()
    optimizer = SINGD(model)
    if made in COPY:
        model, optimizer = COPY[made]((model, optimizer))
    train_language(model, optimizer)
    assert len(hooks(model)) == 3
    if way == "detach":
        optimizer.detach()
    else:
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None
    assert hooks(model) == []


def test_after_detach_the_factors_stay_and_the_weights_go_on():
    model = mlp()
    optimizer = SINGD(model)
    before = train(model, optimizer)
    optimizer.detach()
    after = train(model, optimizer)
    assert moved(before, after) == set(before)
    for name in ("0.weight", "2.weight"):
        for key in ("K", "C", "trace_u", "trace_g"):
            assert torch.equal(after[name][1][key], before[name][1][key])


@pytest.mark.parametrize("inside", ["forward and backward", "backward", "forward"])
def test_nothing_is_seen_while_paused(inside):
    def run(extra: bool) -> dict:
        def both(model: nn.Module, x: Tensor) -> None:
            backward(model, x)
            if not extra:
                return
            gradients = [p.grad.clone() for p in model.parameters()]
            with optimizer.paused() if "forward" in inside else nullcontext():
                loss = squares(model(2 * x))
            with optimizer.paused() if "backward" in inside else nullcontext():
                loss.backward()
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.grad = gradient

        model = mlp()
        optimizer = SINGD(model, **PLAIN)
        return train(model, optimizer, backward=both)

    after = run(True)
    assert_identical(after, run(False))
    assert after["0.weight"][1]["updates"] == 3


# --- Wrappers and devices -----------------------------------------------------------------------------------


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrapper", [nn.DataParallel, nn.parallel.DistributedDataParallel])
def test_a_wrapped_model_is_trained_like_the_model_inside(wrapper):
    def run(wrap: Callable[[nn.Module], nn.Module]) -> dict:
        inner = mlp()
        model = wrap(inner)
        optimizer = SINGD(model, [{"params": "0.*", "lr": 0.02}])
        assert [row.name for row in optimizer.describe().rows] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert set(optimizer.param_groups[1]["params"]) == set(inner[0].parameters())
        train(model, optimizer)
        return held(inner, optimizer)

    after = run(wrapper)
    assert_same(after, run(lambda model: model))
    assert after["0.weight"][1]["updates"] == 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_built_without_data_is_trained_whenever_the_optimizer_was_made(when):
    def optimizer_of(model: nn.Module) -> SINGD:
        return SINGD(model, [{"params": "2.*", "lr": 0.02}])

    with torch.device("meta"):
        model = mlp()
    optimizer = optimizer_of(model) if when == "before" else None
    model.to_empty(device="cpu")
    model.load_state_dict(mlp().state_dict())
    optimizer = optimizer or optimizer_of(model)
    plain = mlp()
    assert_identical(train(model, optimizer), train(plain, optimizer_of(plain)))
    assert set(optimizer.state) == trained(optimizer) == set(model.parameters())


# --- Several optimizers, several models ---------------------------------------------------------------------


def test_two_optimizers_of_different_layers_make_the_steps_of_one():
    model, other = mlp(), mlp()
    one, several = SINGD(model), [SINGD(other, [*layer.parameters()]) for layer in (other[0], other[2])]
    train(model, one)
    for x in batches(3):
        for optimizer in several:
            optimizer.zero_grad()
        backward(other, x)
        for optimizer in several:
            optimizer.step()
    for i, optimizer in zip((0, 2), several, strict=True):
        assert_identical(held(model[i], one), held(other[i], optimizer))


def test_a_bias_may_be_left_to_another_optimizer():
    model = nn.Linear(4, 3)
    optimizer, of_bias = SINGD(model, [model.weight], **PLAIN), torch.optim.SGD([model.bias], lr=0.1)
    uses, before = Uses(model), model.bias.detach().clone()
    backward(model, *batches(1))
    torch.testing.assert_close(statistics(optimizer, model.weight), (uses.u(), uses.g(terms=6)))
    optimizer.step()
    assert torch.equal(model.bias, before)
    of_bias.step()
    torch.testing.assert_close(model.bias.detach(), before - 0.1 * model.bias.grad)


def test_two_optimizers_of_one_weight_see_what_one_alone_would():
    model = nn.Linear(4, 3)
    optimizers, uses = [SINGD(model, **PLAIN), KFAC(model, **PLAIN)], Uses(model)
    backward(model, *batches(1))
    for optimizer in optimizers:
        torch.testing.assert_close(statistics(optimizer, model.weight), (uses.u(1.0), uses.g(terms=6)))
    optimizers[1].zero_grad()
    assert [pending(optimizer) for optimizer in optimizers] == [[True], [False]]
    with optimizers[1].paused():
        backward(model, *batches(1))
    assert [pending(optimizer) for optimizer in optimizers] == [[True], [False]]
    optimizers[0].detach()
    optimizers[0].zero_grad()
    backward(model, *batches(1))
    assert [pending(optimizer) for optimizer in optimizers] == [[False], [True]]


def test_several_models_may_share_an_optimizer():
    models, alone = [[mlp(), mlp(4, 3, 2)] for _ in range(2)]
    optimizer = SINGD(nn.ModuleList(models))
    train(
        nn.ModuleList(models), optimizer, backward=lambda all_, x: sum(squares(m(x)) for m in all_).backward()
    )
    for model, single in zip(models, alone, strict=True):
        assert_same(held(model, optimizer), train(single, SINGD(single)))
