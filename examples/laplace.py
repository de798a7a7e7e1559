"""A Laplace approximation from trained factors: weights are drawn around the trained ones, as K and C say.

The digits 8 and 9 are kept from the training: how sure is the model of what it has never seen?
"""

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn.functional import cross_entropy, nll_loss

from ingot import SINGD


def train(model, images, labels, epochs):
    # The curvature of the model's own predictions: that of the loss itself vanishes with its gradients.
    optimizer = SINGD(model, lr=3e-3, damping=0.5, fisher="separate", precond_every=5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(64):
            optimizer.zero_grad()
            output = model(images[batch])
            optimizer.curvature_backward(output, "cross_entropy", samples=1)
            cross_entropy(output, labels[batch]).backward()
            optimizer.step()
        scheduler.step()
    return optimizer


def posterior(model, optimizer, width):
    """A function that draws weights: W + width C E Kᵀ, whose covariance is width² (C Cᵀ ⊗ K Kᵀ)."""
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}
    factors = {row.name: optimizer.factors(row.name) for row in optimizer.describe().rows if row.k}

    def draw():
        weights = dict(mean)
        for name, (k, c, _) in factors.items():  # the last column of a layer's matrix is its bias
            drawn = c.apply(k.apply(torch.randn(k.structure.dim, c.structure.dim)).mT) * width
            bias = name.replace("weight", "bias")
            weights |= {name: mean[name] + drawn[:, :-1], bias: mean[bias] + drawn[:, -1]}
        return weights

    return draw


def predict(model, draw, images, samples=50):
    """The mean of the predictions with weights that are drawn."""
    calls = (torch.func.functional_call(model, draw(), images) for _ in range(samples))
    return sum(output.softmax(1) for output in calls) / samples


@torch.no_grad()
def main(epochs=20, seed=0):
    torch.manual_seed(seed)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images, known = images.float() / 16, labels < 8
    unknown, x, y = images[~known], images[known], labels[known]
    to_train, held_out, test = torch.randperm(len(y)).split([1024, 128, len(y) - 1152])
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    with torch.enable_grad():
        optimizer = train(model, x[to_train], y[to_train], epochs)

    def loss_at(width):
        return nll_loss(predict(model, posterior(model, optimizer, width), x[held_out]).log(), y[held_out])

    # How wide the posterior is depends on the prior, which held out digits of the known classes choose.
    width = min((10 ** (-step / 4) / 32 for step in range(14)), key=loss_at)
    found = {}
    for name, chosen in (("trained weights", 0.0), ("Laplace", width)):
        draw = posterior(model, optimizer, chosen)
        seen, unseen = (predict(model, draw, data) for data in (x[test], unknown))
        entropies = torch.cat([torch.special.entr(p).sum(1) for p in (seen, unseen)])
        is_new = torch.arange(len(entropies)) >= len(seen)
        found[name] = {
            "accuracy": (seen.argmax(1) == y[test]).float().mean().item(),
            "test loss": nll_loss(seen.log(), y[test]).item(),
            "confidence, known": seen.amax(1).mean().item(),
            "confidence, unknown": unseen.amax(1).mean().item(),
            "AUROC": roc_auc_score(is_new, entropies),
        }
    return found


if __name__ == "__main__":
    for name, numbers in main().items():
        print(f"{name}:", ", ".join(f"{what} {number:.3f}" for what, number in numbers.items()))
