"""What is captured, for every family, against U and G found by torch.func from single samples.

Here an input is what the output's Jacobian by the weight says it is: no unfolding, no adapter, no tap.
"""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev
from transformers.pytorch_utils import Conv1D

from ingot import IKFAC, INGD, KFAC, PAPER, SINGD
from ingot.family import Statistics
from tests.layers.test_contract import EXAMPLES, GraphLinear

FAMILY = [SINGD, INGD, IKFAC, KFAC]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),  # torch's own forward says so
]


def _has_batch(module: nn.Module, shape) -> bool:
    dims = shape.ndim if isinstance(shape, torch.Tensor) else len(shape)
    if isinstance(module, nn.Embedding):
        return dims > 0
    return dims == 2 + len(module.kernel_size) if hasattr(module, "kernel_size") else dims > 1


BATCHED = [
    (module, shape)
    for examples in EXAMPLES.values()
    for module, shape in examples
    if _has_batch(module, shape)
]
BATCHED += [
    (nn.Conv1d(4, 8, 3, groups=4, padding=2, padding_mode="reflect"), (3, 4, 6)),
    (nn.Conv2d(4, 4, 3, groups=4, padding="same", padding_mode="replicate"), (3, 4, 4, 5)),
    (nn.Conv2d(2, 3, 2, stride=3), (4, 2, 6, 5)),  # the last rows and columns meet no kernel
    (nn.ConvTranspose1d(4, 4, 4, stride=2, padding=1, groups=4), (3, 4, 5)),
    (nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1, dilation=2), (3, 2, 3, 3)),
    (nn.ConvTranspose3d(2, 3, 2, stride=2, output_padding=(1, 0, 1), bias=False), (2, 2, 2, 1, 2)),
    (nn.Embedding(6, 3, padding_idx=-1), torch.tensor([0, 5, 5, 2])),
    (nn.Embedding(6, 3, padding_idx=0), torch.tensor([[[0, 0], [5, 3]], [[3, 3], [3, 0]], [[0, 0], [0, 0]]])),
]
# One of each family, and of each way that a family groups or shares.
ONE_OF_EACH = [
    (nn.Linear(4, 3), (4,)),
    (nn.Linear(4, 3), (3, 4)),
    (nn.Conv1d(2, 3, 3, padding=1), (2, 5)),
    (nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect", groups=2), (2, 3, 4)),
    (nn.Conv3d(1, 2, 2), (1, 2, 3, 2)),
    (nn.ConvTranspose1d(2, 3, 3, stride=2), (2, 3)),
    (nn.ConvTranspose2d(4, 4, 2, stride=2, output_padding=1, groups=2), (4, 2, 2)),
    (nn.ConvTranspose3d(2, 1, 2, bias=False), (2, 1, 2, 2)),
    (nn.Embedding(6, 3, padding_idx=2), (3,)),
    (Conv1D(3, 4), (2, 4)),
    (GraphLinear(4, 3), (4,)),
]


# --- Brute force ------------------------------------------------------------------------------------------


def _normal_form(layer: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """A weight, or what has its dimensions last, as ``[..., groups, outputs, inputs]``."""
    if isinstance(layer, TRANSPOSED):
        first = -layer.weight.ndim
        grouped = weight.unflatten(first, (layer.groups, -1)).transpose(first, first + 1)
        return grouped.flatten(first + 1)
    if isinstance(layer, CONVOLUTIONS):
        return weight.flatten(1 - layer.weight.ndim).unflatten(-2, (layer.groups, -1))
    return (weight.mT if isinstance(layer, nn.Embedding | Conv1D) else weight).unsqueeze(-3)


def _output_form(layer: nn.Module, y: torch.Tensor, dims: int) -> torch.Tensor:
    """The first ``dims`` dimensions, those of an output, as ``[batch, places, groups, outputs]``."""
    spatial = isinstance(layer, CONVOLUTIONS + TRANSPOSED)
    y = y.movedim(1, dims - 1) if spatial else y
    y = y.unsqueeze(1) if dims == 2 else y.flatten(1, dims - 2)
    return y.unflatten(2, (layer.groups if spatial else 1, -1))


def _inputs(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The inputs ``[batch, places, groups, d_i (+ 1)]`` of a layer that is linear in its weight."""
    rest = {name: p.detach() for name, p in layer.named_parameters() if name != "weight"}

    def output(weight: torch.Tensor) -> torch.Tensor:
        return functional_call(layer, rest | {"weight": weight}, (x,))

    # In chunks of one: without vmap, for which some padding modes have no rule.
    jacobian = jacrev(output, chunk_size=1)(layer.weight.detach())
    dims = jacobian.ndim - layer.weight.ndim
    jacobian = _output_form(layer, _normal_form(layer, jacobian), dims)
    a = jacobian[:, :, :, 0].diagonal(0, 2, 3).movedim(-1, 2)[..., 0, :]
    # The one linear map of its group for each output, and nothing else.
    groups, outputs = jacobian.shape[2:4]
    everywhere = torch.einsum("nrgi,gh,op->nrgohpi", a, torch.eye(groups), torch.eye(outputs))
    torch.testing.assert_close(jacobian, everywhere)
    bias = getattr(layer, "bias", None)
    return a if bias is None else torch.cat((a, torch.ones_like(a[..., :1])), dim=-1)


def _calls(model: nn.Module, layers: list[nn.Module], x: torch.Tensor) -> list:
    """Every call of the layers in a forward pass: layer, input and output."""
    calls = []
    handles = [
        layer.register_forward_hook(lambda m, args, y: calls.append((m, args[0].detach(), y.detach())))
        for layer in layers
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return calls


def _sample_gradients(model: nn.Module, layers: list[nn.Module], batch, loss) -> list[torch.Tensor]:
    """For every call of the layers: the gradients of each sample's own loss by the call's output."""
    gradients = []
    for sample in zip(*batch, strict=True):
        x, *targets = (tensor.unsqueeze(0) for tensor in sample)
        zeros = [torch.zeros_like(y) for *_, y in _calls(model, layers, x)]

        def moved(deltas, x=x, targets=targets):
            left = iter(deltas)
            handles = [layer.register_forward_hook(lambda m, args, out: out + next(left)) for layer in layers]
            value = loss(model(x), *targets).sum()
            for handle in handles:
                handle.remove()
            return value

        gradients.append(grad(moved)(zeros))
    return [torch.cat(several) for several in zip(*gradients, strict=True)]


def _brute_force(model: nn.Module, layers: list[nn.Module], batch, loss, approx: str) -> list:
    """U and G ``[groups, d, d]`` of every call of the layers."""
    found = []
    gradients = _sample_gradients(model, layers, batch, loss)
    for (layer, x, _), g in zip(_calls(model, layers, batch[0]), gradients, strict=True):
        a, g = _inputs(layer, x), _output_form(layer, g, g.ndim)
        if isinstance(layer, nn.Embedding):
            g = g * a.any(-1, keepdim=True)  # padding, of which the Jacobian says that nothing is used
        if approx == "reduce":
            a, g = a.mean(1, keepdim=True), g.sum(1, keepdim=True)
        samples, places = a.shape[:2]
        u = torch.einsum("nrgi,nrgj->gij", a, a) / (samples * places)
        found.append((u, torch.einsum("nrgi,nrgj->gij", g, g) / samples))
    return found


def _loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One for each sample, in which entries of all places meet."""
    y, target = y.flatten(1), target.flatten(1)
    return (target * y.tanh()).sum(1) + (target.cos() * y).sum(1).square() + y.square().mean(1)


def _fresh(module: nn.Module) -> nn.Module:
    """A copy with weights that do not depend on which test files were imported before."""
    layer = copy.deepcopy(module).double()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    return layer


def _example(module: nn.Module, shape) -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    """The layer, a model around it, a batch of inputs, and something to aim at."""
    layer = _fresh(module)
    tokens = isinstance(shape, torch.Tensor)
    model = nn.Sequential(nn.Identity() if tokens else nn.Softsign(), layer, nn.Softplus())
    x = shape if tokens else torch.randn(shape)
    with torch.no_grad():
        target = torch.randn_like(model(x))
    return layer, model, x, target


def _seen(optimizer, weight: nn.Parameter, loss_is_mean: bool = True):
    layer = optimizer._layers[weight]
    lead, d_o, d_i = layer.shape
    seen = layer.pending.scaled(d_i, d_o, loss_is_mean)
    return [x.reshape(*(lead or (1,)), -1) for x in as_tensors(seen)]


def as_tensors(seen: Statistics) -> list[torch.Tensor]:
    """U, G and their mean traces."""
    k, c = seen.k.value, seen.c.value
    return [k, c, *(torch.as_tensor(trace, dtype=k.dtype).view(-1, 1) for trace in seen[2:])]


def _entries(optimizer, weight: nn.Parameter, u: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    """U and G as the statistics of the layer should have them: the diagonal where that is all it keeps."""
    expected = []
    for s, matrix in zip(optimizer._layers[weight].structures, (u, g), strict=True):
        kept = matrix.flatten(-2) if s.name == "dense" else matrix.diagonal(0, -2, -1)
        expected.append(kept)
    traces = [m.diagonal(0, -2, -1).mean(-1, keepdim=True) for m in (u, g)]
    return expected + traces


# --- Every family -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize(("module", "shape"), BATCHED, ids=str)
def test_the_statistics_are_those_of_single_samples(module, shape, approx):
    layer, model, x, target = _example(module, shape)
    ((u, g),) = _brute_force(model, [layer], (x, target), _loss, approx)
    if isinstance(layer, nn.Embedding) and approx == "expand":
        assert torch.equal(u, u.diagonal(0, -2, -1).diag_embed())  # so that its diagonal is all of it
    # At identity factors Kᵀ U K is U.
    for optimizer_class, structure, kind in (
        (KFAC, "dense", "batch"),
        (KFAC, "dense", None),
        (INGD, "dense", "batch"),
        (SINGD, "diagonal", "batch"),
    ):
        optimizer = optimizer_class(model, structure=structure, approx=approx, loss_average=kind, **PAPER)
        losses = _loss(model(x), target)
        (losses.mean() if kind else losses.sum()).backward()
        seen = _seen(optimizer, layer.weight, loss_is_mean=kind is not None)
        # Of a sum of losses, G is the sum.
        expected = _entries(optimizer, layer.weight, u, g if kind else g * len(x))
        torch.testing.assert_close(seen, expected, rtol=1e-10, atol=1e-12)
        optimizer.zero_grad()
        optimizer.detach()


@pytest.mark.parametrize(("module", "shape"), ONE_OF_EACH, ids=str)
def test_inputs_may_be_given_by_name(module, shape):
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = _fresh(module)

        def forward(self, x):
            return self.layer(**{"x" if isinstance(module, Conv1D | GraphLinear) else "input": x})

    model = ByName()
    x = torch.randint(0, 6, (3, *shape)) if isinstance(module, nn.Embedding) else torch.randn(3, *shape)
    optimizer = KFAC(model, **PAPER)
    seen = []
    for call in (model, model.layer):
        call(x).sin().sum().backward()
        seen.append(_seen(optimizer, model.layer.weight))
        optimizer.zero_grad()
    torch.testing.assert_close(*seen)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(4, 3), (2, 6, 4)),
        (Conv1D(3, 4), (2, 5, 4)),
        (nn.Embedding(6, 3), torch.tensor([[0, 5], [5, 1]])),
    ],
    ids=str,
)
def test_a_mean_over_tokens_has_the_mean_curvature_of_a_token(module, shape):
    layer, model, x, target = _example(module, shape)

    def tokens_loss(y, target):
        return (target * y.tanh()).sum(-1) + (target.cos() * y).sum(-1).square()

    tokens = x.shape[0] * x.shape[1]
    # The loss is one for each token, and no token's loss depends on another: samples of one place each.
    each = x.reshape(tokens, 1, *x.shape[2:]), target.reshape(tokens, 1, -1)
    ((u, g),) = _brute_force(model, [layer], each, tokens_loss, "expand")
    optimizer = KFAC(model, loss_average="token", **PAPER)
    tokens_loss(model(x), target).mean().backward()
    expected = _entries(optimizer, layer.weight, u, g)
    torch.testing.assert_close(_seen(optimizer, layer.weight), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_layers_within_a_model_have_the_statistics_of_single_samples(approx):
    model = nn.Sequential(
        nn.Embedding(7, 6),
        nn.Unflatten(2, (2, 3)),
        nn.Conv2d(5, 4, (1, 2), groups=1),
        nn.Tanh(),
        nn.ConvTranspose2d(4, 2, 2, groups=2),
        nn.ReLU(inplace=True),
        nn.Flatten(2),
        nn.Linear(9, 3, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(6, 4),
        nn.ReLU(inplace=True),
    )
    layers = [module for module in model if hasattr(module, "weight")]
    x, target = torch.randint(0, 7, (3, 5)), torch.randn(3, 4)
    expected = _brute_force(model, layers, (x, target), _loss, approx)
    optimizer = KFAC(model, approx=approx, **PAPER)
    _loss(model(x), target).mean().backward()
    for layer, (u, g) in zip(layers, expected, strict=True):
        assert (g.abs() > 1e-6).any()
        seen = _seen(optimizer, layer.weight)
        torch.testing.assert_close(seen, _entries(optimizer, layer.weight, u, g), rtol=1e-10, atol=1e-12)


def test_an_output_size_that_is_asked_for_is_seen():
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ConvTranspose2d(2, 3, 3, stride=2)

        def forward(self, x):
            return self.layer(x, output_size=(8, 7))

    model, x, target = Asks(), torch.randn(4, 2, 3, 3), torch.randn(4, 3, 8, 7)
    same = nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=(1, 0))
    same.load_state_dict(model.layer.state_dict())
    ((u, g),) = _brute_force(same, [same], (x, target), _loss, "expand")
    optimizer = KFAC(model, **PAPER)
    _loss(model(x), target).mean().backward()
    expected = _entries(optimizer, model.layer.weight, u, g)
    torch.testing.assert_close(_seen(optimizer, model.layer.weight), expected, rtol=1e-10, atol=1e-12)


# --- Micro-batches ----------------------------------------------------------------------------------------


def _accumulated(optimizer_class, module, shape, kind: str | None, sizes: list[int], **keywords) -> list:
    """Factors and parameters after three steps with batches in pieces of the given sizes."""
    torch.manual_seed(0)
    layer = _fresh(module)
    model = nn.Sequential(layer, nn.Softplus())
    tokens = isinstance(layer, nn.Embedding)
    optimizer = optimizer_class(
        model, lr=1e-3, loss_average=kind, precond_lr=0.01, precond_every=1, **{**PAPER, **keywords}
    )
    samples = sum(sizes)
    for _ in range(3):
        x = (
            torch.randint(0, layer.num_embeddings, (samples, *shape))
            if tokens
            else torch.randn(samples, *shape)
        )
        with torch.no_grad():
            y = model(x)
        target = torch.randn_like(y)
        places = _output_form(layer, y, y.ndim).shape[1]
        terms = {"batch": samples, "token": samples * places, None: 1}[kind]
        optimizer.zero_grad()
        for piece, aim in zip(x.split(sizes), target.split(sizes), strict=True):
            # Small enough for the paper's step, which nothing bounds and which would blow up rounding.
            (0.1 / places * _loss(model(piece), aim).sum() / terms).backward()
        optimizer.step()
    state = optimizer.state[layer.weight]
    assert state["updates"] == 3
    return [state[name] for name in optimizer.rule.keys if name in state] + list(model.parameters())


@pytest.mark.parametrize("kind", ["batch", "token", None])
@pytest.mark.parametrize("optimizer_class", FAMILY)
@pytest.mark.parametrize(("module", "shape"), ONE_OF_EACH, ids=str)
def test_micro_batches_give_the_factors_of_the_whole_batch(module, shape, optimizer_class, kind):
    whole = _accumulated(optimizer_class, module, shape, kind, [8])
    # Factors that stay where they began would agree, too.
    assert all((f - f.round()).abs().max() > 1e-4 and f.abs().max() < 10 for f in whole[:2])
    for sizes in ([4, 4], [2, 2, 2, 2], [5, 1, 2]):
        pieces = _accumulated(optimizer_class, module, shape, kind, sizes)
        torch.testing.assert_close(pieces, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimizer_class", FAMILY)
@pytest.mark.parametrize(("module", "shape"), ONE_OF_EACH, ids=str)
def test_micro_batches_give_the_factors_of_the_whole_batch_by_default(module, shape, optimizer_class):
    """With what is added to the paper's step, for "reduce"."""
    from_paper = {
        "approx": "reduce",
        "relative_damping": True,
        "factor_start": "trace",
        "normalize_step": True,
    }
    whole = _accumulated(optimizer_class, module, shape, "batch", [8], **from_paper)
    for sizes in ([4, 4], [2, 2, 2, 2]):
        pieces = _accumulated(optimizer_class, module, shape, "batch", sizes, **from_paper)
        torch.testing.assert_close(pieces, whole, rtol=1e-9, atol=1e-12)


# --- One weight, several uses -----------------------------------------------------------------------------


class Language(nn.Module):
    """Tokens in and out through one weight, as in GPT-2."""

    def __init__(self, bias: bool, padding_idx: int | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=padding_idx)
        self.head = nn.Linear(4, 7, bias=bias)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens).cumsum(1).tanh())


def _by_class(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(y.mT, target, reduction="none").sum(1)


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_an_embedding_tied_to_the_output_adds_two_products(bias, padding_idx, approx):
    model = Language(bias, padding_idx)
    tokens, target = torch.randint(0, 7, (5, 6)), torch.randint(0, 7, (5, 6))
    assert (tokens == 2).any()
    flipped, straight = _brute_force(
        model, [model.embedding, model.head], (tokens, target), _by_class, approx
    )
    (u_1, g_1), (u_2, g_2) = ([m.squeeze(0) for m in pair] for pair in (straight, flipped))
    if bias:  # of which the embedding makes no use
        g_2 = torch.nn.functional.pad(g_2, (0, 1, 0, 1))

    optimizer = KFAC(model, approx=approx, **PAPER)
    _by_class(model(tokens), target).mean().backward()
    k, c, trace_u, trace_g = (x.squeeze(0) for x in _seen(optimizer, model.head.weight))

    # Gradients of the embedding stand beside inputs of the head, and its tokens beside the head's gradients.
    move = (g_1.trace() * g_2.trace() / (u_1.trace() * u_2.trace())).sqrt()
    torch.testing.assert_close(g_2.trace() / move / u_1.trace(), u_2.trace() * move / g_1.trace())
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(k.reshape(4 + bias, 4 + bias), u_1 + g_2 / move, **close)
    torch.testing.assert_close(c.reshape(7, 7), g_1 + u_2 * move, **close)
    torch.testing.assert_close(trace_u, k.reshape(4 + bias, -1).trace().reshape(1) / (4 + bias), **close)
    torch.testing.assert_close(trace_g, c.reshape(7, 7).trace().reshape(1) / 7, **close)


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_of_a_tied_weight_one_use_may_be_missing(approx):
    """Where only the embedding was called, its product stands alone, with its sides changed."""
    model = Language(False, None)
    tokens, target = torch.randint(0, 7, (5, 6)), torch.randn(5, 6, 4)
    ((u, g),) = _brute_force(model.embedding, [model.embedding], (tokens, target), _loss, approx)
    optimizer = KFAC(model, approx=approx, **PAPER)
    _loss(model.embedding(tokens), target).mean().backward()
    seen = _seen(optimizer, model.head.weight)
    torch.testing.assert_close(seen, _entries(optimizer, model.head.weight, g, u), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_a_tied_embedding_in_micro_batches(optimizer_class):
    results = []
    for sizes in ([8], [4, 4], [2, 2, 2, 2], [5, 1, 2]):
        torch.manual_seed(0)
        model = Language(True, 2)
        optimizer = optimizer_class(model, lr=1e-3, precond_lr=0.02, precond_every=1, **PAPER)
        for _ in range(3):
            tokens, target = torch.randint(0, 7, (8, 6)), torch.randint(0, 7, (8, 6))
            optimizer.zero_grad()
            for x, y in zip(tokens.split(sizes), target.split(sizes), strict=True):
                (_by_class(model(x), y).sum() / 8).backward()
            optimizer.step()
        state = optimizer.state[model.head.weight]
        results.append([state[key] for key in optimizer.rule.names] + list(model.parameters()))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-9, atol=1e-12)


class Twice(nn.Module):
    """One layer in two places."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x).tanh()).sin()


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(4, 4), (5, 4)),
        (nn.Linear(4, 4), (5, 3, 4)),
        (nn.Conv2d(4, 4, 3, groups=2, padding=1), (3, 4, 3, 2)),
        (Conv1D(4, 4), (3, 2, 4)),
    ],
    ids=str,
)
def test_a_layer_that_is_used_twice_counts_its_samples_once(layer, shape, approx):
    model = Twice(_fresh(layer))
    x, target = torch.randn(shape), torch.randn(shape)
    (u_1, g_1), (u_2, g_2) = _brute_force(model, [model.layer], (x, target), _loss, approx)
    optimizer = KFAC(model, approx=approx, **PAPER)
    _loss(model(x), target).mean().backward()
    expected = _entries(optimizer, model.layer.weight, (u_1 + u_2) / 2, g_1 + g_2)
    torch.testing.assert_close(_seen(optimizer, model.layer.weight), expected, rtol=1e-10, atol=1e-12)

    # The same from two passes forward and backward for one step.
    optimizer.zero_grad()
    for piece, aim in zip(x.tensor_split([2]), target.tensor_split([2]), strict=True):
        (_loss(model(piece), aim).sum() / len(x)).backward()
    torch.testing.assert_close(_seen(optimizer, model.layer.weight), expected, rtol=1e-10, atol=1e-12)


def test_uses_of_different_lengths_are_a_mean_over_all_rows():
    class Lengths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return torch.cat((self.layer(x), self.layer(x[:, :2].tanh())), dim=1).sigmoid()

    model, x, target = Lengths(), torch.randn(3, 5, 4), torch.randn(3, 7, 3)
    (u_1, g_1), (u_2, g_2) = _brute_force(model, [model.layer], (x, target), _loss, "expand")
    optimizer = KFAC(model, **PAPER)
    _loss(model(x), target).mean().backward()
    expected = _entries(optimizer, model.layer.weight, (5 * u_1 + 2 * u_2) / 7, g_1 + g_2)
    torch.testing.assert_close(_seen(optimizer, model.layer.weight), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_passes_before_one_step_are_one_batch(approx):
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2, bias=False))
    x, target = torch.randn(6, 5, 4), torch.randn(6, 5, 2)
    layers = [model[0], model[2]]
    expected = _brute_force(model, layers, (x, target), _loss, approx)
    optimizer = KFAC(model, approx=approx, **PAPER)
    for pieces in ([6], [3, 3], [1, 2, 3]):
        optimizer.zero_grad()
        for piece, aim in zip(x.split(pieces), target.split(pieces), strict=True):
            (_loss(model(piece), aim).sum() / 6).backward()
        for layer, (u, g) in zip(layers, expected, strict=True):
            seen = _seen(optimizer, layer.weight)
            torch.testing.assert_close(seen, _entries(optimizer, layer.weight, u, g), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tied", ["grouped", "packed"])
def test_a_weight_that_two_modules_see_as_different_matrices_is_trained(tied):
    """One of them as a single matrix, the other as several; their uses cannot be added up."""
    model = nn.ModuleDict()
    if tied == "grouped":
        model.update({"one": nn.Conv2d(1, 4, 3, bias=False), "several": nn.Conv2d(4, 4, 3, groups=4)})
        model["one"].weight = model["several"].weight
    else:
        model.update({"one": nn.Linear(4, 12, bias=False), "several": nn.MultiheadAttention(4, 2)})
        model["one"].weight = model["several"].in_proj_weight
    weight = model["one"].weight
    before = weight.detach().clone()
    optimizer = SINGD(model)
    if tied == "grouped":
        y = model["several"](model["one"](torch.randn(3, 1, 6, 6)).tanh())
    else:
        x = torch.randn(3, 5, 4)
        y = model["one"](model["several"](x, x, x)[0])
    y.square().mean().backward()
    optimizer.step()
    assert weight.isfinite().all()
    assert not torch.equal(weight, before)


# --- No rows at all ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize(("module", "shape"), ONE_OF_EACH, ids=str)
def test_an_empty_batch_is_no_batch(module, shape, approx):
    """As an expert meets it to which no token was sent; alone, and as one of two micro-batches."""
    layer = _fresh(module)
    before = layer.weight.detach().clone()
    optimizer = KFAC(layer, approx=approx, **PAPER)
    x = torch.randint(0, 6, (3, *shape)) if isinstance(layer, nn.Embedding) else torch.randn(3, *shape)
    seen = []
    for batches in ([x], [x, x[:0]], [x[:0], x]):
        optimizer.zero_grad()
        for batch in batches:
            layer(batch).sin().sum().backward()
        seen.append(_seen(optimizer, layer.weight))
    torch.testing.assert_close(seen[1:], seen[:1] * 2)
    optimizer.zero_grad()
    layer(x[:0]).sin().sum().backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in layer.parameters())
    torch.testing.assert_close(layer.weight, before, rtol=1e-4, atol=0)  # but for the weight decay


def test_experts_without_tokens_wait():
    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    optimizer = SINGD(experts)
    x = torch.randn(8, 4)
    chosen = torch.arange(8) % 2  # never the last
    y = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        y[chosen == i] = expert(x[chosen == i])
    y.square().mean().backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in experts.parameters())
    assert all(optimizer.state[expert.weight]["updates"] == 1 for expert in experts[:2])


@pytest.mark.parametrize("structure", ["dense", "diagonal", "block_diagonal(3)", "hierarchical(2,2)"])
@pytest.mark.parametrize("optimizer_class", [SINGD, IKFAC])
def test_some_rows_stand_for_all(optimizer_class, structure):
    """Of rows that come four times each, every fourth says all there is to know."""
    model = nn.Linear(5, 4).double()
    x = torch.randn(3, 8, 5, dtype=torch.float64).repeat_interleave(4, dim=1)
    seen = []
    for max_rows in (None, 24):
        optimizer = optimizer_class(model, structure=structure, max_rows=max_rows)
        model(x).square().sum().backward()
        (layer,) = optimizer._layers.values()
        seen.append(as_tensors(layer.pending.scaled(6, 4, loss_is_mean=True)))
        optimizer.detach()
    torch.testing.assert_close(seen[1], seen[0])


def test_other_rows_at_each_update():
    model = nn.Linear(2, 1, bias=False).double()
    optimizer = SINGD(model, structure="dense", max_rows=2, lr=0.0, precond_every=1)
    x = torch.eye(2, dtype=torch.float64).repeat(3, 1) * torch.arange(1.0, 7, dtype=torch.float64).unsqueeze(
        1
    )
    traces = []
    for _ in range(4):
        optimizer.zero_grad()
        model(x).sum().backward()
        (layer,) = optimizer._layers.values()
        traces.append(layer.pending.scaled(2, 1, loss_is_mean=True).trace_u)
        optimizer.step()
    # Of six rows every third: the squares of 1 and 4, of 2 and 5, of 3 and 6, over two rows and two columns.
    assert traces == pytest.approx([17 / 4, 29 / 4, 45 / 4, 17 / 4])
