"""The optimizers as a user meets them: every parameter trained, groups, errors that help."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import ingot
from ingot import IKFAC, INGD, KFAC, PAPER, SINGD
from ingot.structures import bind, parse

FAMILY = [SINGD, INGD, IKFAC, KFAC]


class Everything(nn.Module):
    """Layers of known families beside norms, an embedding, free parameters and a recurrent cell."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.zeros(4, 8))
        self.norm = nn.LayerNorm(8)
        self.project = nn.Linear(8, 8)
        self.convolution = nn.Conv2d(1, 3, 3, padding=1)
        self.depthwise = nn.Conv2d(3, 6, 3, groups=3, padding="same", padding_mode="reflect", bias=False)
        self.batch_norm = nn.BatchNorm2d(6)
        self.cell = nn.GRUCell(8, 8)
        self.head = nn.Linear(8 + 6, 5)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.project(self.norm(self.embedding(tokens) + self.position))
        image = self.batch_norm(self.depthwise(self.convolution(x.unsqueeze(1)).relu_()))
        return self.scale * self.head(torch.cat((self.cell(x.mean(1)), image.mean((2, 3))), dim=1))


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 11, (16, 4))
    return tokens, tokens[:, 0] % 5


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> list[float]:
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        x, y = _batch()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _parameters(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("optimizer_class", FAMILY)
@pytest.mark.parametrize(
    "keywords",
    [{}, {"structure": "diagonal"}, {"precond_lr": 0.01, **PAPER}],
    ids=["default", "diagonal", "paper"],
)
def test_every_trainable_parameter_moves(optimizer_class, keywords):
    model = Everything()
    model.embedding.weight.data[0].zero_()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizer_class(model, **keywords)
    _train(model, optimizer, 3)
    for name, p in model.named_parameters():
        assert torch.isfinite(p).all()
        assert not torch.equal(p, before[name]), name
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    assert trained == set(model.parameters())
    assert set(optimizer.state) == trained
    assert len(optimizer.state_dict()["state"]) == len(trained)


@pytest.mark.parametrize("optimizer_class", FAMILY)
@pytest.mark.parametrize("structure", ["dense", "block_diagonal(4)", "diagonal"])
def test_the_loss_falls(optimizer_class, structure):
    model = Everything()
    losses = _train(model, optimizer_class(model, lr=5e-3, structure=structure), 120)
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])


@pytest.mark.parametrize(
    "structure", ["tril", "triu_toeplitz", "rank_triu(2)", "hierarchical(2,2)", ("dense", "diagonal")]
)
def test_the_loss_falls_for_the_structures_of_the_paper(structure):
    model = Everything()
    losses = _train(model, SINGD(model, lr=5e-3, structure=structure), 120)
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])


