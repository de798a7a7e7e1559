"""nn.MultiheadAttention, whose forward is made once more when statistics are wanted: as the same function."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ingot import IKFAC, INGD, KFAC, PAPER, SINGD
from ingot.capture import CaptureHook
from tests.layers.test_statistics import as_tensors

FAMILY = [SINGD, INGD, IKFAC, KFAC]
BATCH, TARGETS, SOURCES, SIZE, HEADS = 3, 5, 4, 8, 2

MODULES = {
    "batch first": {"batch_first": True},
    "sequence first": {},
    "no bias": {"bias": False, "batch_first": True},
    "bias_kv": {"add_bias_kv": True, "batch_first": True},
    "zero_attn": {"add_zero_attn": True},
    "bias_kv and zero_attn": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "separate": {"kdim": 6, "vdim": 6, "batch_first": True},
    "separate, all different": {"kdim": 6, "vdim": 7},
    "separate, no bias, bias_kv": {"kdim": 6, "vdim": 8, "bias": False, "add_bias_kv": True},
}
ADDED = [name for name, options in MODULES.items() if {"add_bias_kv", "add_zero_attn"} & set(options)]
INPUTS = ["self", "key is value", "query is key", "three", "equal but not one"]
MASKS = [
    "none",
    "bool",
    "float",
    "bool of heads",
    "float of heads",
    "padding",
    "float padding",
    "bool and padding",
    "float and float padding",
    "bool of heads and padding",
    "causal",
    "causal and padding",
]
WEIGHTS = [{}, {"need_weights": False}, {"average_attn_weights": False}]


def _fits(options: dict, inputs: str) -> bool:
    """Whether tensors that are to be one have one size."""
    kdim, vdim = options.get("kdim", SIZE), options.get("vdim", SIZE)
    return {
        "self": SIZE == kdim == vdim,
        "equal but not one": SIZE == kdim == vdim,
        "key is value": kdim == vdim,
        "query is key": kdim == SIZE,
        "three": True,
    }[inputs]


CASES = [
    (name, inputs, batched)
    for name, inputs, batched in itertools.product(MODULES, INPUTS, (True, False))
    if _fits(MODULES[name], inputs) and (batched or inputs in ("self", "three"))
]


def _tensors(module: nn.MultiheadAttention, inputs: str, batched: bool = True) -> list[torch.Tensor]:
    """Query, key and value of the kind asked for."""

    def tensor(length: int, size: int) -> torch.Tensor:
        if not batched:
            shape = (length, size)
        else:
            shape = (BATCH, length, size) if module.batch_first else (length, BATCH, size)
        return torch.randn(shape, dtype=module.out_proj.weight.dtype, requires_grad=True)

    query = tensor(TARGETS, module.embed_dim)
    if inputs == "self":
        return [query, query, query]
    if inputs == "equal but not one":
        return [query, *(query.detach().clone().requires_grad_() for _ in range(2))]
    if inputs == "query is key":
        return [query, query, tensor(TARGETS, module.vdim)]
    key = tensor(SOURCES, module.kdim)
    return [query, key, key if inputs == "key is value" else tensor(SOURCES, module.vdim)]


def _lengths(module: nn.MultiheadAttention, tensors: list[torch.Tensor]) -> tuple[int, int]:
    """How many queries and keys there are."""
    dim = int(module.batch_first and tensors[0].ndim == 3)
    return tensors[0].shape[dim], tensors[1].shape[dim]


def _masks(kind: str, targets: int, sources: int, batched: bool, dtype: torch.dtype) -> dict:
    """Arguments for masks that leave every query something to attend to."""
    batch = BATCH if batched else 1
    found: dict = {}
    if "causal" in kind:
        found = {"attn_mask": torch.ones(targets, sources).triu(1).bool(), "is_causal": True}
    elif kind.startswith(("bool", "float")) and kind != "float padding":
        shape = (batch * HEADS, targets, sources) if "heads" in kind else (targets, sources)
        mask = torch.rand(shape) < 0.4
        mask[..., 0] = False
        if kind.startswith("float"):
            mask = torch.randn(shape, dtype=dtype).masked_fill(mask, float("-inf"))
        found = {"attn_mask": mask}
    if "padding" in kind:
        padding = torch.arange(sources) >= torch.tensor([sources, sources - 1, 1])[:batch, None]
        if "float padding" in kind:
            padding = torch.randn(padding.shape, dtype=dtype).masked_fill(padding, float("-inf"))
        found["key_padding_mask"] = padding if batched else padding[0]
    return found


def _distinct(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _loss(out: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Something in which every entry of the output and of the weights counts."""
    value = (out * torch.linspace(0.5, 2, out.numel(), dtype=out.dtype).reshape(out.shape)).tanh().sum()
    if weights is not None:
        value = value + (weights * torch.linspace(-1, 1, weights.shape[-1], dtype=out.dtype)).square().sum()
    return value


