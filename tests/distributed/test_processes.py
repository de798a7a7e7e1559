"""Several real processes: the same training as in one, what they send, and what they do in trouble."""

import json
import os

import pytest

from tests.distributed.launch import found_by, once
from tests.distributed.training import ALL_GATHER
from tests.distributed.worker import resumed

EXACT, SHORT = 1e-12, 2e-6  # the latter is round-off: most are below 1e-6, triangles above


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all of pytest's workers."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "processes"


@pytest.fixture(scope="module")
def found(folder):
    """What two processes found, in one start of them."""
    scenarios = ["cnn", "gpt2", "float32", "loops", "work", "division", "curvature", "short_statistics"]
    scenarios += ["sharded_loops", "whole_state", "messages", "memory", "trouble", "unused", "joined"]
    scenarios += ["tensor_parallel", "tensor_parallel loops", "tensor_parallel refused"]
    scenarios += [
        f"saved,{folder / 'first'},fsdp,4",
        f"resumed,{folder / 'first'},ddp,4,3,{folder / 'second'}",
    ]
    return once(folder, lambda: found_by(2, folder, *scenarios))


@pytest.mark.parametrize(("model", "ways"), [("cnn", 32), ("gpt2", 4)])
def test_weights_are_those_of_one_process(found, model, ways):
    """After 30 steps, for all structures and members of the family, as replicas and in shards."""
    assert len(found[model]) == ways
    assert {k: v for k, v in found[model].items() if not v <= EXACT} == {}


def test_weights_are_those_of_one_process_in_float32(found):
    assert {k: v for k, v in found["float32"].items() if not v <= SHORT} == {}


def test_batches_in_parts_are_one_batch(found):
    """Micro-batches, sent each time or the last time, and processes with batches of different sizes."""
    assert len(found["loops"]) == 12
    assert {k: v for k, v in found["loops"].items() if not v <= EXACT} == {}


def test_updates_and_natural_gradients_are_divided(found):
    for key, (difference, (updates, gradients), layers, equal) in found["work"].items():
        assert difference <= EXACT, key
        assert equal
        assert layers >= 4
        assert 0.2 < updates < 0.8, key
        # In shards, each process has a part of each of them.
        assert gradients == 0 if key.startswith("fsdp") else 0.2 < gradients < 0.8


def test_natural_gradients_are_divided_where_it_pays(found):
    sent, kept = found["division"]["dense None"]
    assert list(sent) == [ALL_GATHER]
    assert sent[ALL_GATHER][0] == 1
    assert kept == 2  # products of factors are where they are needed
    for other in ("dense False", "block_diagonal(32) None"):
        assert found["division"][other] == [{}, 4]


def test_curvature_in_a_pass_of_its_own(found):
    assert found["curvature"]["difference"] <= EXACT
    assert "fisher='empirical'" in found["curvature"]["refused"]


def test_statistics_in_a_shorter_dtype(found):
    short = found["short_statistics"]
    assert 1e-9 < short["difference"] < 1e-2
    assert short["bytes"]["short"] < 0.3 * short["bytes"]["long"]
    assert short["equal"]


def test_sharded_models_in_real_loops(found):
    loops = found["sharded_loops"]
    for way in ("made before", "evaluated between steps", "offloaded"):
        assert loops[way] <= EXACT, way
    assert 0 < loops["bfloat16"] < 0.02
    assert loops["factors"] == ["torch.float32"]
    assert loops["diagnostics"] < 1e-6


def test_state_in_one_place(found):
    state = found["whole_state"]
    assert state["to one"] <= EXACT
    assert state["and back"] == state["own"] == 0


def test_tensor_parallel_weights_are_those_of_one_process(found):
    assert len(found["tensor_parallel"]) == 3
    assert {k: v for k, v in found["tensor_parallel"].items() if not v <= EXACT} == {}


def test_tensor_parallelism_in_real_loops(found):
    loops = found["tensor_parallel loops"]
    for way in ("made before", "a sum", "shards of columns", "from one", "to one"):
        assert loops[way] <= EXACT, way
    assert loops["samples"] == 4  # of eight: each process looks at its half
    assert loops["factors"] < 0.52
    assert loops["trouble"] == [True, True, 1.0]


