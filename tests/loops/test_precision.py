"""Models of every dtype: what is kept in which precision, what is rounded when, and rounding at random."""

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import AdamW, Optimizer

from ingot import IKFAC, INGD, KFAC, SINGD
from ingot.precision import put

from ..behaviour.training import FAMILY, Uses, assert_identical, held
from .small import AS_IN_PAPER, DEFAULT, SETTINGS, Small, batches, mean_loss, plain

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


# --- What is kept ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "factor_dtype", "of_factors", "of_momenta"),
    [
        (BF16, None, BF16, BF16),
        (BF16, FP32, FP32, BF16),
        (FP16, None, BF16, BF16),
        (FP16, FP32, FP32, BF16),
        (FP32, None, FP32, FP32),
        (FP32, BF16, BF16, FP32),
        (FP32, FP64, FP64, FP32),
        (FP64, None, FP64, FP64),
        (FP64, BF16, BF16, FP64),
    ],
)
@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_state_has_the_dtype_of_the_weights_or_the_one_that_was_asked_for(
    optimizer_class, dtype, factor_dtype, of_factors, of_momenta
):
    model = Small().to(dtype)
    momentum = {"precond_momentum": 0.5} if optimizer_class in (SINGD, INGD) else {}
    optimizer = optimizer_class(model, **DEFAULT, factor_dtype=factor_dtype, **momentum)
    plain(model, optimizer, steps=2)
    assert {p.dtype for p in model.parameters()} == {dtype}
    kept = [(key, value) for state in optimizer.state.values() for key, value in state.items()]
    factors = {value.dtype for key, value in kept if key in optimizer.rule.keys}
    rest = {value.dtype for key, value in kept if key in ("momentum_buffer", "exp_avg", "exp_avg_sq")}
    assert (factors, rest) == ({of_factors}, {of_momenta})
    assert all(value.isfinite().all() for _, value in kept if isinstance(value, Tensor))


def _tensors() -> dict[int, Tensor]:
    gc.collect()
    return {id(thing): thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)}


@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_in_bfloat16_nothing_of_the_size_of_weights_or_factors_is_kept_in_more(optimizer_class):
    before = _tensors()
    model = nn.Sequential(nn.Linear(23, 29), nn.LayerNorm(29)).to(BF16)
    optimizer = optimizer_class(model, precond_every=1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 23, dtype=BF16)).float().square().mean().backward()
        optimizer.step()
    state = optimizer.state[model[0].weight]
    factors = {state[key].numel() for key in optimizer.rule.names}
    assert factors == {24**2, 29**2}
    found = [tensor for key, tensor in _tensors().items() if key not in before]
    assert any(tensor is state["momentum_buffer"] for tensor in found)  # all are seen
    sizes = factors | {23 * 29, 24 * 29}
    assert [t.shape for t in found if t.numel() in sizes and t.dtype in (FP32, FP64)] == []


@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_bfloat16_is_close_to_float32(optimizer_class):
    moves = []
    for dtype in (FP32, BF16):
        model = Small().to(dtype)
        before = [p.detach().float().clone() for p in model.parameters()]
        optimizer = optimizer_class(model, **DEFAULT)
        plain(model, optimizer)
        after = [p.detach().float() for p in model.parameters()]
        moves.append(torch.cat([(b - a).flatten() for a, b in zip(before, after, strict=True)]))
    assert (moves[0] - moves[1]).norm() < 0.2 * moves[0].norm()


# --- float16, with and without a scaler ------------------------------------------------------------------


