import pytest
import torch

from ingot.structures.registry import _BUILDERS


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
    """Structures that a test registers are forgotten after it."""
    before = dict(_BUILDERS)
    yield
    _BUILDERS.clear()
    _BUILDERS.update(before)
