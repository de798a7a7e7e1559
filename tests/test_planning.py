"""The plan: bytes as they will be, operations as torch counts them, and a model that is left as it was."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

import ingot
from ingot import IKFAC, KFAC, SINGD, rules
from ingot.costs import Flops
from ingot.lab.memory import state_bytes
from ingot.lab.named_models import named_model
from ingot.rules import Factor
from ingot.structures import bind, parse
from tests.behaviour.training import hooks
from tests.zoo import BUILDERS, build


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 5)
    )


def counted(function, *args) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*args)
    return counter.get_total_flops()


# --- Operations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["dense", "block_diagonal(4)", "tril", "triu"])
@pytest.mark.parametrize("dim", [1, 4, 12])
def test_operations_of_structures_are_those_that_torch_counts(text, dim):
    s = bind(parse(text), dim)
    a, x = s.identity(), torch.randn(dim, 7)
    assert counted(s.apply, a, x) == counted(s.apply_t, a, x) == counted(s.gram, x) == s.flops(7)
    assert counted(s.matmul, a, a) == counted(s.self_gram, a) == s.product_flops


def test_operations_of_compositions_are_those_of_their_parts():
    s = bind(parse("upper(dense(3),lower(dense(4),dense(5)))"), 12)
    a, x = s.identity(), torch.randn(12, 7)
    assert counted(s.apply, a, x) == counted(s.gram, x) == s.flops(7)
    assert counted(s.matmul, a, a) == s.product_flops


@pytest.mark.parametrize("text", ["tril_toeplitz", "triu_toeplitz", "diagonal", "hierarchical(16,16)"])
def test_operations_of_sparse_structures_grow_little_faster_than_their_dimension(text):
    """Products of full matrices of twice the dimension take eight times as many."""
    small, large = (bind(parse(text), dim) for dim in (512, 1024))
    assert 1.9 < large.flops(10) / small.flops(10) < 2.4
    assert 1.9 < large.product_flops / small.product_flops < 2.4
    assert bind(parse("dense"), 1024).flops(10) > 5 * large.flops(10)


@pytest.mark.parametrize("optimizer_class", [SINGD, KFAC])
@pytest.mark.parametrize("kept", [False, True])
def test_the_natural_gradient_takes_what_is_planned(optimizer_class, kept):
    (row,) = ingot.plan(
        nn.Linear(20, 9), optimizer=optimizer_class, structure="dense", cache_products=kept
    ).rows
    structures = bind(parse("dense"), 21), bind(parse("dense"), 9)
    squares = optimizer_class.rule.squares(structures, 10 if kept else 0)
    k, c = (
        rules.Product(square, square.of(s.identity())) for square, s in zip(squares, structures, strict=True)
    )
    assert counted(rules.natural_gradient, k, c, torch.randn(9, 21)) == row.flops.gradient


@pytest.mark.parametrize(("approx", "rows"), [("expand", 4 * 16), ("reduce", 4)])
def test_statistics_take_what_is_planned(approx, rows):
    plan = ingot.plan(convolutional(), structure="triu", approx=approx, example=torch.zeros(4, 3, 4, 4))
    d_i, d_o = 28, 6
    k, c = (bind(parse("triu"), dim) for dim in (d_i, d_o))
    assert plan.rows[0].flops.statistics == sum(
        counted(lambda s: rules.curvature(Factor(s, s.identity()), torch.randn(s.dim, rows)), s)
        for s in (k, c)
    )


def test_steps_are_a_mean_over_updates():
    plan = ingot.plan(nn.Linear(20, 9), precond_every=5, example=torch.zeros(3, 20))
    (row,) = plan.rows
    assert min(row.flops) > 0
    assert row.flops_per_step == row.flops.gradient + (row.flops.update + row.flops.statistics) / 5
    assert Flops(3, 4, 6).per_step(10) == 4


def test_forward_and_backward_are_counted():
    model, x = convolutional(), torch.randn(4, 3, 4, 4)
    plan = ingot.plan(model, example=x)
    assert plan.model_flops == counted(lambda: model(x).sum().backward())
    assert plan.extra_flops == plan.flops_per_step / plan.model_flops
    assert all(row.flops.statistics > 0 for row in plan.rows if row.k)


LOOKS_AT_VALUES = {"transformers/gpt2", "peft/lora", "torch_geometric/gcn", "torch_geometric/gat"}
"""Models that decide by the values of their inputs, such as whether tokens are padding."""


@pytest.mark.parametrize("name", BUILDERS)
def test_real_models_are_planned_without_computing_anything(name):
    case = build(name)
    calls = []
    handle = case.model.register_forward_pre_hook(lambda *call: calls.append(call[1:]), with_kwargs=True)
    passes = counted(lambda: case.loss(case.model).backward())
    handle.remove()
    case.model.zero_grad()
    args, kwargs = calls[0]
    before = {key: value.clone() for key, value in case.model.state_dict().items()}
    if name in LOOKS_AT_VALUES:
        with pytest.raises(ValueError, match="leave the example out"):
            ingot.plan(case.model, structure="auto", example=args or kwargs)
    else:
        plan = ingot.plan(case.model, structure="auto", example=args or kwargs)
        assert plan.extra_flops > 0
        # torch counts no kernels of attention on a CPU, nor LSTMs there.
        assert plan.model_flops == passes or name.startswith(("transformers/", "torch/"))
        assert plan.model_flops >= passes
        assert plan.state_bytes <= plan.adamw_bytes
    assert not hooks(case.model)
    assert all(torch.equal(value, before[key]) for key, value in case.model.state_dict().items())
    assert all(p.grad is None for p in case.model.parameters())


class Answers(nn.Module):
    """Returns what models return: tensors in a dict, with things that have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(4, 3)

    def forward(self, x: Tensor, *, y: Tensor) -> dict:
        return {"first": [self.a(x)], "second": (self.b(y), 5), "none": None, "ids": x.argmax()}