def test_weights_along_two_dimensions_are_refused_with_the_remedy(found):
    refused = found["tensor_parallel refused"]
    assert len(refused["refused"]) == 2
    for name, message in zip("02", refused["refused"], strict=True):
        assert f"the weight of '{name}' is shared out as" in message
        assert "'precondition': False" in message
    first, last = refused["losses"]
    assert last < first  # AdamW trains them


def test_replicas_send_nothing_between_updates(found):
    """And one message at each of them, no larger than the statistics."""
    for structure in ("diagonal", "block_diagonal(4)", "dense"):
        *before, update, after = found["messages"][f"ddp {structure}"]
        assert before == [{}, {}, {}]
        assert after == {}
        assert list(update) == ["all_reduce"]
        assert update["all_reduce"][0] == 1


def test_shards_of_rows_that_do_not_mix_exchange_no_gradients(found):
    """With diagonal factors; what is gathered are factors, and the one weight that cannot be cut by rows."""
    diagonal, dense = (found["messages"][f"fsdp {s}"][0] for s in ("diagonal", "dense"))
    assert "all_to_all_single" not in diagonal
    assert dense["all_to_all_single"][0] > 0


def test_memory_falls_with_the_number_of_processes(found):
    assert {k: v for k, v in found["memory"].items() if not v <= 0.51} == {}


def test_bad_numbers_in_one_process_are_refused_by_all(found):
    assert len(found["trouble"]) == 4
    assert all(one == [True, True] for one in found["trouble"].values()), found["trouble"]


def test_processes_with_different_numbers_of_batches(found):
    joined = found["joined"]
    for way in ("a mean of all", "a mean of those that go on"):
        difference, weights_are_equal, states_are_equal = joined[way]
        assert difference <= EXACT, way
        assert weights_are_equal
        assert states_are_equal
    unknown, unknown_again, order, separate = joined["refused"]
    assert unknown == unknown_again
    for message in (unknown, order):
        assert "Join([model, optimizer])" in message
    assert "fisher='empirical'" in separate
    own, others = joined["timeouts"]
    assert own == others == "0:05:00"


def test_a_layer_that_one_process_uses(found):
    assert found["unused"] == {"equal": True, "updates": 4}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninit:UserWarning")
def test_checkpoints_go_from_shards_to_replicas_and_to_one_process(found, folder):
    assert found["resumed"]["difference"] <= EXACT
    assert resumed(folder / "second", "one", 7, 3)["difference"] <= EXACT


# --- Four processes ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["cnn", "gpt2 all", "attention"])
def test_four_processes(tmp_path, scenario):
    found = found_by(4, tmp_path, scenario)[scenario]
    assert len(found) == 32
    assert {k: v for k, v in found.items() if not v <= EXACT} == {}


@pytest.mark.slow
def test_two_processes_in_float32(tmp_path):
    found = found_by(2, tmp_path, "float32 more")["float32 more"]
    assert len(found) == 20
    assert {k: v for k, v in found.items() if not v <= SHORT} == {}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_tensor_parallelism_for_all_structures(tmp_path, processes):
    found = found_by(processes, tmp_path, "tensor_parallel all")["tensor_parallel all"]
    assert len(found) == 24
    assert {k: v for k, v in found.items() if not v <= EXACT} == {}


@pytest.mark.slow
def test_four_processes_in_loops_meshes_and_trouble(tmp_path):
    found = found_by(4, tmp_path, "loops", "hybrid", "memory", "trouble", "unused", "sharded_loops")
    assert all(value <= EXACT for value in (*found["loops"].values(), *found["hybrid"].values())), json.dumps(
        found
    )
    assert all(share <= 0.3 for share in found["memory"].values())
    assert all(one == [True, True] for one in found["trouble"].values())
    assert found["unused"]["equal"]


@pytest.mark.slow
def test_checkpoints_go_from_two_processes_to_four_to_one(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    found_by(2, tmp_path, f"saved,{first},fsdp,4")
    found = found_by(4, tmp_path, f"resumed,{first},fsdp,4,3,{second}")
    assert found["resumed"]["difference"] <= EXACT
    assert found_by(1, tmp_path, f"resumed,{second},one,7,3")["resumed"]["difference"] <= EXACT
