"""What a run tells of its health: numbers of each layer, where they are sent, and advice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.tensorboard import SummaryWriter

from ingot import IKFAC, INGD, KFAC, PAPER, SINGD, HealthWarning
from ingot.health import Diagnostics, Reporter, condition
from ingot.rules import Factor
from ingot.structures import bind, parse, registered
from tests.behaviour.faults import dropped, reports, skipped
from tests.behaviour.training import FAMILY, PLAIN, Uses, backward, batches, mlp, squares, train
from tests.structures.oracle import project

OPTIMIZERS = pytest.mark.parametrize("optimizer_class", FAMILY)
NAMES = sorted(set(registered()) - {"upper", "lower"})
INVERTED = ["dense", "block_diagonal", "diagonal"]
PAIRS = [(cls, name) for cls in (SINGD, IKFAC) for name in NAMES] + [(KFAC, name) for name in INVERTED]
STRUCTURES = pytest.mark.parametrize(("optimizer_class", "structure"), PAIRS)

# --- Numbers ----------------------------------------------------------------------------------------------


def dense_preconditioners(optimizer: torch.optim.Optimizer, layer: nn.Module) -> list[Tensor]:
    """K and C, or KFAC's inverses, as matrices."""
    state, structures = optimizer.state[layer.weight], optimizer._layers[layer.weight].structures
    keys = ("K", "C") if "K" in state else ("S_K_inverse", "S_C_inverse")
    return [s.dense(state[key]) for s, key in zip(structures, keys, strict=True)]


@STRUCTURES
@pytest.mark.usefixtures("float64")
def test_traces_conditions_and_gain(optimizer_class, structure):
    model = mlp(6, 5, 3)
    optimizer = optimizer_class(model, structure=structure, precond_every=1)
    train(model, optimizer, 20, 6, 6)
    optimizer.zero_grad()
    backward(model, next(batches(1, 6, 6)))
    layer = model[0]
    gradient = torch.cat((layer.weight.grad, layer.bias.grad[:, None]), 1)
    optimizer.step()
    found = optimizer.diagnostics().layers["0"]
    k, c = dense_preconditioners(optimizer, layer)
    for side, matrix in (("K", k), ("C", c)):
        torch.testing.assert_close(found[f"trace_{side}"], matrix.diagonal().mean())
        torch.testing.assert_close(found[f"condition_{side}"], torch.linalg.cond(matrix))
    natural = c @ gradient @ k if optimizer_class is KFAC else c @ c.mT @ gradient @ k @ k.mT
    torch.testing.assert_close(found["gain"], natural.norm() / gradient.norm())
    assert (found["skipped"], found["dropped"]) == (0, 0)


@pytest.mark.parametrize(("optimizer_class", "structure"), [pair for pair in PAIRS if pair[0] is not KFAC])
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("max_step", [None, 1e-6])
def test_norms_of_the_directions(optimizer_class, structure, max_step):
    """At the first step of the paper K = C = I, and the direction is ½ Π̂(w U + λ I - I)."""
    layer = nn.Linear(5, 3, bias=False)
    settings = {**PLAIN, "structure": structure, "damping": 0.1, "max_factor_step": max_step}
    optimizer = optimizer_class(layer, **settings)
    uses = Uses(layer)
    squares(layer(torch.randn(6, 5))).backward()
    with reports():
        optimizer.step()
    found = optimizer.diagnostics().layers[""]
    u, g = uses.u(), uses.g(6)
    of_u, of_g = (g.trace() / 3, u.trace() / 5) if optimizer_class is SINGD else (1.0, 1.0)
    for side, curvature, weight in (("K", u, of_u), ("C", g, of_g)):
        s = bind(parse(structure), len(curvature))
        m = s.dense(project(s, weight * curvature - 0.9 * torch.eye(len(curvature)))) / 2
        exact = torch.linalg.matrix_norm(m, 2).item()
        bound = exact if max_step else 1.2 * m.norm().item()  # exact if it decides on the step
        assert 0.8 * exact < found[f"norm_m_{side}"] < 1.0001 * bound


def test_of_several_matrices_it_is_the_largest_number():
    layer = nn.Conv1d(4, 6, 2, groups=2)
    optimizer = SINGD(layer, precond_every=1)
    x = torch.randn(5, 4, 3)
    x[:, :2] *= 10
    squares(layer(x)).backward()
    optimizer.step()
    found = optimizer.diagnostics().layers[""]
    k, c = dense_preconditioners(optimizer, layer)
    assert k.shape[0] == c.shape[0] == 2
    for side, matrices in (("K", k), ("C", c)):
        torch.testing.assert_close(
            found[f"trace_{side}"], matrices.diagonal(dim1=-2, dim2=-1).mean(-1).amax()
        )
        torch.testing.assert_close(found[f"condition_{side}"].float(), torch.linalg.cond(matrices).amax())
    assert found["norm_m_K"] == optimizer.state[layer.weight]["norm_m_K"].amax()


