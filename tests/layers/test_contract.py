"""One contract for every layer adapter: its normal form reproduces the layer's output and its gradient."""

import pytest
import torch
from torch import nn

from ingot.layers import LayerAdapter, adapter_for, registered

# For every registered class: modules that show what the family can do, each with an input.
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
}
CASES = [(module, shape) for examples in EXAMPLES.values() for module, shape in examples]


def test_every_registered_layer_has_examples():
    assert set(registered()) == set(EXAMPLES)
    for name, examples in EXAMPLES.items():
        assert all(adapter_for(module) is registered()[name] for module, _ in examples)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's own forward says so
@pytest.mark.parametrize(("module", "shape"), CASES, ids=str)
def test_the_normal_form_is_the_layer(module, shape):
    module = module.double()
    module.zero_grad()
    adapter = adapter_for(module)
    x = torch.randn(shape, dtype=torch.float64)
    y = module(x)
    gradient = torch.randn_like(y)
    y.backward(gradient)

    lead, d_o, d_i = adapter.shape(module)
    a, g = adapter.inputs(module, x), adapter.output_gradients(module, gradient)
    assert a.shape[:-3] == g.shape[:-3] == lead
    assert a.shape[-3:-1] == g.shape[-3:-1]  # batch and shared places
    assert (g.shape[-1], a.shape[-1]) == (d_o, d_i)
    if module.bias is not None:
        a = torch.cat((a, torch.ones_like(a[..., :1])), dim=-1)

    weights = adapter.matrix(module, module.weight, module.bias)
    outputs = (a.flatten(-3, -2) @ weights.mT).unflatten(-2, a.shape[-3:-1])
    torch.testing.assert_close(adapter.output_gradients(module, y), outputs)
    summed = g.flatten(-3, -2).mT @ a.flatten(-3, -2)
    bias_gradient = None if module.bias is None else module.bias.grad
    torch.testing.assert_close(adapter.matrix(module, module.weight.grad, bias_gradient), summed)

    parts = adapter.parts(module, weights, module.weight, module.bias)
    for part, p in zip(parts, module.parameters(), strict=True):
        assert torch.equal(part, p)


def test_subclasses_are_known_unless_they_compute_something_else():
    class Same(nn.Linear):
        pass

    class Other(nn.Linear):
        def forward(self, x):
            return super().forward(x).square()

    assert isinstance(adapter_for(Same(2, 3)), LayerAdapter)
    assert adapter_for(Other(2, 3)) is None
    assert adapter_for(nn.LayerNorm(3)) is None


def test_a_weight_that_is_computed_is_no_parameter_of_the_layer():
    module = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    adapter = registered()["torch.nn.modules.linear.Linear"]
    assert adapter.weight(module) is None
