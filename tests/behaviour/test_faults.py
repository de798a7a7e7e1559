"""Faults of every kind at every place: nothing bad gets in, the report names it, and training goes on."""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ingot import IKFAC, INGD, KFAC, PAPER, SINGD, HealthWarning, family, rules, stability
from ingot.family import TRACES
from ingot.layers import registered
from ingot.structures import bind, parse
from tests.behaviour.faults import (
    LAYERS,
    NO_FAULT,
    Fault,
    Net,
    Scale,
    dropped,
    layer_of,
    net,
    reports,
    skipped,
)
from tests.behaviour.training import FAMILY, PLAIN, assert_identical, batches, held, mlp, moved, squares

# --- Random faults ----------------------------------------------------------------------------------------

STRUCTURES = ["dense", "diagonal", "block_diagonal(2)", "tril", "triu_toeplitz", "hierarchical(1,1)"]
INVERTIBLE = STRUCTURES[:3]
CLEAN_STEPS = 10
QUIET = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}


@dataclass(frozen=True)
class Run:
    """A model, its optimizer and a fault."""

    family: str
    variant: int
    others: type[nn.Module]
    dtype: torch.dtype
    optimizer: type
    keywords: dict
    fault: Fault

    def start(self) -> tuple[Net, torch.optim.Optimizer]:
        model = net(self.family, self.variant, self.others).to(self.dtype)
        return model, self.optimizer(model, lr=0.02, adamw={"lr": 1e-3}, **self.keywords)

    @property
    def is_papers(self) -> bool:
        return not self.keywords.get("normalize_step", True)

    @property
    def may_get_in(self) -> bool:
        """Whether the fault may be taken for what is usual: one of large numbers, early, often or with PAPER.

        The momentum then takes long to forget it.
        """
        early_or_often = self.fault.first < 10 or self.fault.count > 2
        return self.fault.is_finite and self.fault.value > 0 and (self.is_papers or early_or_often)


@st.composite
def faults(draw: st.DrawFn, model: Net) -> Fault:
    kinds = ["activation", "gradient", "parameter", "zero inputs", "zero loss", "empty", "loss", "target"]
    kind = draw(st.sampled_from(kinds + ["input"] * (not isinstance(model.layer, nn.Embedding))))
    value, place = 0.0, ""
    if kind in ("input", "activation", "gradient", "parameter"):
        value = draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    if kind in ("activation", "gradient"):
        place = draw(st.sampled_from(["layer", "other", "head"]))
    elif kind == "parameter":
        place = draw(st.sampled_from([name for name, _ in model.named_parameters()]))
    elif kind == "loss":
        value = draw(st.sampled_from([1e15, 1e30]))
    elif kind == "target":
        value = draw(st.sampled_from([1e6, 1e9, 1e12]))
    elif kind == "zero loss":
        kind = "loss"
    return Fault(kind, value, place, draw(st.integers(0, 11)), draw(st.integers(1, 5)))


@st.composite
def runs(draw: st.DrawFn, with_fault: bool = True) -> Run:
    family = draw(st.sampled_from(sorted(LAYERS)))
    variant = draw(st.integers(0, len(LAYERS[family]) - 1))
    others = draw(st.sampled_from([nn.LayerNorm, Scale]))
    dtype = draw(st.sampled_from([torch.float32] * 3 + [torch.float64] * 2 + [torch.bfloat16]))
    optimizer = draw(st.sampled_from(FAMILY))
    keywords = {
        "structure": draw(st.sampled_from(INVERTIBLE if optimizer is KFAC else STRUCTURES)),
        "momentum": draw(st.sampled_from([0.0, 0.9])),
        "precond_every": draw(st.sampled_from([2, 4])),
        "precond_warmup": draw(st.sampled_from([0, 3])),
        "factor_dtype": draw(st.sampled_from([None, None, torch.bfloat16])),
    }
    if optimizer in (SINGD, INGD):
        keywords["precond_momentum"] = draw(st.sampled_from([0.0, 0.5]))
    if draw(st.booleans()):
        keywords |= {"precond_lr": 1e-3, **PAPER}
    fault = draw(faults(net(family, variant, others))) if with_fault else NO_FAULT
    return Run(family, variant, others, dtype, optimizer, keywords, fault)