@pytest.mark.parametrize("dim", [1, 2, 31, 32, 33, 100, 300])
@pytest.mark.parametrize("spread", [1.0, 3.0, 30.0])
def test_conditions_are_exact_when_small_and_estimated_from_below_when_large(dim, spread):
    generator = torch.Generator().manual_seed(dim)
    s = bind(parse("dense"), dim)
    q, r = (
        torch.linalg.qr(torch.randn(2, dim, dim, dtype=torch.float64, generator=generator))[0] for _ in "qr"
    )
    matrices = q @ torch.logspace(0, 1, dim, spread, dtype=torch.float64).diag() @ r
    found, exact = condition(Factor(s, matrices.flatten(-2))), torch.linalg.cond(matrices)
    assert found.shape == (2,)
    if dim <= 32:
        torch.testing.assert_close(found, exact)
    assert (found <= exact * (1 + 1e-6)).all()
    assert (found >= exact / 2).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_there_is_no_condition_of_what_is_not_finite(value):
    found = condition(Factor(bind(parse("diagonal"), 3), torch.tensor([[1.0, value, 1.0], [1.0, 1.0, 4.0]])))
    assert found[0].isnan()
    assert found[1] == 4


def test_there_are_no_numbers_before_the_first_step_and_the_same_after_a_checkpoint():
    model = mlp()
    optimizer, resumed = SINGD(model), SINGD(model)
    assert optimizer.diagnostics().layers == {}
    train(model, optimizer)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.diagnostics().scalars() == optimizer.diagnostics().scalars()
    assert list(optimizer.diagnostics().layers) == ["0", "2"]


def test_factors_of_a_shorter_dtype():
    model = mlp()
    optimizer = SINGD(model, factor_dtype=torch.bfloat16)
    train(model, optimizer)
    scalars = optimizer.diagnostics().scalars("ingot/")
    k, _ = dense_preconditioners(optimizer, model[0])
    assert scalars["ingot/0/condition_K"] == pytest.approx(torch.linalg.cond(k.float()).item(), rel=1e-3)
    assert scalars["ingot/0/trace_K"] == pytest.approx(k.float().diagonal().mean().item(), rel=1e-5)


def test_the_table_has_a_line_for_each_layer_and_for_parameters_with_bad_gradients():
    model = mlp()
    model.append(nn.LayerNorm(3))
    optimizer = KFAC(model, **PAPER)
    squares(model(next(batches(1)))).backward()
    model[3].weight.grad.fill_(float("nan"))
    with reports() as said:
        optimizer.step()
    assert dropped(said) == {"3.weight": 1}
    diagnostics = optimizer.diagnostics()
    head, *lines = str(diagnostics).splitlines()
    assert head.split() == ["layer", *diagnostics.layers["0"]]
    assert [line.split()[0] for line in lines] == ["0", "2", "3.weight", "3.bias"]
    assert [line.split()[1:] for line in lines[2:]] == [["1"], ["0"]]
    assert float(lines[0].split()[1]) == pytest.approx(diagnostics.scalars()["0/trace_K"], rel=1e-2)


@OPTIMIZERS
def test_neither_steps_nor_diagnostics_wait_for_the_device(optimizer_class, monkeypatch):
    """On the device "meta" there is nothing to wait for: to ask for a number is an error."""
    monkeypatch.setattr(
        torch, "autocast", lambda *args, **kwargs: nullcontext()
    )  # which knows no such device
    model = mlp().append(nn.LayerNorm(3)).to("meta")
    optimizer = optimizer_class(model)
    for _ in range(3):
        optimizer.zero_grad()
        squares(model(torch.empty(6, 4, device="meta"))).backward()
        optimizer.step()
    numbers = optimizer.diagnostics(conditions=False).layers
    assert {value.device.type for found in numbers.values() for value in found.values()} == {"meta"}
    assert numbers.keys() >= {"0", "2"}


# --- Loggers ----------------------------------------------------------------------------------------------


def test_a_summary_writer_gets_the_numbers(tmp_path):
    model = mlp()
    optimizer = SINGD(model)
    with SummaryWriter(tmp_path) as writer:
        optimizer.log_diagnostics(writer, every=2, prefix="health/")
        train(model, optimizer, 5)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = optimizer.diagnostics().scalars("health/")
    assert set(events.Tags()["scalars"]) == set(scalars)
    assert {"health/0/condition_K", "health/2/gain"} <= set(scalars)
    assert [event.step for event in events.Scalars("health/2/gain")] == [2, 4]
    train(model, optimizer, 6)  # to the eleventh update
    assert optimizer.diagnostics().scalars("health/")["health/2/gain"] != scalars["health/2/gain"]


