"""A structure of one's own: the same block for every row of an image, in 64 entries where dense has 4096."""

from dataclasses import dataclass
from math import gcd

import torch
from sklearn.datasets import load_digits
from torch import nn

from ingot import SINGD
from ingot.structures import Structure, register


@register("repeated")
@dataclass(frozen=True)
class Repeated(Structure):
    dim: int
    block: int = 8

    @property
    def rows(self):  # of the block: as many as fit into the dimension without a rest
        return gcd(self.dim, self.block)

    @property
    def numel(self):
        return self.rows**2

    def _matrix(self, a):
        return a.unflatten(-1, (self.rows, self.rows))

    def _cut(self, x):  # [..., dim, n] to [..., count, rows, n]
        return x.unflatten(-2, (-1, self.rows))

    def identity(self, *, dtype=None, device=None):
        return torch.eye(self.rows, dtype=dtype, device=device).flatten()

    def matmul(self, a, b):
        return (self._matrix(a) @ self._matrix(b)).flatten(-2)

    def apply(self, a, x):
        return (self._matrix(a).unsqueeze(-3) @ self._cut(x)).flatten(-3, -2)

    def apply_t(self, a, x):
        return (self._matrix(a).mT.unsqueeze(-3) @ self._cut(x)).flatten(-3, -2)

    def gram(self, x):  # the nearest of the structure has the mean of the blocks
        return (self._cut(x) @ self._cut(x).mT).mean(-3).flatten(-2)

    def self_gram(self, a):
        return (self._matrix(a).mT @ self._matrix(a)).flatten(-2)

    def inner(self, a, b):  # an entry stands in several places
        return (a * b).sum(-1, keepdim=True) * (self.dim // self.rows)


def main(epochs=6, structure=("repeated(8)", "upper(dense(16),diagonal)")):
    torch.manual_seed(0)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float() / 16
    train, test = torch.randperm(len(labels)).split([1408, 389])
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10))
    optimizer = SINGD(model, lr=3e-3, structure=structure)
    for _ in range(epochs):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    print(optimizer.describe())
    return (model(images[test]).argmax(1) == labels[test]).float().mean()


if __name__ == "__main__":
    print(f"accuracy: {main():.3f}")
