import os

import pytest

# Before torch is imported: also for processes that tests start, which would take each other's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from ingot.layers.base import _FAMILIES
from ingot.structures.registry import _BUILDERS


def pytest_addoption(parser):
    parser.addoption("--built", help="folder of wheel and sdist to test; without it, new ones are built")


@pytest.fixture(autouse=True)
def _reproducible():
    """One thread per worker, the same random numbers in every test, and nothing left behind."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def registry():
    """Structures and layers that a test registers are forgotten after it."""
    known = [(registered, dict(registered)) for registered in (_BUILDERS, _FAMILIES)]
    yield
    for registered, before in known:
        registered.clear()
        registered.update(before)