def test_who_trains_what():
    model = Everything()
    optimizer = SINGD(model, lr=0.1, adamw={"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.0})
    _train(model, optimizer, 1)
    layers = {model.embedding, model.project, model.convolution, model.depthwise, model.head}
    of_layers = {p for layer in layers for p in layer.parameters()}
    assert {p for p in model.parameters() if "exp_avg" not in optimizer.state[p]} == of_layers
    assert {p for p in model.parameters() if "K" in optimizer.state[p]} == {layer.weight for layer in layers}
    first, second = optimizer.param_groups
    assert set(first["params"]) == of_layers
    assert (first["lr"], first["momentum"], first["weight_decay"]) == (0.1, 0.9, 0.01)
    assert (second["lr"], second["betas"], second["weight_decay"]) == (0.01, (0.8, 0.9), 0.0)
    # One pair of factors for each group of a convolution.
    assert optimizer.state[model.depthwise.weight]["K"].shape[0] == 3


def test_adamws_part_is_torchs_adamw():
    model, other = Everything(), Everything()
    other.load_state_dict(model.state_dict())
    optimizer = SINGD(
        model, lr=0.0, adamw={"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}
    )
    rest = optimizer.param_groups[1]["params"]
    same = {id(p): q for p, q in zip(model.parameters(), other.parameters(), strict=True)}
    torchs = torch.optim.AdamW(
        [same[id(p)] for p in rest], lr=0.02, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6
    )
    _train(model, optimizer, 5)
    _train(other, torchs, 5)
    torch.testing.assert_close(_parameters(model), _parameters(other))


def test_a_layer_whose_forward_is_bypassed_is_trained_by_adamw():
    class Bypass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.called, self.bypassed = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return nn.functional.linear(self.called(x), self.bypassed.weight, self.bypassed.bias)

    model = Bypass()
    before = _parameters(model)
    optimizer = SINGD(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    assert "exp_avg" in optimizer.state[model.bypassed.weight]
    assert "K" in optimizer.state[model.called.weight]


@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_branches_that_begin_at_zero_begin_to_learn(optimizer_class):
    """A last layer of zeros sends no gradient back at the first step: no curvature, no scale, and no NaN."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    nn.init.zeros_(model[4].weight)
    before = _parameters(model)
    optimizer = optimizer_class(model, lr=1e-2)
    x = torch.randn(64, 4)
    y = torch.stack((x[:, 0] * x[:, 1], x[:, 2]), dim=1)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(not torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


def test_factors_wait_for_curvature():
    layer = nn.Linear(3, 2, bias=False)
    optimizer = SINGD(layer)
    factors = []
    for scale in (0.0, 0.0, 5.0):
        optimizer.zero_grad()
        (scale * layer(torch.randn(4, 3))).square().sum(1).mean().backward()
        optimizer.step()
        factors.append([optimizer.state[layer.weight][name].clone() for name in ("K", "C")])
    one = [s.identity() for s in optimizer._layers[layer.weight].structures]
    torch.testing.assert_close(factors[0], one)
    torch.testing.assert_close(factors[1], one)
    assert all(
        torch.isfinite(f).all() and not torch.equal(f, i) for f, i in zip(factors[2], one, strict=True)
    )


# --- Parameter groups -------------------------------------------------------------------------------------


def test_groups_by_name_pattern_single_parameters_out():
    model = Everything()
    optimizer = SINGD(
        model,
        [
            {"params": ["*bias", "*norm*"], "weight_decay": 0.0},
            {"params": "head.*", "lr": 0.5, "structure": ("diagonal", "dense"), "damping": 0.2},
        ],
        weight_decay=0.3,
    )
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    assert set(group_of) == set(model.parameters())
    assert group_of[model.project.weight]["weight_decay"] == 0.3
    assert group_of[model.project.bias]["weight_decay"] == 0.0
    assert group_of[model.norm.weight]["weight_decay"] == 0.0
    assert group_of[model.head.weight]["lr"] == 0.5
    assert group_of[model.head.bias]["weight_decay"] == 0.0  # the first pattern that matches wins
    assert group_of[model.position]["weight_decay"] == 0.3
    _train(model, optimizer, 2)
    state = optimizer.state[model.head.weight]
    assert state["K"].shape == (15,)
    assert state["C"].shape == (25,)


def test_a_groups_own_settings_win_over_adamws():
    model = Everything()
    optimizer = SINGD(model, [{"params": "norm.*", "lr": 0.7}], lr=0.1, adamw={"lr": 0.01, "eps": 1e-6})
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    assert (group_of[model.norm.weight]["lr"], group_of[model.norm.weight]["eps"]) == (0.7, 1e-6)
    assert group_of[model.position]["lr"] == 0.01
    assert group_of[model.project.weight]["lr"] == 0.1


def test_a_group_can_be_left_to_adamw():
    model = Everything()
    optimizer = SINGD(
        model, [{"params": "head.*", "precondition": False}], lr=0.1, adamw={"lr": 0.01, "weight_decay": 0.0}
    )
    _train(model, optimizer, 1)
    assert {"exp_avg", "exp_avg_sq"} <= set(optimizer.state[model.head.weight])
    assert not model.head._forward_hooks
    assert "K" in optimizer.state[model.project.weight]
    group = next(g for g in optimizer.param_groups if g["params"][0] is model.head.weight)
    assert (group["lr"], group["weight_decay"]) == (0.01, 0.0)
    row = next(row for row in optimizer.describe().rows if row.name == "head.weight")
    assert row.trained_by == "AdamW"


def test_weight_and_bias_in_different_groups_keep_one_preconditioner():
    """With equal settings, splitting a layer's parameters over groups changes nothing."""
    models = [Everything() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    together = SINGD(models[0])
    apart = SINGD(models[1], [{"params": "*.weight"}, {"params": "*.bias"}])
    assert len(apart.param_groups) > len(together.param_groups)
    for model, optimizer in zip(models, (together, apart), strict=True):
        _train(model, optimizer, 4)
    torch.testing.assert_close(_parameters(models[0]), _parameters(models[1]), rtol=0, atol=0)


def test_weight_and_bias_obey_their_own_groups():
    model = nn.Linear(3, 2)
    before = _parameters(model)
    optimizer = SINGD(
        model, [{"params": "weight", "lr": 0.0}, {"params": "bias", "lr": 0.1}], weight_decay=0.0
    )
    model(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
    assert torch.equal(model.weight, before[0])
    assert not torch.equal(model.bias, before[1])


@pytest.mark.parametrize("grouped", [False, True])
def test_parameters_given_as_such_are_exactly_those_trained(grouped):
    model = Everything()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    chosen = [model.project.weight, model.norm.bias]
    optimizer = SINGD(model, [{"params": chosen, "lr": 0.1}] if grouped else chosen)
    _train(model, optimizer, 2)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"project.weight", "norm.bias"}
    assert optimizer.state[model.project.weight]["K"].numel() == 8 * 8  # no column for the bias


def test_named_parameters_are_accepted():
    model = Everything()
    optimizer = SINGD(model, model.named_parameters())
    assert {p for group in optimizer.param_groups for p in group["params"]} == set(model.parameters())


def test_frozen_parameters_stay():
    model = Everything()
    model.project.weight.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = SINGD(model)
    _train(model, optimizer, 2)
    still = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert still == {"project.weight", "head.bias"}
    assert "exp_avg" in optimizer.state[model.project.bias]  # its weight has no factors
    assert bind(parse("block_diagonal(32)"), 14).numel == optimizer.state[model.head.weight]["K"].numel()


def test_tied_weights_take_one_step_with_the_statistics_of_both_uses():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x).tanh())

    torch.set_default_dtype(torch.float64)
    model, x = Tied(), torch.randn(6, 4)
    optimizer = SINGD(model, structure="dense", momentum=0.0, weight_decay=0.0, lr=0.1, **PAPER)
    seen = {}
    for name, module in model.named_children():
        module.register_forward_pre_hook(lambda m, args, name=name: seen.__setitem__(name, args[0].detach()))
    model(x).square().sum(1).mean().backward()
    (layer,) = optimizer._layers.values()
    first = torch.cat((seen["first"], torch.ones(6, 1)), dim=1)
    second = torch.cat((seen["second"], torch.zeros(6, 1)), dim=1)  # the bias is not used there
    expected = (first.mT @ first + second.mT @ second) / 12
    torch.testing.assert_close(layer.pending.scaled(5, 4, True).k.value.reshape(5, 5), expected)
    optimizer.step()
    assert optimizer.state[model.first.weight]["steps"] == 1


# --- The schedule of factor updates -----------------------------------------------------------------------


def _updates(optimizer, model, steps: int) -> list[int]:
    made = []
    for _ in range(steps):
        _train(model, optimizer, 1)
        made.append(optimizer.state[model.head.weight]["updates"])
    return made


def test_factors_are_updated_every_so_many_steps():
    model = Everything()
    assert _updates(SINGD(model, precond_every=3, **PAPER), model, 8) == [1, 1, 1, 2, 2, 2, 3, 3]


def test_factors_are_updated_at_every_step_of_the_warm_up():
    model = Everything()
    assert _updates(SINGD(model, precond_every=3, precond_warmup=4), model, 8) == [1, 2, 3, 4, 4, 4, 5, 5]


def test_a_schedule_of_the_factor_rate_sees_the_number_of_updates():
    model, asked = Everything(), []
    optimizer = SINGD(model, precond_lr=lambda n: asked.append(n) or 0.01, precond_every=2, precond_warmup=0)
    _train(model, optimizer, 5)
    assert sorted(set(asked)) == [0, 1, 2]


def test_between_updates_nothing_is_captured():
    model = Everything()
    optimizer = SINGD(model, precond_every=2, **PAPER)
    _train(model, optimizer, 1)
    x, y = _batch()
    nn.functional.cross_entropy(model(x), y).backward()
    assert all(layer.pending is None for layer in optimizer._layers.values())
    optimizer.step()
    nn.functional.cross_entropy(model(x), y).backward()
    assert all(layer.pending is not None for layer in optimizer._layers.values())
    optimizer.zero_grad()
    assert all(layer.pending is None for layer in optimizer._layers.values())


@pytest.mark.parametrize("optimizer_class", FAMILY)
@pytest.mark.parametrize("kind", ["batch", "token", None])
def test_micro_batches_give_the_steps_of_the_whole_batch(optimizer_class, kind):
    torch.set_default_dtype(torch.float64)
    x, y = torch.randn(12, 3, 4), torch.randn(12, 3, 2)
    results = []
    for sizes in ([12], [6, 6], [3, 3, 3, 3], [7, 1, 4]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = optimizer_class(model, lr=0.01, loss_average=kind, precond_lr=0.01, **PAPER)
        for _ in range(3):
            optimizer.zero_grad()
            for xs, ys in zip(x.split(sizes), y.split(sizes), strict=True):
                terms = {"batch": 12, "token": 36, None: 1}[kind]
                ((model(xs) - ys).square().sum() / terms).backward()
            optimizer.step()
        results.append(_parameters(model))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_by_default_a_wrong_loss_average_does_no_harm(optimizer_class):
    """A constant factor in G cancels, as the docs say; under PAPER it does not."""
    torch.set_default_dtype(torch.float64)

    def trajectory(kind: str | None, **keywords) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = optimizer_class(model, loss_average=kind, precond_lr=0.01, **keywords)
        for _ in range(5):
            optimizer.zero_grad()
            (model(torch.randn(6, 3, 4)) - 1).square().mean((1, 2)).mean().backward()
            optimizer.step()
        return _parameters(model)

    for kind in ("token", None):
        torch.testing.assert_close(trajectory(kind), trajectory("batch"), rtol=1e-9, atol=1e-11)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(trajectory(kind, **PAPER), trajectory("batch", **PAPER))


# --- In a training loop -----------------------------------------------------------------------------------


def test_closures_are_called_and_their_loss_returned():
    model = Everything()
    optimizer = SINGD(model)
    x, y = _batch()

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[2] < losses[0]
    assert optimizer.state[model.head.weight]["updates"] == 3


def test_a_scheduler_drives_all_groups():
    model = Everything()
    optimizer = SINGD(model, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    _train(model, optimizer, 1)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.05]


def test_parameters_without_gradients_are_left_alone():
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2), nn.LayerNorm(3), nn.LayerNorm(3)])
    before = _parameters(model)
    optimizer = SINGD(model)
    model[0](model[2](torch.randn(4, 3))).sum().backward()
    optimizer.step()
    moved = [not torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True)]
    assert moved == [True, True, False, False, True, True, False, False]


