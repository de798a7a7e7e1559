"""What the benchmarks do while time or memory is measured: that the work is done, and comes out right."""

import pytest
import torch

from benchmarks import fast_paths, scaling
from benchmarks.side_by_side import TOLERANCE, FastPath, measure

# --- Fast paths -------------------------------------------------------------------------------------------

SMALL = {"rows": 80, "d": 6, "columns": 3, "layers": 2, "channels": 3, "size": 5}


@pytest.mark.parametrize("path", fast_paths.PATHS, ids=lambda path: path.name)
def test_fast_paths_give_the_same_result_at_every_kind_of_shape(path):
    shape = {name: SMALL[name] for name in path.shapes[0]}
    small = FastPath(path.name, path.replaces, path.build, [shape])
    [measured] = measure([small], rounds=2)
    assert measured.error < TOLERANCE
    assert len(measured.speedups) == 2


def test_a_fast_path_that_differs_is_refused():
    one = torch.ones(3)
    wrong = FastPath("wrong", "right", lambda: (lambda: one, lambda: one + 0.01), [{}])
    with pytest.raises(ValueError, match=r"wrong .* differs from right by 1.0e-02"):
        measure([wrong])


def test_the_ratio_says_how_many_times_as_fast(monkeypatch):
    """By a clock that only the two ways move."""
    now = 0.0

    def taking(seconds):
        def way():
            nonlocal now
            now += seconds
            return torch.ones(3)

        return way

    monkeypatch.setattr("benchmarks.side_by_side.perf_counter", lambda: now)
    path = FastPath("few", "many", lambda: (taking(0.06), taking(0.001)), [{}])
    [measured] = measure([path], rounds=3)
    assert measured.speedups == pytest.approx([60, 60, 60])


# --- Scaling ----------------------------------------------------------------------------------------------


def test_memory_of_a_layer_shows_what_a_factor_takes():
    largest_dense, state_dense = scaling.layer_memory("dense", 256)
    largest, state = scaling.layer_memory("diagonal", 256)
    assert largest_dense >= 4 * 256**2 > 4 * largest
    assert state_dense > 4 * 256**2 > 4 * state


def test_every_kind_of_work_is_done_for_every_structure():
    for structure in scaling.PAPER:
        works = scaling.works(structure, 40, rows=3)
        assert list(works) == list(scaling.KINDS)
        for work in works.values():
            work()


def test_the_step_that_is_timed_leaves_the_factors_alone():
    step = scaling.plain_step("diagonal", 5)
    optimizer = step.__self__
    [state] = (state for state in optimizer.state.values() if "K" in state)
    before, weight = state["K"].clone(), next(iter(optimizer.param_groups[0]["params"])).clone()
    step()
    assert torch.equal(state["K"], before)
    assert not torch.equal(next(iter(optimizer.param_groups[0]["params"])), weight)
