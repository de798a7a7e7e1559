"""One contract for every layer adapter: its normal form reproduces the layer's output and its gradient."""

import warnings

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ingot.layers import LayerAdapter, family_of, register, registered
from ingot.layers.linear import LinearAdapter

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it uses torch.jit when it is imported
    from torch_geometric.nn.dense.linear import Linear as GraphLinear

# For every registered class: modules that show what the family can do, each with the shape of an input (or
# with tokens for an embedding). Attention has several layers and a test file of its own.
EXAMPLES = {
    "torch.nn.modules.linear.Linear": [
        (nn.Linear(4, 3), (5, 4)),
        (nn.Linear(4, 3, bias=False), (5, 4)),
        (nn.Linear(4, 3), (4,)),
        (nn.Linear(4, 3), (2, 6, 4)),
        (nn.Linear(4, 3), (2, 3, 5, 4)),
    ],
    "torch.nn.modules.conv.Conv2d": [
        (nn.Conv2d(2, 3, 3), (4, 2, 6, 5)),
        (nn.Conv2d(2, 3, 3), (2, 6, 5)),
        (nn.Conv2d(2, 3, (2, 3), stride=(1, 2), padding=(0, 2), dilation=(2, 1), bias=False), (4, 2, 6, 5)),
        (nn.Conv2d(4, 6, 3, groups=2, padding=1), (3, 4, 5, 5)),
        (nn.Conv2d(4, 8, 3, groups=4, padding=1, bias=False), (3, 4, 5, 5)),
        (nn.Conv2d(2, 3, (2, 3), padding="same"), (4, 2, 6, 5)),
        (nn.Conv2d(2, 3, 3, padding="valid", stride=2), (4, 2, 6, 5)),
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (4, 2, 6, 5)),
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"), (4, 2, 6, 5)),
        (nn.Conv2d(2, 4, 3, padding=(1, 2), padding_mode="circular", groups=2), (4, 2, 6, 5)),
    ],
    "torch_geometric.nn.dense.linear.Linear": [
        (GraphLinear(4, 3), (5, 4)),
        (GraphLinear(4, 3, bias=False), (2, 5, 4)),
    ],
    "transformers.pytorch_utils.Conv1D": [(Conv1D(3, 4), (5, 4)), (Conv1D(3, 4), (2, 5, 4))],
    "torch.nn.modules.conv.Conv1d": [
        (nn.Conv1d(2, 3, 3), (4, 2, 7)),
        (nn.Conv1d(4, 6, 2, stride=2, padding=3, dilation=2, groups=2, bias=False), (4, 4, 7)),
        (nn.Conv1d(2, 3, 4, padding="same", padding_mode="circular"), (2, 7)),
    ],
    "torch.nn.modules.conv.Conv3d": [
        (nn.Conv3d(2, 3, 2), (3, 2, 4, 3, 5)),
        (
            nn.Conv3d(2, 4, (1, 2, 3), stride=(2, 1, 1), padding=(0, 1, 2), dilation=(1, 2, 1), groups=2),
            (2, 2, 4, 4, 5),
        ),
        (nn.Conv3d(1, 2, 3, padding=1, padding_mode="replicate"), (1, 3, 3, 3)),
    ],
    "torch.nn.modules.conv.ConvTranspose1d": [
        (nn.ConvTranspose1d(3, 2, 3), (4, 3, 5)),
        (nn.ConvTranspose1d(4, 6, 3, stride=3, padding=1, output_padding=2, dilation=2, groups=2), (2, 4, 5)),
    ],
    "torch.nn.modules.conv.ConvTranspose2d": [
        (nn.ConvTranspose2d(3, 2, 2, stride=2), (4, 3, 3, 5)),
        (nn.ConvTranspose2d(3, 2, (2, 3), bias=False), (3, 3, 5)),
        (
            nn.ConvTranspose2d(3, 2, 1, stride=2, padding=1),
            (4, 3, 4, 5),
        ),  # more is cut off than the kernel adds
        (
            nn.ConvTranspose2d(4, 8, 3, stride=(2, 1), padding=(2, 0), output_padding=(1, 0), groups=4),
            (2, 4, 3, 4),
        ),
    ],
    "torch.nn.modules.conv.ConvTranspose3d": [
        (nn.ConvTranspose3d(2, 4, (1, 2, 3), stride=(1, 2, 2), dilation=(1, 1, 2), groups=2), (2, 2, 2, 3, 2))
    ],
    "torch.nn.modules.sparse.Embedding": [
        (nn.Embedding(6, 3), torch.tensor([0, 5, 5, 2])),
        (nn.Embedding(6, 3), torch.tensor([[0, 5, 5], [1, 1, 1]])),
        (nn.Embedding(6, 3, padding_idx=1), torch.tensor([[0, 1, 5], [1, 1, 2]])),
        (nn.Embedding(6, 3), torch.tensor([[[0], [5]], [[3], [3]]])),
        (nn.Embedding(6, 3), torch.tensor(4)),
    ],
}
SEVERAL_LAYERS = {"torch.nn.modules.activation.MultiheadAttention"}
CASES = [(module, shape) for examples in EXAMPLES.values() for module, shape in examples]


