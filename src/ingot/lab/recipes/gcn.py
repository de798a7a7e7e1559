"""The graph network of the paper: two graph convolutions on Cora."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from ingot.lab.data.graph import load_cora
from ingot.lab.recipes.base import Options, recipe
from ingot.lab.task import NodeClassification, Task, Training, Whole


class GCN(nn.Module):
    """Two graph convolutions, after Kipf and Welling."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        from torch_geometric.nn import GCNConv

        self.first: Any = GCNConv(features, hidden)
        self.second: Any = GCNConv(hidden, classes)

    def forward(self, features: Tensor, edges: Tensor) -> Tensor:
        """Scores of the classes for each node."""
        x = dropout_of_few(features, 0.5) if self.training else features
        x = dropout(self.first(x, edges).relu(), 0.5, self.training)
        found: Tensor = self.second(x, edges)
        return found


def dropout_of_few(x: Tensor, p: float) -> Tensor:
    """Dropout of a matrix that is mostly zero: to draw numbers for the others alone saves most of a step."""
    places = x.nonzero(as_tuple=True)
    return torch.zeros_like(x).index_put_(places, dropout(x[places], p))


@recipe("gcn", "two-layer graph convolutional network (GNN)", ("cora",))
def gcn(options: Options) -> Task:
    """A step is the whole graph; constant learning rate and float32, as in the paper."""
    graph = load_cora(options.folder)
    hidden = options.sized(full=64, small=16, tiny=8)
    nodes, classes = (graph.features, graph.edges, graph.labels), 1 + int(graph.labels.max())
    return Task(
        title="GNN on Cora",
        model=lambda: GCN(graph.features.shape[1], hidden, classes),
        train=Whole(*nodes, graph.train_mask),
        test=Whole(*nodes, graph.test_mask),
        validation=Whole(*nodes, graph.val_mask),
        objective=NodeClassification(),
        training=Training(
            epochs=options.sized(full=200, small=200, tiny=2),
            batch_size=1,
            schedule="constant",
            short_floats=False,
            common={"momentum": 0.9},
        ),
    )