def not_finite(model: Net, optimizer: torch.optim.Optimizer) -> list[str]:
    """What is kept and not finite, by its parameter's name and its key."""
    kept = {f"{n}, {key}": v for n, p in model.named_parameters() for key, v in optimizer.state[p].items()}
    kept = {**dict(model.named_parameters()), **kept}
    kept = {key: v for key, v in kept.items() if isinstance(v, Tensor) and "gain" not in key}
    if torch.cat([value.detach().flatten().double() for value in kept.values()]).isfinite().all():
        return []
    return [key for key, value in kept.items() if not value.isfinite().all()]


def bad_layers(model: Net) -> set[str]:
    """The layers, and the parameters without one, whose gradients are not finite."""
    return {layer_of(name) for name, p in model.named_parameters() if not p.grad.isfinite().all()}


def counts(optimizer: torch.optim.Optimizer, key: str) -> dict[str, int]:
    """The layers where something was counted, with the count."""
    found = {name: numbers.get(key, 0) for name, numbers in optimizer.diagnostics(False).layers.items()}
    return {name: int(count) for name, count in found.items() if count}


@dataclass
class Record:
    """What was said in a run, and what should have been: how often each layer was at fault."""

    said: list[str] = field(default_factory=list)
    statistics: Counter[str] = field(default_factory=Counter)
    gradients: Counter[str] = field(default_factory=Counter)


def train_through(run: Run, model: Net, optimizer: torch.optim.Optimizer, steps: range) -> Record:
    """Train, and see that all that is kept stays finite."""
    record, x = Record(), model.samples(6)
    for step in steps:
        fault, updates_factors = run.fault if run.fault.is_at(step) else NO_FAULT, optimizer.wants_curvature
        optimizer.zero_grad()
        fault.loss(model, x).backward()
        if updates_factors:
            record.statistics.update(name for name in bad_layers(model) if name != "other.weight")
        fault.spoil_gradients(model)
        record.gradients.update(bad_layers(model))
        with reports() as said:
            optimizer.step()
        record.said += said
        assert not not_finite(model, optimizer), step
    return record


def test_every_registered_family_meets_faults():
    assert set(LAYERS) == set(registered())


@settings(max_examples=250, **QUIET)
@given(runs())
def test_nothing_bad_gets_in_and_training_goes_on(run):
    model, optimizer = run.start()
    first_loss = NO_FAULT.loss(model, model.samples(6)).item()
    end = run.fault.first + run.fault.count
    record = train_through(run, model, optimizer, range(end))
    if not run.fault.is_finite:
        assert skipped(record.said) == dict.fromkeys(record.statistics, 1)
        assert dropped(record.said) == dict.fromkeys(record.gradients, 1)
        assert counts(optimizer, "skipped") == record.statistics
        assert counts(optimizer, "dropped") == record.gradients
    before = held(model, optimizer)
    said = train_through(run, model, optimizer, range(end, end + CLEAN_STEPS)).said
    if not run.may_get_in:
        assert said == [] or run.is_papers  # whose factors may overshoot
        # What is small may be rounded away in bfloat16, or in AdamW's hands after large numbers.
        sure = {name for name in before if "head" in name or run.dtype != torch.bfloat16} - {"other.weight"}
        assert moved(before, held(model, optimizer)) >= sure
        assert NO_FAULT.loss(model, model.samples(6)).item() < 0.9 * first_loss


