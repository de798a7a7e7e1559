"""Training in two ways that should be one and the same, in float64: what the tests of this folder share."""

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from ingot import IKFAC, INGD, KFAC, PAPER, SINGD

FAMILY = [SINGD, INGD, IKFAC, KFAC]
PLAIN = {"lr": 0.01, "precond_lr": 0.02, "precond_every": 1, "structure": "dense", **PAPER}
"""Settings with which the factors begin as the identity, so that the first statistics are U and G."""

SPARSE = {"precond_every": 2, "precond_warmup": 2}
"""Settings with which some steps update no factors."""


def mlp(*sizes: int, bias: bool = True) -> nn.Sequential:
    """Linear layers with Tanh between them, the same at each call."""
    torch.manual_seed(0)
    layers = [(nn.Linear(d_i, d_o, bias=bias), nn.Tanh()) for d_i, d_o in pairwise(sizes or (4, 5, 3))]
    return nn.Sequential(*sum(layers, ())[:-1])


def batches(steps: int, *shape: int, seed: int = 1) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randn(shape or (6, 4), generator=generator)


def squares(output: Tensor) -> Tensor:
    return (output - 1).square().flatten(1).sum(1).mean()


def backward(model: nn.Module, x: Tensor) -> None:
    squares(model(x)).backward()


def train(
    model: nn.Module,
    optimizer: Optimizer,
    steps: int = 3,
    *shape: int,
    seed: int = 1,
    backward: Callable[[nn.Module, Tensor], None] = backward,
) -> dict:
    """Train and return what is held afterwards."""
    for x in batches(steps, *shape, seed=seed):
        optimizer.zero_grad()
        backward(model, x)
        optimizer.step()
    return held(model, optimizer)


def held(model: nn.Module, optimizer: Optimizer) -> dict:
    """All that training changes: parameters and state by the parameters' names, as copies."""
    found = {name: (p.detach(), dict(optimizer.state.get(p, {}))) for name, p in model.named_parameters()}
    return copy.deepcopy(found)


def moved(before: dict, after: dict) -> set[str]:
    return {name for name in after if not torch.equal(after[name][0], before[name][0])}


def assert_same(one: dict, other: dict) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def assert_identical(one: dict, other: dict) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def trained(optimizer: Optimizer) -> set[Tensor]:
    return {p for group in optimizer.param_groups for p in group["params"]}


def pending(optimizer: Optimizer) -> list[bool]:
    """For which layers there are statistics."""
    return [layer.pending is not None for layer in optimizer._layers.values()]


def statistics(optimizer: Optimizer, weight: Tensor) -> tuple[Tensor, Tensor]:
    """U and G as they are before a first step with ``PLAIN`` settings."""
    layer = optimizer._layers[weight]
    _, d_o, d_i = layer.shape
    mean = optimizer._group(weight)["loss_average"] is not None
    seen = layer.pending.scaled(d_i, d_o, loss_is_mean=mean)
    return seen.k.value.reshape(d_i, d_i), seen.c.value.reshape(d_o, d_o)


def hooks(model: nn.Module) -> list:
    return [hook for module in model.modules() for hook in module._forward_hooks.values()]


class Uses:
    """The inputs of some modules' calls and the gradients of their outputs."""

    def __init__(self, *modules: nn.Module) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []
        for module in modules:
            module.register_forward_hook(self._remember)

    def _remember(self, module: nn.Module, args: tuple, output: Tensor) -> None:
        output.retain_grad()
        self.seen.append((args[0].detach(), output))

    def u(self, *constants: float) -> Tensor:
        """The mean of a aᵀ, with what the bias was multiplied with in each use, if there is one."""
        rows = [x for x, _ in self.seen]
        if constants:
            pairs = zip(rows, constants, strict=True)
            rows = [torch.cat((x, torch.full((len(x), 1), one)), 1) for x, one in pairs]
        a = torch.cat(rows)
        return a.mT @ a / len(a)

    def g(self, terms: int) -> Tensor:
        """G for a loss that is a mean of so many terms."""
        g = torch.cat([output.grad for _, output in self.seen])
        return terms * g.mT @ g


class Shared(nn.Module):
    """One weight used twice: by one module, or by two, of which the second has no bias."""

    def __init__(self, tied: bool, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4, bias=bias)
        self.second = nn.Linear(4, 4, bias=False) if tied else self.first
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class LanguageModel(nn.Module):
    """Embedding and head with one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.middle = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(tokens)).tanh())


def tokens(words: int = 7) -> Tensor:
    return torch.randint(words, (6, 3), generator=torch.Generator().manual_seed(2))


def predict(model: nn.Module, tokens: Tensor) -> None:
    cross_entropy(model(tokens).mT, tokens.roll(1, 1)).backward()


def train_language(model: LanguageModel, optimizer: Optimizer, steps: int = 3) -> dict:
    words = len(model.embedding.weight)
    return train(model, optimizer, steps, backward=lambda model, _: predict(model, tokens(words)))