def _results(module: nn.MultiheadAttention, tensors: list, **arguments) -> list:
    """Output and weights, and the gradients of inputs and parameters."""
    out, weights = module(*tensors, **arguments)
    gradients = torch.autograd.grad(_loss(out, weights), [*_distinct(tensors), *module.parameters()])
    return [out, weights, *gradients]


def _assert_parity(
    module: nn.MultiheadAttention, tensors: list, several: list[dict], tolerance: float = 1e-10
) -> None:
    """For each of several keyword arguments: with taps that take statistics, everything is as without."""
    plain = copy.deepcopy(module)
    optimizer = KFAC(module, structure="dense", **PAPER)
    for arguments in several:
        optimizer.zero_grad()
        tapped = _results(module, tensors, **arguments)
        assert all(layer.pending is not None for layer in optimizer._layers.values())
        expected = _results(plain, tensors, **arguments)
        for found, wanted in zip(tapped, expected, strict=True):
            if wanted is None:
                assert found is None
                continue
            assert wanted.isfinite().all()
            torch.testing.assert_close(
                found, wanted, rtol=tolerance, atol=tolerance, msg=lambda text, a=arguments: f"{a}: {text}"
            )
    optimizer.detach()


# --- The same function ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "inputs", "batched"), CASES)
def test_taps_change_neither_outputs_nor_gradients(name, inputs, batched):
    module = nn.MultiheadAttention(SIZE, HEADS, **MODULES[name])
    _randomize(module)
    tensors = _tensors(module, inputs, batched)
    masks = [_masks(kind, *_lengths(module, tensors), batched, torch.float64) for kind in MASKS]
    several = [mask | weights for mask in masks for weights in WEIGHTS]
    if name in ADDED:  # a test of its own, below
        several = [a for a in several if not _is_only_causal(a)]
    _assert_parity(module, tensors, several)


def _is_only_causal(arguments: dict) -> bool:
    """Whether torch takes the hint of a causal mask instead of the mask."""
    hint = arguments.get("is_causal") and "key_padding_mask" not in arguments
    return bool(hint) and not arguments.get("need_weights", True)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["bias_kv", "zero_attn"])
def test_what_a_causal_hint_hides_is_hidden_with_taps(name):
    """Torch then makes the mask anew, for keys among which the added one comes last and is hidden, too."""
    module = nn.MultiheadAttention(SIZE, HEADS, **MODULES[name])
    _randomize(module)
    tensors = _tensors(module, "self")
    mask = _masks("causal", TARGETS, TARGETS, True, torch.float64)
    _assert_parity(module, tensors, [mask | {"need_weights": False}])


def _randomize(module: nn.Module) -> None:
    """Biases begin at zero, which would hide them."""
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)


@pytest.mark.parametrize("name", ["batch first", "bias_kv and zero_attn", "separate, all different"])
@pytest.mark.parametrize("mask", ["none", "bool and padding", "float of heads"])
def test_taps_change_nothing_in_float32(name, mask):
    module = nn.MultiheadAttention(SIZE, HEADS, **MODULES[name])
    _randomize(module)
    arguments = _masks(mask, TARGETS, SOURCES, True, torch.float32)
    several = [arguments | weights for weights in WEIGHTS]
    _assert_parity(module, _tensors(module, "three"), several, tolerance=2e-5)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize("training", [True, False])
def test_taps_change_nothing_for_any_number_of_heads_in_either_mode(heads, training):
    module = nn.MultiheadAttention(SIZE, heads, batch_first=True).train(training)
    _randomize(module)
    _assert_parity(module, _tensors(module, "self"), WEIGHTS)


