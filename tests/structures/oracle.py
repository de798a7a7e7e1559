"""Π̂ by its definition, for any structure: a sparse least-squares problem solved for its smallest solution."""

import numpy as np
import torch
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import lsqr
from torch import Tensor

from ingot.structures import Structure


def basis(structure: Structure) -> Tensor:
    """The matrices of which an element is the weighted sum, ``[numel, dim, dim]``."""
    return structure.dense(torch.eye(structure.numel, dtype=torch.float64))


def project(structure: Structure, s: Tensor) -> Tensor:
    """The smallest M in the structure whose symmetric part is nearest to S, both in the Frobenius norm."""
    matrices = basis(structure)
    # Measured by the matrix, not by the stored entries: an entry that stands in many places weighs more.
    length = matrices.flatten(1).norm(dim=1).numpy()
    symmetric = ((matrices + matrices.mT) / 2).flatten(1).numpy() / length[:, None]
    solution = lsqr(csr_matrix(symmetric.T), s.flatten().numpy(), atol=1e-15, btol=1e-15, iter_lim=500)[0]
    return torch.from_numpy(np.asarray(solution) / length)