def test_a_function_gets_the_numbers_until_the_handle_is_removed():
    model, seen = mlp(), []
    optimizer = SINGD(model)
    handle = optimizer.log_diagnostics(
        lambda numbers, step: seen.append((numbers, step)), 3, conditions=False
    )
    train(model, optimizer, 6)
    numbers, steps = zip(*seen, strict=True)
    assert steps == (3, 6)
    assert numbers[1] == optimizer.diagnostics(conditions=False).scalars("ingot/")
    assert numbers[0] != numbers[1]
    assert not any("condition" in name for name in numbers[1])
    handle.remove()
    train(model, optimizer, 6)
    assert len(seen) == 2


def test_a_resumed_run_goes_on_with_its_steps():
    model, steps = mlp(), []
    optimizer, resumed = SINGD(model), SINGD(model)
    train(model, optimizer, 5)
    resumed.load_state_dict(optimizer.state_dict())
    resumed.log_diagnostics(lambda numbers, step: steps.append(step), every=4)
    train(model, resumed, 8)
    assert steps == [8, 12]


@pytest.mark.parametrize(
    ("to", "every", "error", "message"),
    [
        ("tensorboard", 100, TypeError, "SummaryWriter or to a function.*'tensorboard'"),
        (None, 100, TypeError, "SummaryWriter or to a function"),
        (print, 0, ValueError, "every must be a whole number of steps, at least 1; got 0"),
        (print, -3, ValueError, "every must be a whole number of steps"),
    ],
)
def test_where_nothing_can_be_sent(to, every, error, message):
    with pytest.raises(error, match=message):
        SINGD(mlp()).log_diagnostics(to, every)


# --- Reports ----------------------------------------------------------------------------------------------


def test_a_report_names_five_layers_and_counts_the_others():
    model = mlp(*[3] * 9)  # eight layers
    optimizer = SINGD(model)
    squares(float("nan") * model(torch.randn(4, 3))).backward()
    with reports() as said:
        optimizer.step()
    assert skipped(said) == dropped(said) == dict.fromkeys(["0", "2", "4", "6", "8"], 1)
    assert all("'8' and 3 more" in text and "optimizer.diagnostics()" in text for text in said)
    assert "inputs or targets that are out of range" in said[0]


def test_troubles_on_other_devices_are_found_now_and_then():
    """Nobody waits for these: it is looked at them once in a hundred steps."""
    numbers = {"a": {"skipped": torch.ones(()), "dropped": torch.zeros(())}, "b": {"dropped": torch.ones(())}}
    weight = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    optimizer = SimpleNamespace(_layers=[weight], diagnostics=lambda conditions: Diagnostics(numbers))
    reporter, found = Reporter(), []
    for _ in range(250):
        with reports() as said:
            reporter.after_step(optimizer)
        found.append((skipped(said), dropped(said)))
    assert [n for n, report in enumerate(found, 1) if any(report)] == [100]
    assert found[99] == ({"a": 1}, {"b": 1})


@pytest.mark.parametrize(
    ("settings", "is_told"),
    [
        ({**PLAIN, "precond_lr": 0.9}, True),
        ({**PLAIN, "precond_lr": 0.9, "max_factor_step": 0.5}, False),
        ({}, False),
    ],
)
@pytest.mark.parametrize("optimizer_class", [SINGD, INGD, IKFAC])
def test_a_rate_of_the_factors_that_is_too_large_is_told_with_the_remedy(optimizer_class, settings, is_told):
    model = mlp()
    optimizer = optimizer_class(model, **settings)
    with reports() as said:
        train(model, optimizer, 4, backward=lambda model, x: squares(10 * model(x)).backward())
    overshoot = [text for text in said if "overshoot" in text]
    if is_told:
        assert len(overshoot) == 1
        assert overshoot[0].startswith("the factors of '0', '2' overshoot (β₁ |m| > 2): lower precond_lr, or")
        assert "max_factor_step=0.5" in overshoot[0]
    else:
        assert said == []


# --- A loss with another average --------------------------------------------------------------------------

Loss = Callable[[Tensor], Tensor]
CLASSES, BATCH, PLACES = 5, 12, 3


def targets(*shape: int) -> Tensor:
    return torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(3))