def example_input(shape, dtype=torch.float64) -> torch.Tensor:
    return shape if isinstance(shape, torch.Tensor) else torch.randn(shape, dtype=dtype)


def test_every_registered_layer_has_examples():
    assert set(registered()) == set(EXAMPLES) | SEVERAL_LAYERS
    for name, examples in EXAMPLES.items():
        assert all(family_of(module) is registered()[name] for module, _ in examples)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's own forward says so
@pytest.mark.parametrize(("module", "shape"), CASES, ids=str)
def test_the_normal_form_is_the_layer(module, shape):
    module = module.double()
    module.zero_grad()
    adapter = family_of(module)
    x = example_input(shape)
    y = module(x)
    gradient = torch.randn_like(y)
    y.backward(gradient)

    lead, d_o, d_i = adapter.shape(module)
    a, g = adapter.inputs(module, x, gradient), adapter.output_gradients(module, x, gradient)
    assert a.shape[:-3] == g.shape[:-3] == lead
    assert a.shape[-3:-1] == g.shape[-3:-1]  # batch and shared places
    assert (g.shape[-1], a.shape[-1]) == (d_o, d_i)
    bias = getattr(module, "bias", None)
    if bias is not None:
        a = torch.cat((a, torch.ones_like(a[..., :1])), dim=-1)

    weights = _with_bias(adapter.weight_matrix(module, module.weight), bias)
    outputs = (a.flatten(-3, -2) @ weights.mT).unflatten(-2, a.shape[-3:-1])
    torch.testing.assert_close(adapter.output_gradients(module, x, y), outputs)
    summed = g.flatten(-3, -2).mT @ a.flatten(-3, -2)
    gradients = adapter.weight_matrix(module, module.weight.grad)
    torch.testing.assert_close(_with_bias(gradients, None if bias is None else bias.grad), summed)
    matrix = adapter.weight_matrix(module, module.weight)
    assert torch.equal(adapter.matrix_weight(module, matrix, module.weight), module.weight)

    a = a[..., :d_i]
    torch.testing.assert_close(adapter.mean_inputs(module, x, gradient), a.mean(-2))
    for approx, rows in (("expand", a.flatten(-3, -2)), ("reduce", a.mean(-2))):
        squares = adapter.input_squares(module, x, gradient, approx)
        if squares is not None:
            torch.testing.assert_close(squares, rows.square().sum(-2))


def _with_bias(matrix, bias):
    if bias is None:
        return matrix
    return torch.cat((matrix, bias.reshape(*matrix.shape[:-1], 1)), dim=-1)


def test_an_output_size_that_is_asked_for():
    """nn.ConvTranspose2d can be told its output's size in each call."""
    module = nn.ConvTranspose2d(1, 1, 3, stride=2, bias=False).double()
    x = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    y = module(x, output_size=(10, 9))
    a = family_of(module).inputs(module, x, y)
    torch.testing.assert_close(a @ module.weight.flatten(), y.flatten(1))


def test_subclasses_are_known_unless_they_compute_something_else():
    class Same(nn.Linear):
        pass

    class Other(nn.Linear):
        def forward(self, x):
            return super().forward(x).square()

    assert isinstance(family_of(Same(2, 3)), LayerAdapter)
    assert family_of(Other(2, 3)) is None
    assert family_of(nn.LayerNorm(3)) is None


def test_a_weight_that_is_computed_is_no_parameter_of_the_layer():
    module = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    adapter = registered()["torch.nn.modules.linear.Linear"]
    assert adapter.weight(module) is None


def test_an_embedding_that_divides_its_gradients_is_no_linear_map():
    module = nn.Embedding(4, 2, scale_grad_by_freq=True)
    assert family_of(module).weight(module) is None


@pytest.mark.usefixtures("registry")
def test_a_class_is_registered_as_such_or_by_its_name():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    assert family_of(Scaled(2, 2)) is None
    adapter = register(Scaled)(LinearAdapter)
    assert isinstance(family_of(Scaled(2, 2)), adapter)
    for wrong in ("Linear", 3, nn.Linear(2, 2), int, LinearAdapter):
        with pytest.raises(TypeError, match="classes of modules, or for their full names"):
            register(wrong)


@pytest.mark.usefixtures("registry")
def test_a_class_is_known_by_the_name_under_which_a_library_shows_it():
    """torch.nn.Linear is defined in torch.nn.modules.linear, and so are others elsewhere."""
    adapter = register("torch.nn.Linear")(type("Own", (LinearAdapter,), {}))
    assert type(family_of(nn.Linear(2, 2))) is adapter
    with pytest.raises(TypeError, match=r"got 'torch\.nn\.functional\.linear'"):
        register("torch.nn.functional.linear")
    register("not_installed.Linear")(LinearAdapter)  # which cannot be looked at


@pytest.mark.parametrize("wrong", [nn.Linear, LinearAdapter(), 3, lambda module: None])
def test_what_is_no_adapter_is_not_registered(wrong):
    before = registered()
    with pytest.raises(TypeError, match=r"derived from LayerAdapter .* write @register\(MyModule\) above"):
        register(nn.Linear)(wrong)
    with pytest.raises(TypeError, match="at least one class"):
        register()
    assert registered() == before
