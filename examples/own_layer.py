"""A layer of one's own: a linear layer that normalises its input, made known by an adapter."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, linear, normalize

from ingot import SINGD
from ingot.layers import LayerAdapter, register


class NormalizedLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return linear(normalize(x, dim=-1), self.weight, self.bias)


@register(NormalizedLinear)  # without it, AdamW would train the layer
class NormalizedLinearAdapter(LayerAdapter):
    def shape(self, module):
        return (), *module.weight.shape  # one matrix, d_o and d_i

    def inputs(self, module, x, g):
        return normalize(x, dim=-1).unsqueeze(1)  # [batch, shared, d_i]: what the weight meets

    def output_gradients(self, module, x, g):
        return g.unsqueeze(1)


def main(epochs=6):
    torch.manual_seed(0)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float() / 16
    train, test = torch.randperm(len(labels)).split([1408, 389])
    model = nn.Sequential(NormalizedLinear(64, 128), nn.GELU(), NormalizedLinear(128, 10))
    optimizer = SINGD(model, lr=3e-3)
    for _ in range(epochs):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    print(optimizer.describe())
    return (model(images[test]).argmax(1) == labels[test]).float().mean()


if __name__ == "__main__":
    print(f"accuracy: {main():.3f}")
