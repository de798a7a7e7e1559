"""The paper's algorithms read plainly: dense matrices, explicit U and G, nothing clever.

Slow and short, to be compared with. U and G come from gradients of single samples, so that neither the
capturing nor the scaling of the library is used.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ingot.structures import Structure
from tests.structures.oracle import project

Loss = Callable[[Tensor, Tensor], Tensor]


def inputs_and_gradients(model: nn.Module, layer: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> list:
    """For every sample: the layer's input rows and the gradients of that sample's loss at its output rows.

    Rows are the places where a sample uses the weight; a constant 1 stands for the bias.
    """
    samples = []
    for sample in range(len(x)):
        seen = {}

        def remember(module, args, output, seen=seen):
            seen["a"], seen["y"] = args[0].detach(), output
            output.retain_grad()

        handle = layer.register_forward_hook(remember)
        parameters = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
        loss(functional_call(model, parameters, (x[sample : sample + 1],)), y[sample : sample + 1]).backward()
        handle.remove()
        samples.append((_rows(layer, seen["a"]), _output_rows(layer, seen["y"].grad)))
    return samples


def _rows(layer: nn.Module, a: Tensor) -> Tensor:
    if isinstance(layer, nn.Conv2d):
        weight = layer.weight
        patches = nn.functional.unfold(a, weight.shape[2:], layer.dilation, layer.padding, layer.stride)
        a = patches[0].mT
    a = a.reshape(-1, a.shape[-1])
    return a if layer.bias is None else torch.cat((a, torch.ones(len(a), 1)), dim=1)


def _output_rows(layer: nn.Module, g: Tensor) -> Tensor:
    return g[0].flatten(1).mT if isinstance(layer, nn.Conv2d) else g.reshape(-1, g.shape[-1])


def kronecker_factors(samples: list, approx: str) -> tuple[Tensor, Tensor]:
    """U and G of the mean loss, from per-sample rows."""
    if approx == "reduce":
        samples = [(a.mean(0, keepdim=True), g.sum(0, keepdim=True)) for a, g in samples]
    u = sum(a.mT @ a for a, _ in samples) / sum(len(a) for a, _ in samples)
    g = sum(g.mT @ g for _, g in samples) / len(samples)
    return u, g


class Plain:
    """One layer's state under the paper's rules (Figures 3 and 4), as dense matrices."""

    def __init__(self, weight: Tensor, structures: tuple[Structure, Structure], method: str, **hyper) -> None:
        self.w, self.method, self.hyper = weight.clone(), method, hyper
        self.s_k, self.s_c = structures
        self.k, self.c = torch.eye(weight.shape[1]), torch.eye(weight.shape[0])
        self.m_k, self.m_c = torch.zeros_like(self.k), torch.zeros_like(self.c)
        self.m = torch.zeros_like(weight)

    def _hat(self, structure: Structure, s: Tensor) -> Tensor:
        return structure.dense(project(structure, s))

    def update_factors(self, u: Tensor, g: Tensor) -> None:
        beta, damping, alpha = (self.hyper[x] for x in ("precond_lr", "damping", "precond_momentum"))
        k, c, (d_o, d_i) = self.k, self.c, self.w.shape
        eye_k, eye_c = torch.eye(d_i), torch.eye(d_o)
        if self.method == "kfac":  # here K and C are S_K and S_C
            self.k = (1 - beta) * k + beta * self._hat(self.s_k, u)
            self.c = (1 - beta) * c + beta * self._hat(self.s_c, g)
            return
        h_k, h_c = k.mT @ u @ k, c.mT @ g @ c
        if self.method == "singd":
            t_c, t_k = h_c.trace(), h_k.trace()
            c2, k2 = damping * (c.mT @ c).trace(), damping * (k.mT @ k).trace()
        else:
            t_c, t_k, c2, k2, alpha = d_o, d_i, damping * d_o, damping * d_i, 0
        self.m_k = alpha * self.m_k + self._hat(self.s_k, t_c * h_k + c2 * k.mT @ k - d_o * eye_k) / (2 * d_o)
        self.m_c = alpha * self.m_c + self._hat(self.s_c, t_k * h_c + k2 * c.mT @ c - d_i * eye_c) / (2 * d_i)
        self.k, self.c = k @ (eye_k - beta * self.m_k), c @ (eye_c - beta * self.m_c)

    def step(self, gradient: Tensor) -> None:
        damping = self.hyper["damping"]
        if self.method == "kfac":
            of_c = torch.linalg.inv(self.c + damping * torch.eye(len(self.c)))
            of_k = torch.linalg.inv(self.k + damping * torch.eye(len(self.k)))
        else:
            of_c, of_k = self.c @ self.c.mT, self.k @ self.k.mT
        natural = of_c @ gradient @ of_k
        self.m = self.hyper["momentum"] * self.m + natural + self.hyper["weight_decay"] * self.w
        self.w = self.w - self.hyper["lr"] * self.m
