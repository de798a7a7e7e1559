"""Digits as a graph, with PyTorch Geometric: images are linked with those like them, a tenth has labels."""

import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from torch import nn
from torch_geometric.nn import GCN
from torch_geometric.utils import from_scipy_sparse_matrix

from ingot import SINGD


def main(epochs=60):
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    edges, _ = from_scipy_sparse_matrix(kneighbors_graph(images, n_neighbors=8))
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    labelled, test = torch.randperm(len(labels)).split([180, 1617])
    model = GCN(in_channels=64, hidden_channels=64, num_layers=2, out_channels=10, dropout=0.5)
    optimizer = SINGD(model, lr=1e-2)
    for _ in range(epochs):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images, edges)[labelled], labels[labelled]).backward()
        optimizer.step()
    model.eval()
    return (model(images, edges)[test].argmax(1) == labels[test]).float().mean()


if __name__ == "__main__":
    print(f"accuracy: {main():.3f}")