@pytest.mark.usefixtures("float64")
def test_arguments_may_be_given_by_name_or_by_place():
    module = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
    _randomize(module)
    plain = copy.deepcopy(module)
    query, key, value = _tensors(module, "three")
    padding = _masks("padding", TARGETS, SOURCES, True, torch.float64)["key_padding_mask"]
    mask = _masks("bool", TARGETS, SOURCES, True, torch.float64)["attn_mask"]
    optimizer = KFAC(module, **PAPER)
    for args, kwargs in (
        ((), {"query": query, "key": key, "value": value, "attn_mask": mask}),
        ((query,), {"value": value, "key": key}),
        ((query, key, value, padding, False, mask, True, False), {}),
        ((query, key, value, padding, True, mask, False), {}),
    ):
        torch.testing.assert_close(module(*args, **kwargs), plain(*args, **kwargs), rtol=1e-12, atol=1e-12)
    assert optimizer.wants_curvature


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_query_that_may_attend_to_nothing(need_weights):
    """Torch gives NaN where weights are needed, else zeros; whatever it is, it is the same with taps."""
    module = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
    plain = copy.deepcopy(module)
    x = torch.randn(2, 3, SIZE)
    padding = torch.tensor([[True, True, True], [False, False, True]])
    optimizer = KFAC(module, **PAPER)
    for argument in (
        {"key_padding_mask": padding},
        {"attn_mask": torch.ones(3, 3).tril(-1).bool().T.flip(0)},
    ):
        arguments = {"need_weights": need_weights, **argument}
        torch.testing.assert_close(module(x, x, x, **arguments), plain(x, x, x, **arguments), equal_nan=True)
    assert optimizer.wants_curvature


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore:Support for mismatched")  # torch would rather have masks of one type
@pytest.mark.parametrize("need_weights", [True, False])
def test_masks_of_two_types(need_weights):
    module = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
    _randomize(module)
    boolean = _masks("bool and padding", TARGETS, SOURCES, True, torch.float64)
    floating = _masks("float and float padding", TARGETS, SOURCES, True, torch.float64)
    for one, other in ((boolean, floating), (floating, boolean)):
        masks = {"attn_mask": one["attn_mask"], "key_padding_mask": other["key_padding_mask"]}
        _assert_parity(module, _tensors(module, "three"), [masks | {"need_weights": need_weights}])


@pytest.mark.parametrize("need_weights", [True, False])
def test_autocast_reaches_the_projections(need_weights):
    module = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
    _randomize(module)
    plain, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    x = torch.randn(BATCH, TARGETS, SIZE)
    arguments = _masks("bool and padding", TARGETS, TARGETS, True, torch.float32)
    optimizer = KFAC(module, **PAPER)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = (m(x, x, x, need_weights=need_weights, **arguments)[0] for m in (module, plain))
    assert found.dtype == wanted.dtype == torch.bfloat16
    without_error, _ = exact(*(x.double(),) * 3, **arguments)
    errors = [(y - without_error).square().mean().sqrt() for y in (found, wanted)]
    assert errors[0] < 1.5 * errors[1]
    found.float().square().mean().backward()
    assert all(layer.pending is not None for layer in optimizer._layers.values())
    optimizer.step()
    assert all(p.isfinite().all() for p in module.parameters())


# --- Dropout ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_leaves_the_mean_as_it_is(need_weights):
    samples, rate = 20_000, 0.3
    module = nn.MultiheadAttention(SIZE, HEADS, dropout=rate, batch_first=True)
    _randomize(module)
    plain = copy.deepcopy(module)
    x = torch.randn(1, TARGETS, SIZE)
    exact, exact_weights = copy.deepcopy(module).eval()(x, x, x, average_attn_weights=False)
    optimizer = KFAC(module, **PAPER)
    many = x.expand(samples, -1, -1)
    with torch.no_grad():
        theirs, _ = plain(many, many, many)
    out, weights = module(many, many, many, need_weights=need_weights, average_attn_weights=False)
    assert optimizer.wants_curvature
    assert out.shape == many.shape
    spread = out.std(0) / samples**0.5
    assert (spread > 1e-6).all()  # it is random
    assert ((out.mean(0) - exact[0]).abs() < 5 * spread).all()
    torch.testing.assert_close(out.std(0), theirs.std(0), rtol=0.1, atol=0)
    if need_weights:
        dropped = weights == 0
        assert abs(dropped.double().mean() - rate) < 0.01
        expected = (exact_weights / (1 - rate)).expand_as(weights)
        torch.testing.assert_close(weights[~dropped], expected[~dropped])


@pytest.mark.usefixtures("float64")
def test_dropout_has_gradients_of_what_it_did():
    """The statistics belong to the forward pass whose output goes on, of the two that were made."""
    module = nn.MultiheadAttention(SIZE, HEADS, dropout=0.5, batch_first=True)
    _randomize(module)
    optimizer = KFAC(module, **PAPER)
    x, seen = torch.randn(BATCH, TARGETS, SIZE), {}
    optimizer._layers[module.out_proj.weight].taps[0].receive = lambda x, g, *_: seen.update(x=x, g=g)
    out, _ = module(x, x, x)
    out.square().sum().backward()
    bias = module.out_proj.bias
    torch.testing.assert_close(seen["x"] @ module.out_proj.weight.mT + bias, out)
    torch.testing.assert_close(seen["g"], 2 * out)
    torch.testing.assert_close(torch.einsum("nri,nrj->ij", seen["g"], seen["x"]), module.out_proj.weight.grad)


