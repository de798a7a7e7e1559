"""What the paper proves of the rules, and what the stabilised default adds to them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ingot
from ingot import rules, stability
from ingot.scalars import root_mean_square
from ingot.structures import bind, parse, registered
from ingot.structures.base import power_iteration
from tests.reference import inputs_and_gradients

pytestmark = pytest.mark.usefixtures("float64")


# --- Theorem 1: K Kᵀ = (S_K + λI)⁻¹ + O(β₁²) --------------------------------------------------------------


def _error(structure: str, dim: int, lr: float, damping: float, updates: int) -> float:
    """|K Kᵀ - (S + λI)⁻¹| after updates of IKFAC and KFAC from one start with the same curvature."""
    generator = torch.Generator().manual_seed(7)
    s = bind(parse(structure), dim)
    k = s.identity()
    average = (1 - damping) * s.identity()  # so that S + λI = I = K Kᵀ
    for _ in range(updates):
        x = torch.randn(dim, 9, generator=generator) / 3
        h = rules.Curvature(rules.curvature(rules.Factor(s, k), x))
        k = rules.move(rules.Factor(s, k), rules.direction(rules.Factor(s, k), h, 1.0, damping), lr)
        average = rules.moving_average(average, rules.Curvature(s.gram(x)), lr)
    inverse = s.dense(rules.damped_inverse(s, average, damping))
    return (s.dense(k) @ s.dense(k).mT - inverse).norm().item()


@pytest.mark.parametrize("updates", [1, 5, 20])
@pytest.mark.parametrize("dim", [10, 4])  # of K and C alike: the rule for C is that for K
@pytest.mark.parametrize("structure", ["dense", "block_diagonal(3)", "diagonal"])
def test_ikfac_follows_kfac_to_first_order(structure, dim, updates):
    rates = [2.0**-n for n in range(9, 15)]
    errors = [_error(structure, dim, lr, 0.1, updates) for lr in rates]
    points = [(math.log(lr), math.log(error)) for lr, error in zip(rates, errors, strict=True)]
    mean_x, mean_y = (sum(c) / len(points) for c in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    assert slope == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("structure", ["dense", "block_diagonal(3)", "diagonal"])
def test_the_theorem_holds_for_both_factors_of_the_optimizers(structure):
    """The same, through IKFAC and KFAC as a user calls them, with fixed weights."""

    def factors(lr: float) -> list[torch.Tensor]:
        products = []
        for optimizer_class in (ingot.IKFAC, ingot.KFAC):
            torch.manual_seed(0)
            layer = nn.Linear(5, 4)
            optimizer = optimizer_class(
                layer, lr=0.0, precond_lr=lr, damping=0.1, precond_every=1, structure=structure, **ingot.PAPER
            )
            for step in range(4):
                if step == 1 and optimizer_class is ingot.KFAC:
                    # One step has made the state: begin again at S + λI = I, as K Kᵀ does.
                    for key, s in zip(
                        ("S_K", "S_C"), optimizer._layers[layer.weight].structures, strict=True
                    ):
                        optimizer.state[layer.weight][key] = 0.9 * s.identity()
                if step == 1 and optimizer_class is ingot.IKFAC:
                    for key, s in zip(("K", "C"), optimizer._layers[layer.weight].structures, strict=True):
                        optimizer.state[layer.weight][key] = s.identity()
                optimizer.zero_grad()
                layer(torch.randn(6, 5)).square().sum(1).mean().backward()
                optimizer.step()
            state, structures = optimizer.state[layer.weight], optimizer._layers[layer.weight].structures
            if optimizer_class is ingot.IKFAC:
                dense = [s.dense(state[key]) for key, s in zip(("K", "C"), structures, strict=True)]
                products.append([x @ x.mT for x in dense])
            else:
                keys = ("S_K_inverse", "S_C_inverse")
                products.append([s.dense(state[key]) for key, s in zip(keys, structures, strict=True)])
        return [(a - b).norm() for a, b in zip(*products, strict=True)]

    for coarse, fine in zip(factors(2e-3), factors(1e-3), strict=True):
        assert math.log2(coarse / fine) == pytest.approx(2, abs=0.1)


# --- Invariance: (αU, G/α) is the same curvature ----------------------------------------------------------


class _Rescaled:
    """An optimizer whose captured inputs and gradients are scaled, so that it sees (αU, G/α)."""

    def __init__(self, optimizer: ingot.NaturalGradient, alpha: float) -> None:
        for layer in optimizer._layers.values():
            for tap in layer.taps:
                tap.receive = self._scaling(tap.receive, alpha)

    def _scaling(self, receive, alpha: float):
        return lambda x, g, *rest: receive(alpha**0.5 * x, alpha**-0.5 * g, *rest)


def _trajectory(optimizer_class, alpha: float, structure: str, **keywords) -> torch.Tensor:
    torch.manual_seed(0)
    # No bias: its constant input could not be scaled from outside.
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))
    optimizer = optimizer_class(
        model, lr=0.02, precond_lr=0.05, damping=0.2, precond_every=1, structure=structure, **keywords
    )
    _Rescaled(optimizer, alpha)
    for _ in range(10):
        optimizer.zero_grad()
        (model(torch.randn(8, 6)) - torch.randn(8, 3)).square().sum(1).mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


STRUCTURES = ["dense", "diagonal", "block_diagonal(2)", "hierarchical(2,1)", "triu_toeplitz"]


@settings(max_examples=20, deadline=None)
@given(alpha=st.floats(0.2, 5.0), structure=st.sampled_from(STRUCTURES), momentum=st.sampled_from([0.0, 0.5]))
def test_ingd_and_singd_do_not_depend_on_the_split_of_the_scale(alpha, structure, momentum):
    torch.set_default_dtype(torch.float64)
    keywords = {"precond_momentum": momentum, **ingot.PAPER}
    torch.testing.assert_close(
        _trajectory(ingot.SINGD, alpha, structure, **keywords),
        _trajectory(ingot.SINGD, 1.0, structure, **keywords),
        rtol=1e-9,
        atol=1e-11,
    )


def test_ingd_is_singd_with_dense_factors():
    torch.testing.assert_close(
        _trajectory(ingot.INGD, 3.0, None, **ingot.PAPER),
        _trajectory(ingot.SINGD, 1.0, "dense", **ingot.PAPER),
    )


@pytest.mark.parametrize("optimizer_class", [ingot.KFAC, ingot.IKFAC])
def test_kfac_and_ikfac_do(optimizer_class):
    one, other = (_trajectory(optimizer_class, alpha, "dense", **ingot.PAPER) for alpha in (1.0, 2.0))
    assert (one - other).norm() > 1e-3 * one.norm()


@pytest.mark.parametrize("optimizer_class", [ingot.SINGD, ingot.IKFAC, ingot.KFAC])
def test_by_default_no_optimizer_does(optimizer_class):
    """Damping and start relative to the traces make the whole family invariant."""
    torch.testing.assert_close(
        _trajectory(optimizer_class, 30.0, "dense"),
        _trajectory(optimizer_class, 1.0, "dense"),
        rtol=1e-9,
        atol=1e-11,
    )


# --- One sample without weight sharing: the approximation is exact ----------------------------------------


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_the_kronecker_product_is_exact_for_one_sample(approx):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    # Far from the start the factors would enter; at the first step they are the identity, and H is U.
    optimizer = ingot.SINGD(model, structure="dense", approx=approx, **ingot.PAPER)
    x, y = torch.randn(1, 4), torch.randn(1, 3)
    (model(x) - y).square().sum().backward()
    statistics = [
        layer.pending.scaled(layer.shape[2], layer.shape[1], loss_is_mean=True)
        for layer in optimizer._layers.values()
    ]
    for layer, seen in zip((model[0], model[2]), statistics, strict=True):
        d_o, d_i = layer.weight.shape
        u, g = seen.k.value.reshape(d_i + 1, d_i + 1), seen.c.value.reshape(d_o, d_o)
        gradient = torch.cat((layer.weight.grad, layer.bias.grad[:, None]), dim=1).mT.flatten()
        torch.testing.assert_close(torch.kron(u, g), torch.outer(gradient, gradient), rtol=1e-12, atol=1e-14)
        ((a, b),) = inputs_and_gradients(model, layer, x, y, lambda o, t: (o - t).square().sum())
        torch.testing.assert_close(u, a.mT @ a)
        torch.testing.assert_close(g, b.mT @ b)
        assert seen.trace_u == pytest.approx(u.trace().item() / (d_i + 1))
        assert seen.trace_g == pytest.approx(g.trace().item() / d_o)


# --- What keeps long runs stable --------------------------------------------------------------------------


@pytest.mark.parametrize("structure", sorted(set(registered()) - {"upper", "lower"}))
def test_spectral_norm_also_of_matrices_that_are_not_symmetric(structure):
    for dim in (1, 2, 5, 33):
        s = bind(parse(structure), dim)
        m = torch.randn(200, s.numel)
        exact = torch.linalg.matrix_norm(s.dense(m), 2).unsqueeze(-1)
        rough, close = power_iteration(s, m, 3), power_iteration(s, m, 300)
        assert rough.shape == (200, 1)
        assert (rough <= exact * (1 + 1e-9)).all()
        assert (rough >= 0.5 * exact).double().mean() > 0.95  # the start may be far from where it leads
        assert (close >= 0.98 * exact).double().mean() > 0.98


def test_spectral_norm_of_a_nilpotent_matrix():
    """Power iteration on m itself would give 0 here, and bound nothing."""
    s = bind(parse("triu"), 2)
    torch.testing.assert_close(s.norm(torch.tensor([0.0, 5.0, 0.0])), torch.tensor([5.0]))


def test_bounded_rate():
    s = bind(parse("diagonal"), 3)
    m = torch.tensor([[4.0, 1.0, 1.0], [0.1, 0.1, 0.1], [0.0, 0.0, 0.0]])
    norm = s.norm(m)
    rate = stability.bounded_rate(norm, lr=0.5, max_step=0.5)
    assert rate[1:].tolist() == [[0.5], [0.5]]
    assert 0.125 <= rate[0].item() < 0.15
    assert stability.bounded_rate(norm, lr=0.5, max_step=None) == 0.5


def test_warm_up_of_the_factor_rate():
    assert [stability.warmed_rate(0.1, n) for n in (0, 1, 8, 1000)] == [1 / 2, 1 / 3, 0.1, 0.1]


@given(
    lr=st.floats(1e-5, 1.0),
    share=st.floats(0.01, 1.0),
    scale=st.floats(1e-3, 1e3),
    weight=st.floats(1e-3, 1e2),
    agreement=st.floats(0.1, 4.0),
    relative=st.sampled_from([None, 0.03]),
)
@settings(deadline=None)
def test_step_length(lr, share, scale, weight, agreement, relative):
    """Whatever the momentum's scale, weights change by lr times how far gradients agree.

    If a share of the weights themselves is less, it is by that.

    Both are those of a schedule's peak, and the step goes down with the schedule from there.
    """
    momentum = scale * torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight_rms = torch.tensor(weight, dtype=torch.float64)
    sizes = root_mean_square([momentum]), agreement, weight_rms
    length = stability.step_length(share * lr, lr, *sizes, 5, relative)
    change = float(root_mean_square([length * momentum]))
    bound = math.inf if relative is None else relative * max(weight, 15**-0.5)
    assert change == pytest.approx(share * min(lr * agreement, bound), rel=1e-5)


def test_no_momentum_no_step():
    assert torch.isfinite(
        stability.step_length(0.1, 0.1, torch.tensor(0.0), 1.0, torch.tensor(1.0), 5, 0.03) * torch.zeros(3)
    ).all()


def agreements(gradients: list[torch.Tensor], rate: float) -> list[float]:
    """How far gradients agree after each of them."""
    momentum, noise, found = torch.zeros_like(gradients[0]), 0.0, []
    for gradient in gradients:
        momentum = rate * momentum + gradient
        size, new = float(root_mean_square([momentum])), float(root_mean_square([gradient]))
        noise = stability.noise_size(noise, new, size, rate)
        found.append(stability.agreement(size, noise, rate))
    return found


@given(rate=st.floats(0.0, 0.95), scale=st.floats(1e-10, 1e10))
@settings(deadline=None, max_examples=10)
def test_gradients_agree(rate, scale):
    """The first one with itself, noise with nothing, equal ones as far as any can; the scale is no matter."""
    noise = list(scale * torch.randn(200, 2000, generator=torch.Generator().manual_seed(0)).double())
    found = agreements(noise, rate)
    assert found[0] == pytest.approx(1)
    assert all(value == pytest.approx(1, abs=0.3) for value in found)
    assert sum(found) / len(found) == pytest.approx(1, abs=0.03)
    equal = agreements([noise[0]] * 400, rate)
    assert equal[:20] == sorted(equal[:20])
    assert equal[-1] == pytest.approx(stability.greatest_agreement(rate))
    to_and_fro = agreements([noise[0], -noise[0]] * 200, rate)
    assert to_and_fro[-1] == pytest.approx(1 / stability.greatest_agreement(rate), rel=1e-4)


def test_gradients_that_vanish_or_begin_late_agree_no_more_than_equal_ones():
    one = torch.ones(4, dtype=torch.float64)
    for factor in (0.5, 0.9, 2.0):
        found = agreements([factor**n * one for n in range(300)], 0.9)
        assert max(found) <= stability.greatest_agreement(0.9)
    assert agreements([0 * one, 0 * one, one], 0.9)[-1] == pytest.approx(1)


def test_numbers_of_a_device_take_the_same_way():
    """Where numbers stay tensors, as on devices that must be waited for."""
    values = {"noise": 0.3, "natural": 0.2, "momentum": 0.9}
    tensors = {key: torch.tensor(value, dtype=torch.float64) for key, value in values.items()}
    for rate in (0.9, torch.tensor(0.9, dtype=torch.float64)):
        found = []
        for noise, natural, momentum in (values.values(), tensors.values()):
            size = stability.noise_size(noise, natural, momentum, rate)
            found.append(float(stability.agreement(momentum, size, rate)))
        assert found[0] == pytest.approx(found[1], rel=1e-12)
