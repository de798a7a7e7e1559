"""Several real processes: the same training as in one, what they send, and what they do in trouble."""

import json

import pytest

from tests.distributed.launch import found_by

EXACT, SHORT = 1e-12, 2e-6  # the latter is round-off: most are below 1e-6, triangles above


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trajectories and loops in two processes, all in one start of them."""
    scenarios = (
        "cnn",
        "gpt2",
        "float32",
        "loops",
        "work",
        "division",
        "curvature",
        "short_statistics",
        "sharded_loops",
        "whole_state",
    )
    return found_by(2, tmp_path_factory.mktemp("trained"), *scenarios)


@pytest.mark.parametrize("model", ["cnn", "gpt2"])
def test_weights_are_those_of_one_process(trained, model):
    """After 30 steps, for all structures and members of the family, as replicas and in shards."""
    assert len(trained[model]) >= 10
    assert {k: v for k, v in trained[model].items() if not v <= EXACT} == {}


def test_weights_are_those_of_one_process_in_float32(trained):
    assert {k: v for k, v in trained["float32"].items() if not v <= SHORT} == {}


def test_batches_in_parts_are_one_batch(trained):
    """Micro-batches, sent each time or the last time, and processes with batches of different sizes."""
    assert len(trained["loops"]) == 12
    assert {k: v for k, v in trained["loops"].items() if not v <= EXACT} == {}


def test_updates_and_natural_gradients_are_divided(trained):
    for key, (difference, (updates, gradients), layers, equal) in trained["work"].items():
        assert difference <= EXACT, key
        assert equal
        assert layers >= 4
        assert 0.2 < updates < 0.8, key
        # In shards, each process has a part of each of them.
        assert gradients == 0 if key.startswith("fsdp") else 0.2 < gradients < 0.8


def test_natural_gradients_are_divided_where_it_pays(trained):
    sent, kept = trained["division"]["dense None"]
    assert list(sent) == ["all_gather_into_tensor"]
    assert sent["all_gather_into_tensor"][0] == 1
    assert kept == 2  # products of factors are where they are needed
    for other in ("dense False", "block_diagonal(32) None"):
        assert trained["division"][other] == [{}, 4]


def test_curvature_in_a_pass_of_its_own(trained):
    assert trained["curvature"]["difference"] <= EXACT
    assert "fisher='empirical'" in trained["curvature"]["refused"]


def test_statistics_in_a_shorter_dtype(trained):
    found = trained["short_statistics"]
    assert 1e-9 < found["difference"] < 1e-2
    assert found["bytes"]["short"] < 0.3 * found["bytes"]["long"]
    assert found["equal"]


def test_sharded_models_in_real_loops(trained):
    found = trained["sharded_loops"]
    for way in ("made before", "evaluated between steps", "offloaded"):
        assert found[way] <= EXACT, way
    assert 0 < found["bfloat16"] < 0.02
    assert found["factors"] == ["torch.float32"]
    assert found["diagnostics"] < 1e-6


def test_state_in_one_place(trained):
    found = trained["whole_state"]
    assert found["to one"] <= EXACT
    assert found["and back"] == found["own"] == 0


@pytest.fixture(scope="module")
def troubled(tmp_path_factory):
    scenarios = (
        "messages",
        "memory",
        "trouble",
        "unused",
        "joined",
        "tensor_parallel",
        "tensor_parallel loops",
    )
    return found_by(2, tmp_path_factory.mktemp("troubled"), *scenarios, "tensor_parallel refused")


def test_tensor_parallel_weights_are_those_of_one_process(troubled):
    assert len(troubled["tensor_parallel"]) == 5
    assert {k: v for k, v in troubled["tensor_parallel"].items() if not v <= EXACT} == {}


def test_tensor_parallelism_in_real_loops(troubled):
    found = troubled["tensor_parallel loops"]
    for way in ("made before", "a sum", "shards of columns", "from one", "to one"):
        assert found[way] <= EXACT, way
    assert found["samples"] == 4  # of eight: each process looks at its half
    assert found["factors"] < 0.52
    assert found["trouble"] == [True, True, 1.0]


def test_weights_along_two_dimensions_are_refused_with_the_remedy(troubled):
    found = troubled["tensor_parallel refused"]
    assert len(found["refused"]) == 2
    for name, message in zip("02", found["refused"], strict=True):
        assert f"the weight of '{name}' is shared out as" in message
        assert "'precondition': False" in message
    first, last = found["losses"]
    assert last < first  # AdamW trains them


def test_replicas_send_nothing_between_updates(troubled):
    """And one message at each of them, no larger than the statistics."""
    for structure in ("diagonal", "block_diagonal(4)", "dense"):
        *before, update, after = troubled["messages"][f"ddp {structure}"]
        assert before == [{}, {}, {}]
        assert after == {}
        assert list(update) == ["all_reduce"]
        assert update["all_reduce"][0] == 1


def test_shards_of_rows_that_do_not_mix_exchange_no_gradients(troubled):
    """With diagonal factors; what is gathered are factors, and the one weight that cannot be cut by rows."""
    diagonal, dense = (troubled["messages"][f"fsdp {s}"][0] for s in ("diagonal", "dense"))
    assert "all_to_all_single" not in diagonal
    assert dense["all_to_all_single"][0] > 0


def test_memory_falls_with_the_number_of_processes(troubled):
    assert {k: v for k, v in troubled["memory"].items() if not v <= 0.51} == {}


def test_bad_numbers_in_one_process_are_refused_by_all(troubled):
    assert len(troubled["trouble"]) == 4
    assert all(found == [True, True] for found in troubled["trouble"].values()), troubled["trouble"]


def test_processes_with_different_numbers_of_batches(troubled):
    found = troubled["joined"]
    for way in ("a mean of all", "a mean of those that go on"):
        difference, weights_are_equal, states_are_equal = found[way]
        assert difference <= EXACT, way
        assert weights_are_equal
        assert states_are_equal
    unknown, unknown_again, order, separate = found["refused"]
    assert unknown == unknown_again
    for message in (unknown, order):
        assert "Join([model, optimizer])" in message
    assert "fisher='empirical'" in separate
    own, others = found["timeouts"]
    assert own == others == "0:05:00"


def test_a_layer_that_one_process_uses(troubled):
    assert troubled["unused"] == {"equal": True, "updates": 4}


def test_checkpoints_go_from_shards_to_one_process_and_to_replicas(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    found = found_by(2, tmp_path, f"saved,{first},fsdp,4", f"resumed,{first},ddp,4,3,{second}")
    assert found["resumed"]["difference"] <= EXACT
    assert found_by(1, tmp_path, f"resumed,{second},one,7,3")["resumed"]["difference"] <= EXACT


# --- Four processes ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["cnn", "gpt2 all", "attention"])
def test_four_processes(tmp_path, scenario):
    found = found_by(4, tmp_path, scenario)[scenario]
    assert len(found) == 32
    assert {k: v for k, v in found.items() if not v <= EXACT} == {}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_tensor_parallelism_for_all_structures(tmp_path, processes):
    found = found_by(processes, tmp_path, "tensor_parallel all")["tensor_parallel all"]
    assert len(found) == 18
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