@pytest.mark.usefixtures("float64")
def test_evaluation_has_no_dropout():
    module = nn.MultiheadAttention(SIZE, HEADS, dropout=0.5, batch_first=True).eval()
    _randomize(module)
    _assert_parity(module, _tensors(module, "self"), WEIGHTS)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_segment_is_recomputed_with_the_same_dropout(reentrant):
    """Of a reentrant one the first pass has no gradients and no taps, the second has both."""
    block = nn.TransformerEncoderLayer(SIZE, HEADS, 12, dropout=0.3, batch_first=True)
    plain = copy.deepcopy(block)
    optimizer = KFAC(block, **PAPER)
    x = torch.randn(BATCH, TARGETS, SIZE, requires_grad=True)
    results = []
    # Reentrant: as torch's own module does. Otherwise the taps are there in both passes.
    for model, checkpointed in ((block, True), (plain if reentrant else block, False)):
        model.zero_grad()
        torch.manual_seed(3)
        y = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
        y.square().sum().backward()
        results.append([y, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results)
    assert all(layer.pending is not None for layer in optimizer._layers.values())


# --- The statistics, against four modules of nn.Linear ----------------------------------------------------


class Explicit(nn.Module):
    """Attention with each of its projections a module."""

    def __init__(self, like: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads, self.batch_first = like.num_heads, like.batch_first
        packed = like._qkv_same_embed_dim
        weights = (
            like.in_proj_weight.chunk(3)
            if packed
            else (like.q_proj_weight, like.k_proj_weight, like.v_proj_weight)
        )
        biases = (None,) * 3 if like.in_proj_bias is None else like.in_proj_bias.chunk(3)
        # The bias of separate projections is no part of their matrices.
        self.free = None if packed or biases[0] is None else nn.Parameter(like.in_proj_bias.detach().clone())
        self.q, self.k, self.v = (
            _linear(w, b if packed else None) for w, b in zip(weights, biases, strict=True)
        )
        self.out = _linear(like.out_proj.weight, like.out_proj.bias)

    def forward(
        self, query, key, value, attn_mask=None, key_padding_mask=None, need_weights=False, is_causal=False
    ):
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self.q(query), self.k(key), self.v(value)
        if self.free is not None:
            q, k, v = (x + b for x, b in zip((q, k, v), self.free.chunk(3), strict=True))
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if attn_mask is not None:
            scores = scores + (attn_mask if attn_mask.is_floating_point() else _infinite(attn_mask))
        if key_padding_mask is not None:
            padding = key_padding_mask
            padding = padding if padding.is_floating_point() else _infinite(padding)
            scores = scores + padding[:, None, None]
        out = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return (out if self.batch_first else out.transpose(0, 1)), None


def _infinite(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, float("-inf"))


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        module.weight.copy_(weight)
        if bias is not None:
            module.bias.copy_(bias)
    return module


def _seen(optimizer, weight: nn.Parameter):
    layer = optimizer._layers[weight]
    _, d_o, d_i = layer.shape
    return as_tensors(layer.pending.scaled(d_i, d_o, loss_is_mean=True))


def _assert_statistics(optimizer, module: nn.MultiheadAttention, other, explicit: Explicit) -> None:
    """What one optimizer saw of a module is what the other saw of its copy with four layers."""
    close = {"rtol": 1e-10, "atol": 1e-12}
    projections = (explicit.q, explicit.k, explicit.v)
    expected = [_seen(other, projection.weight) for projection in projections]
    if module._qkv_same_embed_dim:
        packed = _seen(optimizer, module.in_proj_weight)
        for found, parts in zip(packed, zip(*expected, strict=True), strict=True):
            torch.testing.assert_close(found, torch.stack(parts).view(found.shape), **close)
    else:
        for name, wanted in zip("qkv", expected, strict=True):
            found = _seen(optimizer, getattr(module, f"{name}_proj_weight"))
            torch.testing.assert_close(tuple(found), tuple(wanted), **close)
    found, wanted = _seen(optimizer, module.out_proj.weight), _seen(other, explicit.out.weight)
    torch.testing.assert_close(tuple(found), tuple(wanted), **close)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize(
    ("name", "inputs"), [(name, inputs) for name, inputs, batched in CASES if batched and name not in ADDED]
)
@pytest.mark.parametrize("mask", ["none", "bool and padding"])
def test_the_statistics_are_those_of_four_linear_layers(name, inputs, mask, approx):
    module = nn.MultiheadAttention(SIZE, HEADS, **MODULES[name])
    _randomize(module)
    explicit = Explicit(module)
    tensors = _tensors(module, inputs)
    arguments = _masks(mask, *_lengths(module, tensors), True, torch.float64)
    optimizers = [KFAC(model, structure="dense", approx=approx, **PAPER) for model in (module, explicit)]
    for need_weights in (True, False):
        for model in (module, explicit):
            out, _ = model(*tensors, need_weights=need_weights, **arguments)
            (_loss(out, None) / BATCH).backward()
        _assert_statistics(optimizers[0], module, optimizers[1], explicit)
        for optimizer in optimizers:
            optimizer.zero_grad()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_uses_of_several_kinds_add_up(optimizer_class):
    """To itself and to another sequence in one pass, and again in a second one, before one step."""
    module = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
    _randomize(module)
    explicit = Explicit(module)
    optimizers = [optimizer_class(model, structure="dense", **PAPER) for model in (module, explicit)]
    batches = [(torch.randn(n, TARGETS, SIZE), torch.randn(n, SOURCES, SIZE)) for n in (2, 3)]
    for model in (module, explicit):
        for x, memory in batches:
            y = model(x, x, x)[0].tanh()
            y = model(y, memory, memory)[0].tanh()
            y = model(y, memory, memory.sin())[0]
            (_loss(y, None) / 5).backward()
    _assert_statistics(optimizers[0], module, optimizers[1], explicit)


@pytest.mark.filterwarnings("ignore:the factors of .* overshoot")
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("optimizer_class", FAMILY)
@pytest.mark.parametrize("loss_average", ["batch", "token", None])
@pytest.mark.parametrize(
    # The keys' bias has no gradient but rounding errors, which AdamW would enlarge.
    "options",
    [{}, {"kdim": 6, "vdim": 7, "bias": False}],
    ids=["packed", "separate"],
)
def test_micro_batches_give_the_steps_of_the_whole_batch(options, loss_average, optimizer_class):
    x = torch.randn(8, TARGETS, SIZE)
    key, value = (torch.randn(8, SOURCES, options.get(name, SIZE)) for name in ("kdim", "vdim"))
    terms = {"batch": 8, "token": 8 * TARGETS, None: 1}[loss_average]
    results = []
    for sizes in ([8], [4, 4], [2] * 4, [5, 1, 2]):
        torch.manual_seed(0)
        module = nn.MultiheadAttention(SIZE, HEADS, batch_first=True, **options)
        optimizer = optimizer_class(module, lr=0.01, precond_lr=0.01, loss_average=loss_average, **PAPER)
        for _ in range(3):
            optimizer.zero_grad()
            for parts in zip(*(tensor.split(sizes) for tensor in (x, key, value)), strict=True):
                ((module(*parts)[0] - 1).square().sum() / terms).backward()
            optimizer.step()
        found = {name: (p, optimizer.state[p]) for name, p in module.named_parameters()}
        results.append(copy.deepcopy({name: (p.detach(), dict(state)) for name, (p, state) in found.items()}))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-9, atol=1e-11)


def test_projections_that_are_computed_are_no_layers():
    module = nn.MultiheadAttention(SIZE, HEADS)
    nn.utils.parametrizations.weight_norm(module, "in_proj_weight")
    optimizer = SINGD(module)
    x = torch.randn(TARGETS, BATCH, SIZE)
    module(x, x, x)[0].square().mean().backward()
    optimizer.step()
    rows = {row.name: row.trained_by for row in optimizer.describe().rows}
    assert rows["out_proj.weight"] == "SINGD"
    assert rows["in_proj_bias"] == rows["parametrizations.in_proj_weight.original0"] == "AdamW"


@pytest.mark.usefixtures("float64")
def test_random_numbers_of_a_pass_that_failed_are_forgotten():
    module = nn.MultiheadAttention(SIZE, HEADS, dropout=0.5)
    optimizer = SINGD(module)
    with pytest.raises(RuntimeError):
        module(torch.randn(TARGETS, BATCH, SIZE), torch.randn(1, 1, 1), torch.randn(1, 1, 1))
    x = torch.randn(TARGETS, BATCH, SIZE)
    before = torch.random.get_rng_state()
    module.eval()(x, x, x)[0].sum().backward()
    assert torch.equal(torch.random.get_rng_state(), before)
    optimizer.step()


@pytest.mark.usefixtures("float64")
def test_a_single_sequence_is_one_sample():
    module = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
    optimizer, seen = KFAC(module, **PAPER), []
    x = torch.randn(TARGETS, SIZE)
    for inputs in (x, x.unsqueeze(0)):
        module(inputs, inputs, inputs)[0].square().sum().backward()
        seen.append([tuple(_seen(optimizer, w)) for w in (module.in_proj_weight, module.out_proj.weight)])
        optimizer.zero_grad()
    torch.testing.assert_close(*seen)


@pytest.mark.usefixtures("float64")
def test_bias_kv_is_trained_beside_the_projections():
    module = nn.MultiheadAttention(SIZE, HEADS, add_bias_kv=True, batch_first=True)
    before = [p.detach().clone() for p in module.parameters()]
    optimizer = SINGD(module)
    x = torch.randn(BATCH, TARGETS, SIZE)
    module(x, x, x)[0].square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
    by_adamw = {p for p in module.parameters() if "exp_avg" in optimizer.state[p]}
    assert by_adamw == {module.bias_k, module.bias_v}


# --- Transformers -----------------------------------------------------------------------------------------


def _block(kind: str, **options) -> nn.Module:
    cls = nn.TransformerEncoderLayer if kind == "encoder" else nn.TransformerDecoderLayer
    return cls(SIZE, HEADS, dim_feedforward=12, dropout=0.0, **options)


def _attentions(block: nn.Module) -> list[str]:
    return ["self_attn"] if isinstance(block, nn.TransformerEncoderLayer) else ["self_attn", "multihead_attn"]


def _run(block: nn.Module, x: torch.Tensor, memory: torch.Tensor, batch_first: bool) -> torch.Tensor:
    if not batch_first:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    mask = nn.Transformer.generate_square_subsequent_mask(TARGETS, dtype=x.dtype)
    if isinstance(block, nn.TransformerEncoderLayer):
        return block(x, src_mask=mask, is_causal=True)
    return block(x, memory, tgt_mask=mask, tgt_is_causal=True)


def _train(block: nn.Module, optimizer, batch_first: bool, steps: int = 3) -> None:
    torch.manual_seed(1)
    dtype = next(block.parameters()).dtype
    for _ in range(steps):
        x, memory = (torch.randn(BATCH, n, SIZE, dtype=dtype) for n in (TARGETS, SOURCES))
        optimizer.zero_grad()
        out = _run(block, x, memory, batch_first)
        ((out - 1).square() * torch.linspace(0, 1, SIZE, dtype=dtype)).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("optimizer_class", FAMILY)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_transformer_layers_are_trained_with_factors(kind, norm_first, batch_first, optimizer_class):
    block = _block(kind, norm_first=norm_first, batch_first=batch_first)
    before = {name: p.detach().clone() for name, p in block.named_parameters()}
    optimizer = optimizer_class(block)
    _train(block, optimizer, batch_first)
    for name, p in block.named_parameters():
        assert p.isfinite().all(), name
        assert not torch.equal(p, before[name]), name
    first = optimizer.rule.names[0]
    for name in _attentions(block):
        attention = getattr(block, name)
        assert optimizer.state[attention.in_proj_weight][first].shape[0] == 3  # of queries, keys and values
        assert first in optimizer.state[attention.out_proj.weight]
        assert not any("exp_avg" in optimizer.state[p] for p in attention.parameters())
        assert optimizer.state[attention.in_proj_weight]["updates"] == 3


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize(
    ("optimizer_class", "structure"),
    [(SINGD, "dense"), (SINGD, "triu"), (IKFAC, "diagonal"), (KFAC, "dense")],
)
def test_transformer_layers_take_the_steps_of_explicit_ones(
    kind, norm_first, batch_first, optimizer_class, structure
):
    block = _block(kind, norm_first=norm_first, batch_first=batch_first)
    _randomize_attention(block)
    explicit = copy.deepcopy(block)
    for name in _attentions(block):
        setattr(explicit, name, Explicit(getattr(block, name)))
    before = block.self_attn.in_proj_weight.detach().clone()
    for model in (block, explicit):
        optimizer = optimizer_class(
            model, lr=1e-2, structure=structure, damping=0.1, precond_lr=0.05, precond_every=1, **PAPER
        )
        _train(model, optimizer, batch_first)
    close = {"rtol": 1e-8, "atol": 1e-10}
    for name in _attentions(block):
        attention, four = getattr(block, name), getattr(explicit, name)
        for kept in ("weight", "bias"):
            parts = torch.cat([getattr(projection, kept) for projection in (four.q, four.k, four.v)])
            torch.testing.assert_close(getattr(attention, f"in_proj_{kept}"), parts, **close)
            torch.testing.assert_close(getattr(attention.out_proj, kept), getattr(four.out, kept), **close)
    for name in ("linear1", "linear2", "norm1", "norm2"):
        for p, q in zip(getattr(block, name).parameters(), getattr(explicit, name).parameters(), strict=True):
            torch.testing.assert_close(p, q, **close)
    assert (block.self_attn.in_proj_weight - before).abs().max() > 1e-4


def _randomize_attention(block: nn.Module) -> None:
    for name in _attentions(block):
        _randomize(getattr(block, name))


@pytest.mark.filterwarnings("ignore:the factors of .* overshoot")
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_separate_projections_take_the_steps_of_explicit_ones(optimizer_class):
    class Reads(nn.Module):
        def __init__(self, attention: nn.Module) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, query, key, value):
            return self.attention(query, key, value)[0].tanh()

    module = nn.MultiheadAttention(SIZE, HEADS, kdim=6, vdim=7, batch_first=True)
    _randomize(module)
    models = [Reads(module), Reads(Explicit(module))]
    for model in models:
        torch.manual_seed(1)
        optimizer = optimizer_class(
            model, lr=1e-2, precond_lr=0.05, precond_every=1, structure="dense", **PAPER
        )
        for _ in range(3):
            optimizer.zero_grad()
            tensors = _tensors(module, "three")
            (_loss(model(*tensors), None) / BATCH).backward()
            optimizer.step()
    explicit = models[1].attention
    pairs = [(module.out_proj.weight, explicit.out.weight), (module.out_proj.bias, explicit.out.bias)]
    pairs += [(getattr(module, f"{n}_proj_weight"), getattr(explicit, n).weight) for n in "qkv"]
    pairs += [(module.in_proj_bias, explicit.free)]
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-8)


