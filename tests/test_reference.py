"""The optimizers against a plain reading of the paper, with U and G from the gradients of single samples."""

import pytest
import torch
from torch import nn

import ingot
from ingot.structures import bind, parse
from tests.reference import Plain, inputs_and_gradients, kronecker_factors

pytestmark = pytest.mark.usefixtures("float64")

OPTIMIZERS = {"singd": ingot.SINGD, "ikfac": ingot.IKFAC, "kfac": ingot.KFAC}
STRUCTURES = {
    "singd": [
        "block_diagonal(3)",
        "block_diagonal(4)",
        "tril",
        "rank_triu(3)",
        "upper(triu_toeplitz(3),diagonal)",
    ],
    "ikfac": ["block_diagonal(3)", "block_diagonal(4)", "triu", "lower(diagonal,block_diagonal(2,5))"],
    "kfac": ["dense", "block_diagonal(3)", "diagonal"],
}


def _mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)), torch.randn(5, 6)


def _convolution() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=1, dilation=(1, 2)),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(45, 3),
    )
    return model, torch.randn(4, 2, 5, 5)


def _sequence() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Flatten(), nn.Linear(20, 3))
    return model, torch.randn(3, 4, 4)


def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().sum(1).mean()


def _matrix(layer: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    weight = weight.flatten(1)
    return weight if bias is None else torch.cat((weight, bias[:, None]), dim=1)


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("make", [_mlp, _convolution, _sequence])
@pytest.mark.parametrize(("method", "structure"), [(m, s) for m in STRUCTURES for s in STRUCTURES[m]])
def test_every_step_is_the_papers(method, structure, make, approx):
    torch.manual_seed(3)
    model, x = make()
    hyper = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01, "damping": 0.1, "precond_lr": 0.05}
    hyper["precond_momentum"] = 0.5 if method == "singd" else 0.0
    optimizer = OPTIMIZERS[method](
        model, **hyper, precond_every=2, structure=structure, approx=approx, **ingot.PAPER
    )
    layers = [m for m in model if isinstance(m, nn.Linear | nn.Conv2d)]
    plain = []
    for layer in layers:
        w = _matrix(layer, layer.weight.detach(), None if layer.bias is None else layer.bias.detach())
        pair = bind(parse(structure), w.shape[1]), bind(parse(structure), w.shape[0])
        plain.append(Plain(w, pair, method, **hyper))
    for step in range(6):
        x, y = torch.randn_like(x), torch.randn(len(x), 3)
        if step % 2 == 0:
            for layer, reference in zip(layers, plain, strict=True):
                reference.update_factors(
                    *kronecker_factors(inputs_and_gradients(model, layer, x, y, _loss), approx)
                )
        optimizer.zero_grad()
        _loss(model(x), y).backward()
        for layer, reference in zip(layers, plain, strict=True):
            reference.step(_matrix(layer, layer.weight.grad, None if layer.bias is None else layer.bias.grad))
        optimizer.step()
        for layer, reference in zip(layers, plain, strict=True):
            w = _matrix(layer, layer.weight.detach(), None if layer.bias is None else layer.bias.detach())
            torch.testing.assert_close(w, reference.w, rtol=1e-10, atol=1e-12)