def told(loss: Loss, places: int = 1, dtype: torch.dtype = torch.float32, **settings) -> list[str]:
    """What is said of a loss of outputs [batch, (places,) classes] in some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES)).to(dtype)
    optimizer = SINGD(model, **settings)
    shape = (BATCH, places, 4) if places > 1 else (BATCH, 4)
    with reports() as said:
        train(model, optimizer, 3, *shape, backward=lambda model, x: loss(model(x.to(dtype))).backward())
    return said


def of_samples(reduction: str, scale: float = 1.0, **keywords) -> Loss:
    return lambda y: scale * cross_entropy(y, targets(BATCH), reduction=reduction, **keywords)


def of_tokens(reduction: str, scale: float = 1.0, **keywords) -> Loss:
    return lambda y: scale * cross_entropy(y.mT, targets(BATCH, PLACES), reduction=reduction, **keywords)


SMALL = {**PAPER, "precond_lr": 1e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("loss", "places", "declared", "remedy"),
    [
        (of_samples("mean"), 1, None, "a mean over samples, so set loss_average='batch'"),
        (of_samples("sum"), 1, "batch", "a sum, so set loss_average=None"),
        (of_samples("sum"), 1, "token", "a sum, so set loss_average=None"),
        (
            of_tokens("mean"),
            PLACES,
            "batch",
            "a mean over samples and positions, so set loss_average='token'",
        ),
        (of_tokens("mean"), PLACES, None, "a mean over samples and positions, so set loss_average='token'"),
        (of_tokens("sum", 1 / BATCH), PLACES, "token", "a mean over samples, so set loss_average='batch'"),
        (of_tokens("sum"), PLACES, "token", "a sum, so set loss_average=None"),
    ],
)
def test_a_cross_entropy_with_another_average_is_told_once_with_the_remedy(
    loss, places, declared, remedy, dtype
):
    said = told(loss, places, dtype, loss_average=declared, **SMALL)
    assert len(said) == 1
    assert "the gradients at '2' look like those of a cross entropy" in said[0]
    assert f"it seems to be {remedy}." in said[0]


@pytest.mark.parametrize(
    ("loss", "places", "declared"),
    [
        (of_samples("mean"), 1, "batch"),
        (of_samples("mean", label_smoothing=0.1), 1, "batch"),
        (of_samples("mean"), 1, "token"),  # the same where there is one place
        (of_samples("sum"), 1, None),
        (of_tokens("mean"), PLACES, "token"),
        (of_tokens("mean", ignore_index=0), PLACES, "token"),
        (of_tokens("sum", 1 / BATCH), PLACES, "batch"),
        (of_tokens("sum"), PLACES, None),
    ],
)
def test_nothing_is_told_of_a_loss_as_it_was_declared(loss, places, declared):
    assert told(loss, places, loss_average=declared, **SMALL) == []


@pytest.mark.parametrize("declared", ["batch", "token", None])
@pytest.mark.parametrize(
    "loss",
    [
        lambda y: (y - 1).square().mean(),
        lambda y: y.square().sum(),
        lambda y: binary_cross_entropy_with_logits(y, torch.ones_like(y)),
        lambda y: binary_cross_entropy_with_logits(y, nn.functional.one_hot(targets(BATCH), CLASSES).to(y)),
        lambda y: y.sum() * 0,
        of_samples("mean", label_smoothing=0.5),
    ],
    ids=["mse", "squares", "bce", "bce of one class", "zero", "smooth"],
)
def test_nothing_is_told_of_other_losses(loss, declared):
    assert told(loss, loss_average=declared, **SMALL) == []


def test_nothing_is_told_where_the_average_does_not_matter():
    assert told(of_samples("sum"), loss_average="batch") == []
    for name in ("relative_damping", "factor_start", "normalize_step"):
        assert len(told(of_samples("sum"), loss_average="batch", **{name: PAPER[name]})) == 1


@pytest.mark.parametrize(("size", "told"), [(1.9, False), (2.1, True)])
def test_factors_that_overshoot_are_told_of(size, told):
    """A step of twice a factor's own size leaves nothing of it."""
    model = nn.Linear(4, 4, bias=False)
    settings = {"structure": "dense", "precond_lr": 1.0, "damping": 0.0} | PAPER
    optimizer = IKFAC(model, lr=1e-6, loss_average=None, **settings)
    # From the identity, m = ½ (U - I): inputs of this size make its norm what is wanted.
    x = torch.eye(4) * (2 * size + 1) ** 0.5 * 2
    with pytest.warns(HealthWarning, match="overshoot") if told else nullcontext():
        (1e-3 * model(x).sum()).backward()
        optimizer.step()
    assert optimizer.state[model.weight]["norm_m_K"].item() == pytest.approx(size, rel=0.02)