class ScalerOfHalves(GradScaler):
    """As torch's for sharded models: one that does not refuse gradients in float16."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


@pytest.mark.parametrize("scale", [None, 2.0**8], ids=["plain", "scaler"])
@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_a_model_in_float16_learns(optimizer_class, scale):
    model = Small().to(FP16)
    optimizer = optimizer_class(model, **DEFAULT)
    scaler = ScalerOfHalves("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    losses = []
    for batch in list(batches(1, 12)) * 25:
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    state = [value for state in optimizer.state.values() for value in state.values()]
    assert all(value.isfinite().all() for value in state if isinstance(value, Tensor))


# --- Autocast --------------------------------------------------------------------------------------------


def _train_in(dtype: torch.dtype | None, optimizer_class: type, settings: dict[str, Any]) -> dict:
    model = Small()
    optimizer = optimizer_class(model, **settings)
    for batch in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = mean_loss(model, batch)
        loss.backward()
        optimizer.step()
    return held(model, optimizer)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_autocast_is_close_to_float32_with_state_in_float32(optimizer_class, name, dtype):
    before = held(model := Small(), optimizer_class(model))
    exact, cast = (_train_in(of, optimizer_class, SETTINGS[name]) for of in (None, dtype))
    moves = [torch.cat([(run[k][0] - before[k][0]).flatten() for k in before]) for run in (exact, cast)]
    assert (moves[1] - moves[0]).norm() < 0.2 * moves[0].norm()
    assert not torch.equal(*moves)
    for key, (value, state) in cast.items():
        assert {t.dtype for t in [value, *state.values()] if isinstance(t, Tensor)} == {FP32}, key


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_statistics_under_autocast_are_exact_products_of_what_was_computed(inside):
    model, x = nn.Linear(4, 3), torch.randn(8, 4)
    optimizer = INGD(model, **AS_IN_PAPER)
    uses = Uses(model)
    with torch.autocast("cpu", BF16):
        loss = model(x).float().square().sum(1).mean()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert uses.seen[0][1].dtype == BF16
    seen = optimizer._layers[model.weight].pending.scaled(5, 3, loss_is_mean=True)
    g = uses.seen[0][1].grad.float()
    torch.testing.assert_close(seen.k.value.reshape(5, 5), uses.u(1.0))
    torch.testing.assert_close(seen.c.value.reshape(3, 3), 8 * g.mT @ g)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_a_step_inside_of_autocast_is_one_outside(optimizer_class, dtype):
    """AdamW takes no products, so loops that step inside exist."""
    model, optimizers = Small(), []
    for inside in (False, True):
        twin = copy.deepcopy(model)
        optimizers.append((twin, optimizer_class(twin, **DEFAULT)))
        for batch in batches(3):
            optimizers[-1][1].zero_grad()
            mean_loss(twin, batch).backward()
            with torch.autocast("cpu", dtype, enabled=inside):
                optimizers[-1][1].step()
    assert_identical(*(held(*each) for each in optimizers))


# --- One rounding ----------------------------------------------------------------------------------------


def _assert_rounded_once(found: Tensor, exact: Tensor) -> None:
    """A bfloat16 is as near to the exact value as it can be, but for errors in the last bits of float32."""
    assert found.dtype == BF16
    spacing = 2.0 ** (exact.abs().clamp_min(1e-30).log2().floor() - 7)
    noise = 1e-6 * exact.abs().max()
    assert ((found.double() - exact).abs() <= 0.5 * spacing + noise).all()


def _factors_by_hand(
    optimizer_class: type, old: dict, u: Tensor, g: Tensor, lr: float, damping: float
) -> dict:
    """The paper's factor update in float64, for dense factors."""
    eye_k, eye_c = (torch.eye(len(s), dtype=FP64) for s in (u, g))
    if optimizer_class is KFAC:
        new = {"S_K": (1 - lr) * old["S_K"] + lr * u, "S_C": (1 - lr) * old["S_C"] + lr * g}
        pairs = {"S_K": eye_k, "S_C": eye_c}
        return new | {f"{k}_inverse": torch.linalg.inv(new[k] + damping * eye) for k, eye in pairs.items()}
    k, c = old["K"], old["C"]
    h_k, h_c = k.mT @ u @ k, c.mT @ g @ c
    weights = [1.0, 1.0, 1.0, 1.0]
    if optimizer_class is not IKFAC:
        weights = [t.trace() / len(t) for t in (h_c, c.mT @ c, h_k, k.mT @ k)]
    m_k = (weights[0] * h_k + damping * weights[1] * k.mT @ k - eye_k) / 2
    m_c = (weights[2] * h_c + damping * weights[3] * c.mT @ c - eye_c) / 2
    return {"K": k - lr * k @ m_k, "C": c - lr * c @ m_c}


def _exact(state: dict) -> dict:
    return {key: value.double() for key, value in state.items() if isinstance(value, Tensor)}


def _square(entries: Tensor) -> Tensor:
    return entries.reshape(round(entries.numel() ** 0.5), -1)