def test_kfac_is_the_textbook_formula():
    """One step of KFAC is (S_K ⊗ S_C)⁻¹ on the flattened gradient, with the inverse taken explicitly."""
    layer = nn.Linear(3, 2)
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    optimizer = ingot.KFAC(
        layer, lr=0.5, momentum=0.0, weight_decay=0.0, damping=0.3, precond_lr=0.2, **ingot.PAPER
    )
    a = torch.cat((x, torch.ones(6, 1)), dim=1)
    outputs = layer(x)
    outputs.retain_grad()
    _loss(outputs, y).backward()
    g = outputs.grad * 6  # the mean loss divides by the batch size
    s_k = 0.8 * torch.eye(4) + 0.2 * a.mT @ a / 6 + 0.3 * torch.eye(4)
    s_c = 0.8 * torch.eye(2) + 0.2 * g.mT @ g / 6 + 0.3 * torch.eye(2)
    before = torch.cat((layer.weight, layer.bias[:, None]), dim=1).detach().clone()
    gradient = torch.cat((layer.weight.grad, layer.bias.grad[:, None]), dim=1)
    # Columns stacked, as the paper's vec does: vec(C X K) = (Kᵀ ⊗ C) vec(X).
    natural = torch.linalg.inv(torch.kron(s_k, s_c)) @ gradient.mT.flatten()
    optimizer.step()
    after = torch.cat((layer.weight, layer.bias[:, None]), dim=1).detach()
    torch.testing.assert_close(after, before - 0.5 * natural.reshape(4, 2).mT, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lr", [0.04, 0.002])  # too long a step for the weights, and a short one
@pytest.mark.parametrize("method", ["singd", "ikfac", "kfac"])
def test_the_default_step_is_the_documented_one(method, lr):
    """Warm-up, bounded factors, relative damping, normalised and bounded weight steps, decoupled decay."""
    layer = nn.Linear(4, 3)
    decay, damping = 0.1, 0.2
    optimizer = OPTIMIZERS[method](
        layer,
        lr=lr,
        structure="dense",
        damping=damping,
        weight_decay=decay,
        precond_warmup=3,
        precond_every=4,
    )
    w = _matrix(layer, layer.weight.detach(), layer.bias.detach())
    k, c, m = torch.eye(5), torch.eye(3), torch.zeros_like(w)
    eye_k, eye_c, d_i, d_o = torch.eye(5), torch.eye(3), 5, 3
    s_k, s_c = bind(parse("dense"), 5), bind(parse("dense"), 3)
    u_mean = v_mean = updates = noise = 0
    lengths = set()
    for step in range(9):
        x, y = torch.randn(6, 4), torch.randn(6, 3)
        if step < 3 or step % 4 == 0:
            u, g = kronecker_factors(inputs_and_gradients(layer, layer, x, y, _loss), "expand")
            rate = max(0.05, 1 / (updates + 1))
            u_mean = u_mean + rate * (u.trace() / d_i - u_mean)
            v_mean = v_mean + rate * (g.trace() / d_o - v_mean)
            damp_k, damp_c = damping**0.5 * u_mean, damping**0.5 * v_mean
            beta = max(0.1, 1 / (updates + 2))
            if method == "kfac":
                k, c = (k * u_mean, c * v_mean) if updates == 0 else (k, c)
                k, c = (1 - beta) * k + beta * u, (1 - beta) * c + beta * g
                of_k, of_c = torch.linalg.inv(k + damp_k * eye_k), torch.linalg.inv(c + damp_c * eye_c)
            else:
                if updates == 0:
                    k, c = eye_k / (u_mean + damp_k).sqrt(), eye_c / (v_mean + damp_c).sqrt()
                h_k, h_c = k.mT @ u @ k, c.mT @ g @ c
                if method == "singd":
                    t_k, t_c = h_k.trace() / d_i, h_c.trace() / d_o
                    both = damping * u_mean * v_mean
                    l_k, l_c = both * (c.mT @ c).trace() / d_o, both * (k.mT @ k).trace() / d_i
                else:
                    t_k, t_c, l_k, l_c = 1, 1, damp_k, damp_c
                m_k, m_c = (t_c * h_k + l_k * k.mT @ k - eye_k) / 2, (t_k * h_c + l_c * c.mT @ c - eye_c) / 2
                k = k @ (eye_k - min(beta, 0.5 / s_k.norm(m_k.flatten()).item()) * m_k)
                c = c @ (eye_c - min(beta, 0.5 / s_c.norm(m_c.flatten()).item()) * m_c)
                of_k, of_c = k @ k.mT, c @ c.mT
            updates += 1
        optimizer.zero_grad()
        _loss(layer(x), y).backward()
        natural = of_c @ _matrix(layer, layer.weight.grad, layer.bias.grad) @ of_k
        m, noise = 0.9 * m + natural, 0.81 * noise + natural.square().mean()
        size = m.square().mean().sqrt()
        cap = 0.03 * max(w[:, :-1].square().mean().sqrt().item(), (3 * d_i) ** -0.5)
        length = min(lr * size / noise.sqrt(), lr * 19**0.5, cap)
        lengths.add(round(float(length) / min(lr, cap), 6))
        w = (1 - lr * decay) * w - length * m / size
        optimizer.step()
        actual = _matrix(layer, layer.weight.detach(), layer.bias.detach())
        torch.testing.assert_close(actual, w, rtol=1e-10, atol=1e-12)
    assert optimizer.state[layer.weight]["updates"] == updates == 5
    assert (len(lengths) == 1) == (lr == 0.04)