@settings(max_examples=60, **QUIET)
@given(runs(with_fault=False))
def test_without_a_fault_nothing_is_said(run):
    model, optimizer = run.start()
    first_loss = NO_FAULT.loss(model, model.samples(6)).item()
    assert not train_through(run, model, optimizer, range(CLEAN_STEPS)).said
    assert NO_FAULT.loss(model, model.samples(6)).item() < 0.9 * first_loss


# --- Statistics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_class", FAMILY)
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("scale", [1e17, 1e18, 3e18, 1e19, 2e19, 1e30, 3e38])
def test_what_only_a_longer_dtype_could_hold_is_refused(optimizer_class, at, scale):
    """Squares of gradients near the end of float32's range, in the first step and after it."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = optimizer_class(model, precond_every=1)
    for i in range(3):
        optimizer.zero_grad()
        (model(torch.randn(64, 4)).sum(-1).mean() * (scale if i == at else 1.0)).backward()
        with warnings.catch_warnings(action="ignore"):
            optimizer.step()
    values = [v for v in optimizer.state[model.weight].values() if isinstance(v, Tensor)]
    assert all(value.isfinite().all() for value in (*values, *model.parameters()))


NAN = float("nan")
EVERY_STEP = {"precond_every": 1, "precond_warmup": 0}
SETTINGS = [EVERY_STEP, {**PLAIN, "precond_lr": 1e-3}]
OPTIMIZERS = pytest.mark.parametrize("optimizer_class", FAMILY)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> None:
    """A step on always the same batch; what is said of it is not looked at."""
    optimizer.zero_grad()
    (scale * squares(model(next(batches(1))))).backward()
    with reports():
        optimizer.step()


def factors(optimizer: torch.optim.Optimizer, layer: nn.Module) -> dict[str, Tensor]:
    """What is kept of a layer's curvature, as copies."""
    keys = (*optimizer.rule.keys, *TRACES)
    return {k: v.clone() for k, v in optimizer.state[layer.weight].items() if k in keys}


def is_identity(optimizer: torch.optim.Optimizer, layer: nn.Module) -> bool:
    pair = zip(optimizer.rule.names, optimizer._layers[layer.weight].structures, strict=True)
    return all(torch.equal(optimizer.state[layer.weight][key], s.identity()) for key, s in pair)


@OPTIMIZERS
@pytest.mark.parametrize("settings", SETTINGS, ids=["default", "paper"])
def test_one_layer_at_fault_keeps_its_factors_and_the_others_go_on(optimizer_class, settings):
    model = mlp()
    optimizer = optimizer_class(model, **settings)
    step(model, optimizer)
    before = [factors(optimizer, model[i]) for i in (0, 2)]
    model[1].register_full_backward_hook(lambda module, to_input, to_output: (NAN * to_input[0],))
    step(model, optimizer)
    assert_identical(factors(optimizer, model[0]), before[0])
    assert all(not torch.equal(new, before[1][k]) for k, new in factors(optimizer, model[2]).items())
    assert counts(optimizer, "skipped") == counts(optimizer, "dropped") == {"0": 1}


@OPTIMIZERS
def test_one_matrix_at_fault_keeps_its_factors_and_the_others_go_on(optimizer_class):
    torch.manual_seed(0)
    layer = nn.Conv1d(4, 6, 2, groups=2)
    optimizer = optimizer_class(layer, **EVERY_STEP)
    for value in (1.0, NAN):
        before = factors(optimizer, layer)
        optimizer.zero_grad()
        output = layer(torch.randn(3, 4, 5))
        (squares(output[:, :3]) * value + squares(output[:, 3:])).backward()
        with reports():
            optimizer.step()
    for key, new in factors(optimizer, layer).items():
        assert torch.equal(new[0], before[key][0])
        assert not torch.equal(new[1], before[key][1])