def test_evaluation_leaves_no_trace():
    model = Everything()
    optimizer = SINGD(model)
    with torch.no_grad():
        model(_batch()[0])
    with torch.inference_mode():
        model(_batch()[0])
    assert not optimizer.state
    assert all(layer.pending is None for layer in optimizer._layers.values())


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_single_samples_without_a_batch_dimension(approx):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(0), nn.Linear(8, 2))
    batched = copy.deepcopy(model)
    batched[1] = nn.Flatten()
    x = torch.randn(1, 4, 4)
    for net, inputs in ((model, x), (batched, x.unsqueeze(0))):
        optimizer = SINGD(net, approx=approx)
        net(inputs).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(_parameters(model), _parameters(batched))


def test_copies_of_the_model_are_not_captured():
    model = Everything()
    optimizer = SINGD(model)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in twins:
        twin(_batch()[0]).sum().backward()
        hooks = [hook for module in twin.modules() for hook in module._forward_hooks.values()]
        assert len(hooks) == len(optimizer._layers)
        assert not any(hook.taps for hook in hooks)  # no copy of the optimizer hangs on it
    assert all(layer.pending is None for layer in optimizer._layers.values())
    assert not optimizer.state


def test_lower_precision_factors():
    model = Everything()
    optimizer = SINGD(model, factor_dtype=torch.bfloat16, precond_momentum=0.5)
    losses = _train(model, optimizer, 60)
    state = optimizer.state[model.head.weight]
    assert {state[key].dtype for key in ("K", "C", "m_K", "m_C")} == {torch.bfloat16}
    assert state["momentum_buffer"].dtype == torch.float32
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_a_model_in_bfloat16(optimizer_class):
    model = Everything().to(torch.bfloat16)
    optimizer = optimizer_class(model, lr=5e-3)
    losses = _train(model, optimizer, 40)
    assert sum(losses[-5:]) < sum(losses[:5])
    assert {v.dtype for s in optimizer.state.values() for k, v in s.items() if k in ("K", "S_C")} <= {
        torch.bfloat16
    }