@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_factors_in_bfloat16_are_computed_in_float32_and_rounded_once(optimizer_class):
    model = nn.Linear(12, 9).to(BF16)
    options = AS_IN_PAPER | {"precond_every": 1, "precond_lr": 0.05, "damping": 0.1}
    optimizer, uses = optimizer_class(model, **options), Uses(model)
    for step in range(3):
        old = _exact(optimizer.state.get(model.weight, {}))
        uses.seen.clear()
        optimizer.zero_grad()
        model(torch.randn(16, 12, dtype=BF16)).float().square().sum(1).mean().backward()
        optimizer.step()
        if step == 0:
            continue  # from the identity
        (x, output) = uses.seen[0]
        a = torch.cat((x, torch.ones(16, 1)), 1).double()
        u, g = a.mT @ a / 16, 16 * output.grad.double().mT @ output.grad.double()
        old = {key: _square(value) for key, value in old.items() if key in optimizer.rule.keys}
        expected = _factors_by_hand(optimizer_class, old, u, g, 0.05, 0.1)
        for key, value in expected.items():
            _assert_rounded_once(_square(optimizer.state[model.weight][key]), value)
        assert not torch.equal(_square(optimizer.state[model.weight][optimizer.rule.names[1]]), old[key])


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_weights_in_bfloat16_are_computed_in_float32_and_rounded_once(optimizer_class, name):
    model = nn.Linear(12, 9).to(BF16)
    # Lengths go by the size of momenta before these are rounded; with this damping that is no matter.
    optimizer = optimizer_class(model, **SETTINGS[name] | {"lr": 0.02, "weight_decay": 0.1, "damping": 0.5})
    for _ in range(3):
        before = [p.detach().double().clone() for p in model.parameters()]
        optimizer.zero_grad()
        model(torch.randn(16, 12, dtype=BF16)).float().square().sum(1).mean().backward()
        optimizer.step()
        momenta = [optimizer.state[p]["momentum_buffer"].double() for p in model.parameters()]
        length, decay = 0.02, 0.0
        if name == "default":
            size = torch.cat([m.flatten() for m in momenta]).square().mean().sqrt()
            length = min(0.02, 0.03 * max(before[0].square().mean().sqrt(), 39**-0.5)) / size
            decay = 0.02 * 0.1
        for p, old, momentum in zip(model.parameters(), before, momenta, strict=True):
            _assert_rounded_once(p.detach(), (1 - decay) * old - length * momentum)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_momenta_in_bfloat16_are_computed_in_float32_and_rounded_once(optimizer_class, name):
    model = nn.Linear(12, 9, bias=False).to(BF16)
    optimizer = optimizer_class(model, **SETTINGS[name] | {"weight_decay": 0.1})
    for step in range(3):
        weight, old = model.weight.detach().double().clone(), _exact(optimizer.state.get(model.weight, {}))
        optimizer.zero_grad()
        model(torch.randn(16, 12, dtype=BF16)).float().square().sum(1).mean().backward()
        optimizer.step()
        state = optimizer.state[model.weight]
        if optimizer_class is KFAC:
            left, right = (_square(state[f"S_{side}_inverse"].double()) for side in "KC")
        else:
            left, right = (_square(state[side].double()) for side in "KC")
            left, right = left @ left.mT, right @ right.mT
        update = right @ model.weight.grad.double() @ left + 0.1 * (name == "paper") * weight
        if step:
            _assert_rounded_once(state["momentum_buffer"], 0.9 * old["momentum_buffer"] + update)