@pytest.mark.usefixtures("float64")
def test_between_updates_the_module_is_torchs_own():
    """Steps with and without taps are of one function: fewer updates alone make the difference."""
    block = _block("encoder", batch_first=True)
    optimizer = SINGD(block, precond_every=2, **PAPER)
    outputs = []
    x = torch.randn(BATCH, TARGETS, SIZE)
    for _ in range(2):  # the first with taps, the second without
        outputs.append((optimizer.wants_curvature, block(x)))
        optimizer.zero_grad()
        outputs[-1][1].square().mean().backward()
        twin = copy.deepcopy(block)
        torch.testing.assert_close(outputs[-1][1], twin(x), rtol=1e-12, atol=1e-12)
        optimizer.step()
    assert [wanted for wanted, _ in outputs] == [True, False]


# --- Two optimizers ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
def test_two_optimizers_share_one_module():
    module = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
    _randomize(module)
    alone = copy.deepcopy(module)
    of_in = KFAC(module, [module.in_proj_weight, module.in_proj_bias], **PAPER)
    of_out = KFAC(module, list(module.out_proj.parameters()), **PAPER)
    of_all = KFAC(alone, **PAPER)
    x = torch.randn(BATCH, TARGETS, SIZE)
    for model in (module, alone):
        out, weights = model(x, x, x)
        (_loss(out, weights) / BATCH).backward()
    assert set(of_in._layers) == {module.in_proj_weight}
    assert set(of_out._layers) == {module.out_proj.weight}
    for optimizer, weight, same in (
        (of_in, module.in_proj_weight, alone.in_proj_weight),
        (of_out, module.out_proj.weight, alone.out_proj.weight),
    ):
        torch.testing.assert_close(tuple(_seen(optimizer, weight)), tuple(_seen(of_all, same)))
    for optimizer in (of_in, of_out, of_all):
        optimizer.step()
    torch.testing.assert_close(list(module.parameters()), list(alone.parameters()))

    # One leaves, the other stays.
    of_in.detach()
    of_out.zero_grad()
    module(x, x, x)[0].sum().backward()
    assert of_in._layers[module.in_proj_weight].pending is None
    assert of_out._layers[module.out_proj.weight].pending is None  # it takes statistics at every tenth step
    of_out.param_groups[0]["precond_every"] = 1
    of_out.zero_grad()
    module(x, x, x)[0].sum().backward()
    assert of_in._layers[module.in_proj_weight].pending is None
    assert of_out._layers[module.out_proj.weight].pending is not None
    of_out.detach()
    assert not module._forward_hooks
    assert not module.out_proj._forward_hooks


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("frozen", ["in_proj", "out_proj"])
def test_a_frozen_projection_is_left_alone(frozen):
    module = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
    for name, p in module.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = SINGD(module)
    x = torch.randn(BATCH, TARGETS, SIZE)
    module(x, x, x)[0].square().mean().backward()
    optimizer.step()
    moved = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if not name.startswith(frozen)}
    assert all(("K" in optimizer.state[weight]) == weight.requires_grad for weight in optimizer._layers)