# --- Errors that help -------------------------------------------------------------------------------------


def test_a_structure_that_does_not_fit_names_the_layer_and_leaves_no_hook():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 3))
    with pytest.raises(ValueError, match="layer '1': the structure 'dense\\(2\\)' has a fixed size"):
        SINGD(model, structure="dense(2)")
    assert not any(module._forward_hooks for module in model)


def test_layers_of_an_added_group_are_preconditioned():
    model = Everything()
    optimizer = SINGD(model, [model.project.weight])
    optimizer.add_param_group({"params": [*model.head.parameters()], "lr": 0.1, "structure": "dense"})
    _train(model, optimizer, 2)
    assert optimizer.state[model.head.weight]["K"].numel() == 15**2
    assert optimizer.state[model.project.weight]["updates"] == 2


def test_lazy_modules_are_to_run_first():
    model = nn.Sequential(nn.LazyConv2d(2, 3), nn.Flatten(), nn.LazyLinear(3))
    with pytest.raises(ValueError, match="run the model once"):
        SINGD(model)
    model(torch.randn(2, 1, 4, 4))
    optimizer = SINGD(model)
    model(torch.randn(2, 1, 4, 4)).square().mean().backward()
    optimizer.step()
    assert all("K" in optimizer.state[module.weight] for module in (model[0], model[2]))