@OPTIMIZERS
@pytest.mark.parametrize("settings", SETTINGS, ids=["default", "paper"])
def test_after_three_refusals_in_a_row_the_factors_begin_anew(optimizer_class, settings):
    """With weights that stay, each batch gives the same statistics: the factors must come to the same."""
    model = mlp()
    optimizer = optimizer_class(model, **{**settings, "lr": 0.0})
    for scale in (1.0, NAN, NAN, 1.0, NAN, NAN):
        step(model, optimizer, scale)
        assert not is_identity(optimizer, model[0])
    step(model, optimizer, NAN)
    assert is_identity(optimizer, model[0])
    assert is_identity(optimizer, model[2])
    assert counts(optimizer, "skipped") == {"0": 5, "2": 5}
    for _ in range(4):
        step(model, optimizer)
    fresh = optimizer_class(model, **{**settings, "lr": 0.0})
    for _ in range(4):
        step(model, fresh)
    for i in (0, 2):
        torch.testing.assert_close(factors(optimizer, model[i]), factors(fresh, model[i]))


@pytest.mark.parametrize(
    ("updates", "scale", "is_refused"), [(2, 1e4, False), (3, 900, False), (3, 1100, True)]
)
def test_traces_beyond_a_million_times_their_average_are_refused(updates, scale, is_refused):
    """After three updates; traces go with the square of the loss's scale."""
    model = mlp()
    optimizer = SINGD(model, lr=0.0, **EVERY_STEP)
    for _ in range(updates):
        step(model, optimizer)
    before = factors(optimizer, model[0])
    step(model, optimizer, scale)
    assert counts(optimizer, "skipped") == ({"0": 1, "2": 1} if is_refused else {})
    assert torch.equal(factors(optimizer, model[0])["K"], before["K"]) == is_refused


@OPTIMIZERS
@pytest.mark.parametrize("scale", [1e8, 1e-8])
def test_another_scale_of_the_loss_is_accepted_before_long(optimizer_class, scale):
    model = mlp()
    optimizer = optimizer_class(model, lr=1e-3, **EVERY_STEP)
    x = next(batches(1))
    for n in range(60):
        optimizer.zero_grad()
        (squares(model(x)) * (scale if n >= 15 else 1.0)).backward()
        before = held(model, optimizer)
        with reports():
            optimizer.step()
    assert all(count <= 3 for count in counts(optimizer, "skipped").values())
    assert all(count <= 3 for count in counts(optimizer, "dropped").values())
    assert moved(before, held(model, optimizer)) == set(before)
    fresh = optimizer_class(model, lr=0.0, **EVERY_STEP)
    optimizer.zero_grad()
    (squares(model(x)) * scale).backward()
    fresh.step()
    if scale > 1:  # what was large is forgotten more slowly
        ours, theirs = (o.state[model[0].weight]["trace_g"] for o in (optimizer, fresh))
        assert 0.1 < ours / theirs < 10