# --- Evaluation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("training", [True, False])
def test_without_gradients_the_module_is_torchs_own(context, training):
    module = nn.MultiheadAttention(SIZE, HEADS, batch_first=True).train(training)
    _randomize(module)
    plain = copy.deepcopy(module)
    optimizer = SINGD(module)
    x = torch.randn(BATCH, TARGETS, SIZE)
    with context():
        for weights in WEIGHTS:
            found, wanted = (model(x, x, x, **weights) for model in (module, plain))
            torch.testing.assert_close(found, wanted)
    assert not optimizer.state
    assert all(layer.pending is None for layer in optimizer._layers.values())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but")  # which norm_first makes it ignore
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_transformers_are_evaluated_on_any_path(context, norm_first):
    """Padding makes torch's encoder pass nested tensors on, past layers that have hooks."""
    plain = nn.TransformerEncoder(_block("encoder", batch_first=True, norm_first=norm_first), 2).eval()
    model = copy.deepcopy(plain)
    optimizer = SINGD(model)
    x = torch.randn(BATCH, TARGETS, SIZE)
    padding = torch.arange(TARGETS) >= torch.tensor([[5], [3], [1]])
    with context():
        for arguments in ({}, {"src_key_padding_mask": padding}, {"mask": torch.ones(5, 5).triu(1).bool()}):
            found, wanted = (m(x, **arguments) for m in (model, plain))
            kept = ~padding if "src_key_padding_mask" in arguments else slice(None)
            torch.testing.assert_close(found[kept], wanted[kept])
    assert not optimizer.state
    model.train()
    model(x, src_key_padding_mask=padding).square().mean().backward()
    optimizer.step()
    assert all("K" in optimizer.state[layer.self_attn.in_proj_weight] for layer in model.layers)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_frozen_transformer_is_evaluated_beside_one_in_training():
    """Gradients are enabled, but none is wanted here: torch passes nested tensors on, as without them."""
    encoder = nn.TransformerEncoder(_block("encoder", batch_first=True), 1).requires_grad_(False).eval()
    model = nn.Sequential(encoder, nn.Linear(SIZE, 2))
    plain = copy.deepcopy(encoder)
    optimizer = SINGD(model)
    x = torch.randn(BATCH, TARGETS, SIZE)
    padding = torch.arange(TARGETS) >= torch.tensor([[5], [3], [1]])
    y = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(y, plain(x, src_key_padding_mask=padding))
    model[1](y).square().mean().backward()
    optimizer.step()
    assert set(optimizer.state) == set(model[1].parameters())