def test_arguments_may_be_keywords_and_outputs_nested():
    plan = ingot.plan(Answers(), example={"x": torch.zeros(2, 4), "y": torch.zeros(3, 4)})
    assert plan.model_flops == 2 * (2 * 2 * 4 * 5 + 2 * 3 * 4 * 3)  # inputs have no gradients


def test_uses_of_a_tied_weight_add_up():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens))

    tokens = torch.ones(2, 3, dtype=torch.int64)
    (tied,) = ingot.plan(Tied(), structure="block_diagonal(2)", example=tokens).rows
    head = ingot.plan(nn.Linear(4, 11, bias=False), structure="block_diagonal(2)", example=torch.zeros(6, 4))
    assert tied.flops.statistics == 2 * head.rows[0].flops.statistics
    # Tokens stand on the C side, and need no rows where it is diagonal.
    (tied,) = ingot.plan(Tied(), structure=("triu", "diagonal"), example=tokens).rows
    k, c = (bind(parse(text), dim) for text, dim in (("triu", 4), ("diagonal", 11)))
    sandwich = c.flops(6) + 2 * c.product_flops if c.gram_first(6) else 2 * c.flops(6)
    of_tokens = c.flops(1) + 2 * c.product_flops if c.gram_first(1) else 2 * c.flops(1)
    assert tied.flops.statistics == 2 * 2 * k.flops(6) + sandwich + of_tokens


def test_gram_matrices_come_first_where_there_are_many_rows():
    few, many = (
        ingot.plan(nn.Linear(7, 8), structure="dense", example=torch.zeros(n, 7)).rows[0] for n in (8, 800)
    )
    assert few.flops.statistics == 2 * 2 * (2 * 8**2 * 8)
    assert many.flops.statistics == 2 * (2 * 8**2 * 800 + 2 * 2 * 8**3)


def test_an_embedding_takes_next_to_nothing_for_its_inputs():
    (row,) = ingot.plan(
        nn.Embedding(1000, 4), structure="dense", example=torch.ones(2, 3, dtype=torch.int64)
    ).rows
    assert row.flops.statistics < 10_000


def test_an_example_that_does_not_fit_is_refused_and_leaves_nothing():
    model = convolutional()
    with pytest.raises(ValueError, match=r"could not be run on its example.*several as a tuple"):
        ingot.plan(model, example=(torch.zeros(4, 3, 4, 4), torch.zeros(4)))
    assert not hooks(model)


# --- Memory ---------------------------------------------------------------------------------------------


def measured(model: nn.Module, loss, optimizer_class=SINGD, **settings) -> tuple[int, ingot.Plan]:
    plan = ingot.plan(model, optimizer=optimizer_class, **settings)
    optimizer = optimizer_class(model, **settings)
    loss(model).backward()
    optimizer.step()
    kept = [layer.kept for layer in optimizer._layers.values() if layer.kept is not None]
    tensors = [product.entries for its in kept for product in (its.k, its.c) if product.square.numel]
    tensors += [k.scales.bias for k in kept if k.scales is not None and k.scales.bias is not None]
    return state_bytes(optimizer) + sum(t.numel() * t.element_size() for t in tensors), plan


@pytest.mark.parametrize("optimizer_class", [SINGD, IKFAC, KFAC])
@pytest.mark.parametrize("name", ["transformers/gpt2", "transformers/vit", "timm/vgg", "timm/resnet"])
@pytest.mark.parametrize("structure", ["auto", "diagonal"])
def test_planned_bytes_are_those_measured(name, optimizer_class, structure):
    case = build(name)
    total, plan = measured(case.model, case.loss, optimizer_class, structure=structure)
    assert total == plan.state_bytes <= plan.adamw_bytes
    adamw, sgd = (
        torch.optim.AdamW(case.model.parameters()),
        torch.optim.SGD(case.model.parameters(), momentum=0.9),
    )
    for peer, planned in ((adamw, plan.adamw_bytes), (sgd, plan.sgd_bytes)):
        peer.step()
        assert state_bytes(peer) == planned


