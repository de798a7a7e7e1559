"""The citation graph Cora, from PyTorch Geometric or from an ``.npz`` file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ingot.lab.data.places import VARIABLE, MissingDataError, look_for

CACHE = Path("~/.cache/ingot")
MASKS = ("train_mask", "val_mask", "test_mask")


class Graph(NamedTuple):
    """Nodes with features and labels, edges in both directions, and which nodes are for what."""

    features: Tensor
    edges: Tensor
    labels: Tensor
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor


def load_cora(folder: Path | None) -> Graph:
    """The graph in Planetoid's split, its features as shares of the words of a paper."""
    file = look_for(folder, "cora.npz")
    graph = _from_planetoid(folder) if file is None else _from_arrays(file)
    total = graph.features.sum(1, keepdim=True).clamp_min(1)
    return graph._replace(features=graph.features / total)


def _from_arrays(file: Path) -> Graph:
    keys = ("features", "edge_index", "labels", *MASKS)
    with np.load(file, allow_pickle=False) as arrays:
        missing = [key for key in keys if key not in arrays]
        if missing:
            raise MissingDataError(f"{file} has no {', '.join(missing)}: it needs {', '.join(keys)}")
        features, edges, labels, *masks = (torch.from_numpy(arrays[key]) for key in keys)
    return Graph(features.float(), edges.long(), labels.long(), *(mask.bool() for mask in masks))


def _from_planetoid(folder: Path | None) -> Graph:
    from torch_geometric.datasets import Planetoid

    root = (folder or CACHE.expanduser()) / "planetoid"
    try:
        data = Planetoid(str(root), "Cora")[0]
    except Exception as error:  # of the network or of files
        raise MissingDataError(
            f"Cora is not here and cannot be downloaded ({error or type(error).__name__}).\n"
            "Where there is a network, get it by\n"
            '  python -c "from torch_geometric.datasets import Planetoid; '
            "Planetoid('DATA/planetoid', 'Cora')\"\n"
            f"and name the folder: --data-dir DATA, or {VARIABLE}=DATA. Instead, DATA may have\n"
            f"  cora.npz with the arrays features, edge_index, labels, {', '.join(MASKS)}"
        ) from error
    return Graph(data.x, data.edge_index, data.y, data.train_mask, data.val_mask, data.test_mask)