def test_sparse_gradients_are_refused():
    for sparse in (nn.Embedding(5, 3, sparse=True), nn.EmbeddingBag(5, 3, sparse=True)):
        with pytest.raises(
            ValueError, match="embedding '0' makes sparse gradients: build it with sparse=False"
        ):
            SINGD(nn.Sequential(sparse))
    model = nn.Embedding(5, 3)
    optimizer = SINGD(model)
    nn.functional.embedding(torch.tensor([1]), model.weight, sparse=True).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()


def test_paper_names_only_switches_of_the_step():
    """So that a user can give the paper's own numbers beside it, for each optimizer."""
    numbers = {
        "lr",
        "structure",
        "approx",
        "loss_average",
        "momentum",
        "weight_decay",
        "damping",
        "precond_lr",
    }
    numbers |= {"precond_momentum", "precond_every", "factor_dtype"}
    assert not numbers & set(PAPER)
    for optimizer_class in FAMILY:
        optimizer_class(Everything(), lr=1e-3, structure="dense", damping=1e-3, precond_every=1, **PAPER)


def test_version():
    assert ingot.__version__


def test_a_bias_with_a_rate_of_its_own_is_bounded_by_the_size_of_the_weight():
    """Also where the weight's own step is too short to be bounded, so that nobody asked for its size."""
    layer = nn.Linear(4, 3)
    nn.init.constant_(layer.weight, 5.0)
    settings = {"structure": "diagonal", "weight_decay": 0.0}
    groups = [{"params": "weight", "lr": 1e-6}, {"params": "bias", "lr": 10.0}]
    optimizer = SINGD(layer, params=groups, **settings)
    before = layer.bias.detach().clone()
    layer(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
    momenta = [optimizer.state[p]["momentum_buffer"] for p in (layer.weight, layer.bias)]
    size = torch.cat([m.flatten() for m in momenta]).square().mean().sqrt()
    torch.testing.assert_close(before - layer.bias.detach(), 0.03 * 5 * momenta[1] / size)


# --- What torch puts around steps -------------------------------------------------------------------------


def _small(kind=SINGD):
    model = nn.Linear(4, 3)
    optimizer = kind(model, lr=0.1)
    model(torch.randn(5, 4)).square().sum().backward()
    return model, optimizer


class _Subclass(SINGD):
    """With a step of its own around the other one."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("kind", [SINGD, _Subclass])
def test_hooks_are_called_once_around_each_step(kind):
    model, optimizer = _small(kind)
    calls = []

    def note(name):
        return lambda this, args, kwargs: calls.append((name, this, args[1:], kwargs, model.weight.clone()))

    handles = [
        optimizer.register_step_pre_hook(note("before")),
        optimizer.register_step_post_hook(note("after")),
        register_optimizer_step_pre_hook(note("before any")),
        register_optimizer_step_post_hook(note("after any")),
    ]
    before = model.weight.detach().clone()
    optimizer.step()
    assert [name for name, *_ in calls] == ["before any", "before", "after", "after any"]
    assert all(call[1:4] == (optimizer, (), {}) for call in calls)
    assert [torch.equal(weight, before) for *_, weight in calls] == [True, True, False, False]
    for one in range(4):
        handles[one].remove()
        calls.clear()
        optimizer.step()
        assert len(calls) == 3 - one


def test_hooks_may_change_the_arguments_of_a_step():
    _, optimizer = _small()
    handle = optimizer.register_step_pre_hook(lambda this, args, kwargs: ((this, lambda: "changed"), {}))
    assert optimizer.step() == "changed"
    handle.remove()
    assert optimizer.step(closure=lambda: "given") == "given"


@pytest.mark.parametrize("kind", [SINGD, _Subclass])
def test_steps_have_a_name_in_profiles(kind):
    _, optimizer = _small(kind)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    names = [event.key for event in profile.key_averages() if event.key.startswith("Optimizer.step")]
    assert names == [f"Optimizer.step#{kind.__name__}.step"]


def test_schedulers_see_the_steps():
    _, optimizer = _small()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()  # warns, which is an error here, where no step was seen
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_gradients_to_zero_or_none():
    model, optimizer = _small()
    gradient = model.weight.grad
    optimizer.zero_grad(set_to_none=False)
    assert model.weight.grad is gradient
    assert not gradient.any()
    optimizer.zero_grad()
    assert model.weight.grad is None is model.bias.grad