REAL = {
    "hf:gpt2": (16,),
    "timm:vit_small_patch16_224": None,
    "timm:vgg16": (3, 224, 224),
    "timm:resnet50": (3, 64, 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_planned_bytes_of_real_configurations_are_those_measured(name):
    planned = ingot.plan(named_model(name).model, structure="auto")
    assert planned.state_bytes <= planned.adamw_bytes
    named = named_model(name)
    example = named.example(2, REAL[name])
    model = named.model.to_empty(device="cpu")
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # which are made apart
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.02 * torch.randn_like(p))
        for b in model.buffers():
            b.zero_()

    def loss(model: nn.Module) -> Tensor:
        if isinstance(example, dict):
            tokens = torch.randint(100, example["input_ids"].shape)
            return model(input_ids=tokens, labels=tokens).loss
        return cross_entropy(model(torch.randn(example.shape)), torch.arange(2))

    total, plan = measured(model, loss, structure="auto")
    assert plan.state_bytes == planned.state_bytes
    assert abs(total - planned.state_bytes) <= 0.01 * total


REAL_RATIOS = {"hf:gpt2": 0.95, "timm:vit_base_patch16_224": 0.95, "timm:vgg16": 0.5, "timm:resnet50": 0.95}


@pytest.mark.parametrize("name", REAL_RATIOS)
@pytest.mark.parametrize("budget", ["1.0x adamw", "1.3x sgd"])
def test_real_configurations_are_planned_within_the_budget_on_the_meta_device(name, budget):
    plan = ingot.plan(named_model(name).model, memory_budget=budget)
    allowed = plan.adamw_bytes if "adamw" in budget else 1.3 * plan.sgd_bytes
    assert plan.state_bytes <= allowed
    if "adamw" in budget:
        assert plan.state_bytes > REAL_RATIOS[name] * allowed
    shapes = {}
    for row in plan.rows:
        if row.k:
            shapes.setdefault((row.name.rsplit(".", 2)[1], row.shape), set()).add((row.k, row.c))
    assert all(len(pairs) == 1 for pairs in shapes.values())  # all blocks are alike


def test_products_are_kept_in_the_dtype_that_is_computed_with():
    model = nn.Conv1d(8, 12, 3, groups=4, bias=False)  # four matrices of 3 x 6
    for dtype in (torch.float32, torch.bfloat16):
        plan = ingot.plan(model, structure="dense", factor_dtype=dtype, cache_products=True)
        assert plan.cached_bytes == 4 * (6**2 + 3**2) * 4
        assert (
            plan.state_bytes
            == ingot.plan(model, structure="dense", factor_dtype=dtype, cache_products=False).state_bytes
            + plan.cached_bytes
        )
    assert ingot.plan(model, optimizer=KFAC).cached_bytes == 0


def test_a_bias_counts_with_its_weight():
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4))
    description, plan = SINGD(model).describe(), ingot.plan(model)
    assert [row.name for row in plan.rows] == ["0.weight", "1.weight", "1.bias"]
    assert plan.rows[0].state_bytes == sum(row.state_bytes for row in description.rows[:2])
    assert plan.state_bytes == sum(row.state_bytes for row in description.rows)


def test_frozen_parameters_are_no_part_of_the_plan():
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    assert [row.name for row in ingot.plan(model).rows] == ["1.weight"]


# --- The table ------------------------------------------------------------------------------------------


def test_the_table_has_a_line_for_layers_that_are_alike():
    model = nn.Sequential(
        nn.Linear(8, 8), *(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3))
    )
    text = str(ingot.plan(model, example=torch.zeros(2, 8), cache_products=True))
    head, rule, first, several, rest, blank, *summary = text.splitlines()
    assert head.split("  ")[0] == "layer"
    assert head.rstrip().endswith("/ fwd+bwd")
    assert set(rule) == {"-", " "}
    assert first.startswith("0.weight ")
    assert several.startswith("3 x *.0.weight ")
    assert rest.startswith("6 by AdamW ")
    assert blank == ""
    assert "x AdamW's" in summary[0]
    assert "products kept" in summary[1]
    assert "of a forward and backward pass" in summary[2]
    assert max(map(len, (head, first, several))) <= len(rule)


def test_the_table_says_what_is_missing_without_an_example():
    plan = ingot.plan(nn.Linear(8, 8))
    assert plan.extra_flops is None
    assert "fwd+bwd" not in str(plan)
    assert "give an example batch" in str(plan)
    assert repr(plan) == str(plan)


@pytest.mark.parametrize("optimizer", ["singd", "KFAC", IKFAC])
def test_optimizers_are_named_or_given(optimizer):
    name = optimizer if isinstance(optimizer, str) else optimizer.__name__
    assert {row.trained_by for row in ingot.plan(nn.Linear(3, 2), optimizer=optimizer).rows} == {name.upper()}


@pytest.mark.parametrize("optimizer", ["adam", torch.optim.SGD, None])
def test_other_optimizers_are_refused(optimizer):
    with pytest.raises(ValueError, match="optimizer must be one of SINGD, INGD, IKFAC, KFAC"):
        ingot.plan(nn.Linear(3, 2), optimizer=optimizer)