# --- Conditions -------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    rule=st.sampled_from([cls.rule for cls in (SINGD, IKFAC, KFAC)]),
    structure=st.sampled_from(INVERTIBLE),
    dims=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    rank=st.integers(1, 2),
    seed=st.integers(0, 9),
    is_constant=st.booleans(),
)
def test_without_damping_the_condition_is_bounded(rule, structure, dims, rank, seed, is_constant):
    """U and G of mean trace 1 and of low rank: what they do not reach is left to the smallest damping, ε.

    KFAC inverts S + √ε I with |S| ≤ d. Of the others, P = (K Kᵀ)⁻¹ becomes Kᵀ⁻¹ (I - β₁ m)⁻² K⁻¹. Since
    -¼ ≤ β₁ m ≤ ½, (1 - x)⁻² lies between 1 + 2x and 1 + 6x + 1.14, so for IKFAC P lies between
    (1 - β₁) P + β₁ (U + √ε I) and (1 - 0.72 β₁) P + 3 β₁ (U + √ε I), hence between √ε and 4.2 (d + √ε).
    For SINGD U is weighed by tr(CᵀGC) ≤ d_o tr(CᵀC), and ε by tr(CᵀC).
    """
    structures, generator = [bind(parse(structure), dim) for dim in dims], torch.Generator().manual_seed(seed)
    smallest, d = stability.MIN_DAMPING, max(dims)
    bound = (4.2 * (d / smallest**0.5 + 1)) ** 0.5
    if rule is SINGD.rule:
        bound = (4.2 * (dims[0] * dims[1] / smallest + 1)) ** 0.5
    elif rule is KFAC.rule:
        bound = 1 + d / smallest**0.5
    numbers = family.Settings(0.5, 0.0, 0.0, True, 0.5, "trace")
    one = torch.ones(1, dtype=torch.float64)
    state, x = rule.start(structures, one, (), numbers), []
    for update in range(100):
        if not x or not is_constant:
            x = [torch.randn(dim, rank, dtype=torch.float64, generator=generator) for dim in dims]
            x = [columns * (len(columns) / columns.square().sum()).sqrt() for columns in x]
        pairs = zip(structures, rule.names, x, strict=True)
        seen = [
            rules.Curvature(rule.statistic(rules.Factor(s, state[name]), columns))
            for s, name, columns in pairs
        ]
        state = rule.update(structures, state, family.Statistics(*seen, one, one), numbers, update)
        if update % 10 == 9:
            for structure_of, entries in rule.preconditioners(structures, state):
                assert torch.linalg.cond(structure_of.dense(entries)) < 1.001 * bound
    assert state["skipped"] == 0


# --- Gradients --------------------------------------------------------------------------------------------


@OPTIMIZERS
def test_a_gradient_of_no_use_counts_as_zero(optimizer_class):
    def after(value: float) -> dict:
        model = mlp()
        optimizer = optimizer_class(model)
        step(model, optimizer)
        optimizer.zero_grad()
        squares(model(next(batches(1)))).backward()
        model[0].weight.grad[0] = value
        if not value:
            model[0].weight.grad.zero_()
            model[0].bias.grad.zero_()
        with reports():
            optimizer.step()
        return {name: p for name, (p, _) in held(model, optimizer).items()}

    assert_identical(after(NAN), after(0.0))
    assert_identical(after(-float("inf")), after(0.0))


def test_adamw_takes_a_gradient_that_is_not_finite_for_zero():
    def after(value: float) -> tuple[dict, dict]:
        model = nn.ModuleList([nn.LayerNorm(3), nn.LayerNorm(3)])
        optimizer = SINGD(model)
        for factor in (1.0, value):
            optimizer.zero_grad()
            for norm in model:
                norm(torch.eye(3)).square().sum().backward()
            model[0].weight.grad[1] *= factor
            model[0].weight.grad *= value != 0 or factor
            with reports() as said:
                optimizer.step()
        dropped_now = counts(optimizer, "dropped")
        assert dropped(said) == dropped_now
        for p in model.parameters():
            optimizer.state[p].pop("dropped", None)
        return held(model, optimizer), dropped_now

    (with_nan, dropped_now), (with_zero, none) = after(NAN), after(0.0)
    assert_identical(with_nan, with_zero)
    assert dropped_now == {"0.weight": 1}
    assert none == {}


@pytest.mark.parametrize(
    ("steps", "growth", "is_dropped"), [(9, 1e4, False), (10, 280, False), (10, 320, True)]
)
def test_a_gradient_that_makes_the_momentum_too_large_is_dropped(steps, growth, is_dropped):
    """More than 300 times as large as usual, from the tenth step on."""
    model = mlp()
    optimizer = SINGD(model, lr=0.0, precond_every=1000, precond_warmup=0)
    for _ in range(steps):
        step(model, optimizer)
    state = optimizer.state[model[0].weight]
    momentum, usual = state["momentum_buffer"].clone(), state["size"].item()
    # With always the same gradient, the momentum is that many times as long.
    gradients = sum(0.9**n for n in range(steps))
    bias = optimizer.state[model[0].bias]["momentum_buffer"]
    size = torch.cat((momentum.flatten(), bias)).square().mean().sqrt().item() / gradients
    step(model, optimizer, growth * usual / size)
    assert counts(optimizer, "dropped") == ({"0": 1, "2": 1} if is_dropped else {})
    decayed = optimizer.state[model[0].weight]["momentum_buffer"].allclose(0.9 * momentum)
    assert decayed == is_dropped


