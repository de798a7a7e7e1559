"""torch.compile: the training of eager code in two compiled forms, made before or after the optimizer."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from ingot import SINGD

# Of the compiler's own making: it looks at .grad of what it is given, and it uses torch.jit.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


class Net(nn.Module):
    """A layer of each family, two uses of one weight, and an activation that overwrites its input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.block = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.up = nn.ConvTranspose1d(8, 8, 2, stride=2)
        self.twice = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.up(self.block(x.mT)).mT
        return self.head(self.twice(self.twice(x).tanh())).mean(1)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _train(model: nn.Module, optimizer: SINGD, steps: int = 12) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(0, 11, (16, 6))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens[:, 0] % 5).backward()
        optimizer.step()


def _small() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(11, 4), nn.Flatten(), nn.Linear(24, 8), nn.ReLU(inplace=True), nn.Linear(8, 5)
    )


def _trained(how: str, backend: str = "aot_eager", make=Net) -> tuple[list[torch.Tensor], SINGD]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = run = make()
    if how == "compiled before":
        run = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = SINGD(run, precond_warmup=2, precond_every=4)
    if how == "compiled after":
        run = torch.compile(model, backend=backend, fullgraph=True)
    if how == "compiled in place":
        model.compile(backend=backend, fullgraph=True)
    if how == "compiled in part":
        model.block = torch.compile(model.block, backend=backend, fullgraph=True)
    _train(run, optimizer)
    return list(model.parameters()), optimizer


@pytest.mark.parametrize(
    "how", ["compiled before", "compiled after", "compiled in place", "compiled in part"]
)
def test_compiled_training_is_eager_training_in_two_forms(how):
    expected, _ = _trained("eager")
    assert counters["stats"]["unique_graphs"] == 0
    found, optimizer = _trained(how)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert counters["stats"]["unique_graphs"] == 2  # with and without taps; no step compiles anew
    assert all(optimizer.state[weight]["updates"] == 4 for weight in optimizer._layers)


@pytest.mark.parametrize("make", [_small, pytest.param(Net, marks=pytest.mark.slow)])
def test_the_default_compiler(make):
    expected, _ = _trained("eager", make=make)
    found, optimizer = _trained("compiled after", backend="inductor", make=make)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    assert all("K" in optimizer.state[weight] for weight in optimizer._layers)


def test_names_are_those_of_the_model_itself():
    model = Net()
    names = {name for name, _ in model.named_parameters()}
    model.block = torch.compile(model.block, backend="eager")
    optimizer = SINGD(torch.compile(model, backend="eager"), [{"params": "block.0.*", "lr": 0.5}])
    assert {row.name for row in optimizer.describe().rows} == names
    assert {layer.name for layer in optimizer._layers.values()} >= {"block.0", "attention.in_proj"}
    assert next(g for g in optimizer.param_groups if g["lr"] == 0.5)["params"] == list(
        model.block.parameters()
    )


def test_gradients_that_are_not_the_weights_leave_no_statistics():
    """Compiled code computes all gradients, whoever asked for one."""
    model = nn.Linear(3, 2)
    optimizer = SINGD(model)
    run = torch.compile(model, backend="aot_eager")
    x = torch.randn(4, 3, requires_grad=True)
    torch.autograd.grad(run(x).sum(), x)
    assert optimizer._layers[model.weight].pending is None
    run(x).sum().backward()
    assert optimizer._layers[model.weight].pending is not None


def test_an_optimizer_that_comes_too_late_says_so():
    model = torch.compile(Net(), backend="aot_eager")
    model(torch.zeros(16, 6, dtype=torch.int64))  # this code has no hooks
    optimizer = SINGD(model)
    with pytest.warns(UserWarning, match=r"torch\._dynamo\.reset"):
        _train(model, optimizer, 1)
    _train(model, optimizer, 1)  # once is enough
    torch._dynamo.reset()
    _train(model, optimizer, 1)
    assert all("K" in optimizer.state[weight] for weight in optimizer._layers)