def test_an_empty_batch_passes():
    module = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
    optimizer = SINGD(module)
    for samples in (0, 3):
        x = torch.randn(samples, TARGETS, SIZE)
        module(x, x, x)[0].square().sum().backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in module.parameters())


def test_evaluation_between_forward_and_backward_leaves_no_trace():
    module = nn.MultiheadAttention(SIZE, HEADS, batch_first=True).double()
    optimizer = KFAC(module, **PAPER)
    x = torch.randn(BATCH, TARGETS, SIZE, dtype=torch.float64)
    seen = []
    for evaluate in (False, True):
        out, _ = module(x, x, x)
        if evaluate:
            module.eval()
            with torch.no_grad():
                module(3 * x, x, x)
            module.train()
        out.square().sum().backward()
        seen.append(tuple(_seen(optimizer, module.in_proj_weight)))
        optimizer.zero_grad()
    torch.testing.assert_close(*seen)


# --- Copies -----------------------------------------------------------------------------------------------


def _through_file(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _through_file],
    ids=["copy", "pickle", "save"],
)
@pytest.mark.parametrize("name", ["batch first", "separate"])
def test_a_copy_is_a_plain_module(duplicate, name):
    module = nn.MultiheadAttention(SIZE, HEADS, **MODULES[name])
    _randomize(module)
    plain = copy.deepcopy(module)
    optimizer = KFAC(module, **PAPER)
    twin = duplicate(module)
    tensors = _tensors(module, "key is value")
    for weights in WEIGHTS:
        expected = _results(plain, tensors, **weights)
        torch.testing.assert_close(_results(twin, tensors, **weights), expected, rtol=0, atol=0)
        torch.testing.assert_close(_results(twin.eval(), tensors, **weights), expected, rtol=0, atol=0)
    assert all(layer.pending is None for layer in optimizer._layers.values())
    assert not optimizer.state
    hooks = [hook for m in twin.modules() for hook in m._forward_hooks.values()]
    assert all(isinstance(hook, CaptureHook) and not hook.taps for hook in hooks)

    # An optimizer of its own sees the copy, and no other.
    own = KFAC(twin, **PAPER)
    _results(twin, tensors)
    assert all(layer.pending is not None for layer in own._layers.values())
    assert all(layer.pending is None for layer in optimizer._layers.values())