# --- Reports and checkpoints ------------------------------------------------------------------------------


def test_each_layer_is_named_once():
    model = mlp()
    optimizer = SINGD(model, **EVERY_STEP)
    said = []
    for place in (0, 0, 2, 2):  # a gradient that is not finite goes on to the layers before
        optimizer.zero_grad()
        output = model[0](next(batches(1)))
        output.register_hook(lambda g, place=place: g * (NAN if place == 0 else 1))
        squares(model[2](output.tanh()) * (NAN if place == 2 else 1)).backward()
        with reports() as texts:
            optimizer.step()
        assert skipped(texts) == dropped(texts)
        said.append(skipped(texts))
    assert said == [{"0": 1}, {}, {"2": 1}, {}]


def test_warnings_made_errors_come_after_the_step():
    kept = []
    for action in ("ignore", "error"):
        model = mlp()
        model.append(nn.LayerNorm(3))
        optimizer = SINGD(model, **EVERY_STEP)
        for scale in (1.0, NAN, 1.0):
            optimizer.zero_grad()
            (scale * squares(model(next(batches(1))))).backward()
            fails = action == "error" and scale != 1.0
            with warnings.catch_warnings(), pytest.raises(HealthWarning) if fails else nullcontext():
                warnings.simplefilter(action)
                optimizer.step()
        kept.append(held(model, optimizer))
    assert_identical(kept[0], kept[1])


def test_what_was_counted_and_what_is_usual_survive_a_checkpoint():
    """Two updates were refused before the checkpoint is made, and the third one after."""
    kept = []
    for is_interrupted in (False, True):
        model = mlp()
        model.append(nn.LayerNorm(3))
        slow = {"lr": 1e-4, **EVERY_STEP}  # so that gradients are about the same until then
        optimizer = SINGD(model, **slow)
        for n in range(16):
            if n == 14 and is_interrupted:
                assert not is_identity(optimizer, model[0])
                saved, optimizer = optimizer.state_dict(), SINGD(model, **slow)
                optimizer.load_state_dict(saved)
            handle = model[3].weight.register_hook(lambda g, n=n: g * (NAN if n == 3 else 1))
            step(model, optimizer, 1e4 if n in (12, 13, 14) else 1.0)
            handle.remove()
            assert is_identity(optimizer, model[0]) == (n == 14)
        kept.append((held(model, optimizer), optimizer.diagnostics().scalars()))
        assert counts(optimizer, "skipped") == {"0": 3, "2": 3}
        assert counts(optimizer, "dropped") == {"0": 1, "2": 1, "3.weight": 1}
    assert_identical(*kept)


@pytest.mark.parametrize("kind", [SINGD, IKFAC, KFAC])
@pytest.mark.parametrize("start", ["trace", "identity"])
def test_factors_wait_for_the_first_curvature(kind, start):
    """A branch may begin at zero, which says nothing of the scale of its curvature."""
    model = nn.Linear(3, 2)
    optimizer = kind(model, structure="diagonal", factor_start=start, precond_warmup=50)
    names = optimizer.rule.keys
    for step in range(7):
        optimizer.zero_grad()
        (float(step >= 5) * model(torch.randn(8, 3)).square().mean()).backward()
        optimizer.step()
        factors = [optimizer.state[model.weight][n] for n in names if n in optimizer.state[model.weight]]
        moved = [not torch.equal(f, torch.ones_like(f)) for f in factors]
        assert all(moved) if step >= 5 else not any(moved)
    assert optimizer.state[model.weight]["skipped"].item() == 0