class Spectral(nn.Module):
    """A filter in the space of frequencies, as in Fourier neural operators."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.filter = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4)


def test_complex_parameters_are_trained_as_by_torchs_adamw():
    results = []
    for make in (lambda m: SINGD(m), lambda m: AdamW(m.parameters())):
        model = Spectral()
        optimizer = make(model)
        for x in torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        results.append(model.filter.detach())
    torch.testing.assert_close(*results)


def test_adamws_part_in_bfloat16_is_torchs_in_float32_rounded_once():
    model = nn.LayerNorm(50).to(BF16)
    optimizer = SINGD(model, lr=0.02, weight_decay=0.1)
    for _ in range(4):
        twins = {p: nn.Parameter(p.detach().float()) for p in model.parameters()}
        torchs = AdamW(twins.values(), lr=0.02, weight_decay=0.1)
        for p, twin in twins.items():
            state = {key: value.float().clone() for key, value in optimizer.state.get(p, {}).items()}
            torchs.state[twin] = state
        optimizer.zero_grad()
        (model(torch.randn(8, 50, dtype=BF16)).float() - 1).square().mean().backward()
        optimizer.step()
        for p, twin in twins.items():
            twin.grad = p.grad.float()
        torchs.step()
        for p, twin in twins.items():
            assert torch.equal(p, twin.to(BF16))
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(optimizer.state[p][key], torchs.state[twin][key].to(BF16))


# --- Rounding at random ----------------------------------------------------------------------------------


def _rounded(value: float | Tensor, times: int, seed: int = 0) -> Tensor:
    target = torch.empty(times, dtype=BF16)
    put(target, torch.as_tensor(value, dtype=FP32).expand(times).clone(), torch.Generator().manual_seed(seed))
    return target


def _bits(value: int) -> Tensor:
    signed = value - (1 << 32) if value >= 1 << 31 else value
    return torch.tensor(signed, dtype=torch.int32).view(FP32)


@given(st.integers(0, (1 << 32) - 1), st.integers(0, 1 << 20))
@example(0x00000000, 0)  # zero
@example(0x80000000, 0)  # and below it
@example(0x00000001, 0)  # the smallest subnormal number
@example(0x807FFFFF, 0)  # the largest, negative
@example(0x7F7F0000, 0)  # the largest bfloat16
@example(0x7F7FFFFF, 0)  # the largest float32, which lies beyond it
@example(0xFF7F8000, 0)
@example(0x3F800000, 0)
@settings(max_examples=300, deadline=None)
def test_a_number_is_rounded_to_one_of_its_two_neighbours(bits, seed):
    value = _bits(bits)
    if not value.isfinite():
        return
    towards_zero = _bits(bits & 0xFFFF0000).to(BF16)
    away = _bits((bits & 0xFFFF0000) + (0x10000 if bits & 0xFFFF else 0)).to(BF16)
    found = _rounded(value, 64, seed)
    assert ((found == towards_zero) | (found == away)).all()
    assert (found.signbit() == value.signbit()).all()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(value):
    torch.testing.assert_close(_rounded(value, 1000), torch.full((1000,), value, dtype=BF16), equal_nan=True)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
def test_every_nan_stays_one(bits):
    """A GPU makes the first of these."""
    assert _rounded(_bits(bits), 1000).isnan().all()


@pytest.mark.parametrize(
    "value", [1 + 1e-4, -(1 + 1e-4), 1.003, 3.1415927, -1e-3, 2.0**-16 + 2.0**-32, 1e-39, 3e38, 1 / 3]
)
def test_rounding_at_random_is_right_in_the_mean(value):
    times = 200_000
    found = _rounded(value, times).double()
    low, high = found.min(), found.max()
    assert low < value < high
    assert set(found.unique().tolist()) == {low.item(), high.item()}
    share = (torch.tensor(value, dtype=FP32).double() - low) / (high - low)
    assert abs((found == high).double().mean() - share) < 5 * (share * (1 - share) / times).sqrt()


def test_the_last_bit_counts():
    """Exact numbers stay, and others go up with the right chance, however near to a neighbour they are."""
    times = 1 << 20
    counts = [(_rounded(_bits(0x3F800000 + bits), times) != 1).sum().item() for bits in (0, 1, 0xFFFF)]
    assert counts[0] == 0
    assert 0 < counts[1] < 50  # 16 in the mean
    assert times - 50 < counts[2] < times


def _fill_gradients(model: nn.Module, value: float) -> None:
    """A backward pass, and then gradients of one value."""
    model(torch.ones(4, 32, dtype=next(model.parameters()).dtype)).float().square().mean().backward()
    for p in model.parameters():
        p.grad.fill_(value)


def _drift(make: Callable[[], nn.Module], dtype: torch.dtype, gradient: float, **settings: Any) -> float:
    """How far the mean of weights goes that begin at one, in steps of one part in 10000."""
    model = make().to(dtype)
    for p in model.parameters():
        nn.init.ones_(p)
    optimizer = SINGD(model, **settings)
    for _ in range(40):
        optimizer.zero_grad()
        _fill_gradients(model, gradient)
        optimizer.step()
    return 1 - torch.cat([p.detach().double().flatten() for p in model.parameters()]).mean().item()


KINDS = {"layer": lambda: nn.Linear(32, 64), "adamw": lambda: nn.LayerNorm(32)}


@pytest.mark.parametrize("way", ["gradient", "decay"])
@pytest.mark.parametrize("kind", KINDS)
def test_changes_that_nearest_rounding_loses_are_kept_in_the_mean(kind, way):
    # Where all gradients are the same, steps are four times as long as those of noise.
    lr = 2.5e-5 if kind == "layer" else 1e-4
    options = {"lr": lr, "weight_decay": 0.0} if way == "gradient" else {"lr": 1e-2, "weight_decay": 1e-2}
    gradient = float(way == "gradient")
    exact = _drift(KINDS[kind], FP32, gradient, **options)
    assert 0.002 < exact < 0.005
    assert _drift(KINDS[kind], BF16, gradient, **options) == 0
    found = _drift(KINDS[kind], BF16, gradient, **options, stochastic_rounding=True)
    # The mean of n weights that are each off by a spacing of 1/256 with a chance of about 40 / 39 percent.
    count = sum(p.numel() for p in KINDS[kind]().parameters())
    assert abs(found - exact) < 5 * 2**-8 * count**-0.5


def _stochastic(seed: int = 0, **settings: Any) -> tuple[nn.Module, Optimizer]:
    model = Small().to(BF16)
    torch.manual_seed(seed)  # of numbers that a step does not draw
    return model, SINGD(model, **DEFAULT | {"stochastic_rounding": True} | settings)


def test_rounding_at_random_does_not_touch_torchs_random_numbers():
    results = []
    for seed in (0, 1):
        model, optimizer = _stochastic(seed)
        before = torch.get_rng_state()
        plain(model, optimizer)
        assert torch.equal(before, torch.get_rng_state())
        results.append(held(model, optimizer))
    assert_identical(*results)
    nearest = _stochastic(stochastic_rounding=False)
    plain(*nearest)
    for name, (value, _) in held(*nearest).items():
        # A few entries may be rounded to the same by chance.
        assert value.numel() < 8 or not torch.equal(value, results[0][name][0]), name


def test_replicas_are_rounded_alike():
    model, optimizer = _stochastic()
    twin = copy.deepcopy(model)
    of_twin = SINGD(twin, **DEFAULT, stochastic_rounding=True)
    plain(model, optimizer)
    plain(twin, of_twin)
    assert_identical(held(model, optimizer), held(twin, of_twin))


def test_a_resumed_run_is_rounded_as_the_uninterrupted_one():
    model, optimizer = _stochastic()
    plain(model, optimizer, steps=3)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    plain(model, optimizer)
    other, resumed = _stochastic(seed=5)
    file.seek(0)
    of_model, of_optimizer = torch.load(file)
    other.load_state_dict(of_model)
    resumed.load_state_dict(of_optimizer)
    plain(other, resumed)
    assert_identical(held(model, optimizer), held(other, resumed))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_parameters_and_steps_are_rounded_independently(make):
    model = nn.Sequential(make(), make()).to(BF16)
    for p in model.parameters():
        nn.init.ones_(p)
    optimizer, patterns = SINGD(model, lr=7e-4, stochastic_rounding=True), []
    for _ in range(2):
        optimizer.zero_grad()
        for module in model:
            _fill_gradients(module, 1.0)
        optimizer.step()
        patterns += [p.detach().clone().flatten()[:32] for p in model.parameters()]
        for p in model.parameters():
            nn.init.ones_(p)
    assert all(0 < (pattern != 1).sum() < 32 for pattern in patterns)
    assert len({tuple(pattern.tolist()) for pattern in patterns}) == len(patterns)


@pytest.mark.parametrize("dtype", [FP16, FP32, FP64])
def test_other_dtypes_are_rounded_as_always(dtype):
    results = []
    for flag in (False, True):
        model = Small().to(dtype)
        optimizer = SINGD(model, **DEFAULT, stochastic_rounding=flag)
        plain(model, optimizer, steps=3)
        results.append(held(model, optimizer))
    assert_identical(*results)
