"""Examples with frameworks are short, learn, train as by hand, and go on after a crash as if there was none.

The others are in test_gallery.py.
"""

import os
import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR

import ingot
from ingot import SINGD
from tests.frameworks import IGNORED_WARNINGS, start_afresh

FOLDER = Path(__file__).parents[1] / "examples"
FRAMEWORKS = (FOLDER.parent / "docs" / "frameworks.md").read_text("utf-8")
NAMES = sorted(re.findall(r'--8<-- "examples/(\w+)\.py"', FRAMEWORKS))
STEPS_PER_EPOCH = 22  # of two micro-batches each

pytestmark = IGNORED_WARNINGS


class Crash(Exception):
    """What happens to long runs."""


@dataclass
class Training:
    """What an example made: a model and its optimizer."""

    model: nn.Module
    optimizer: SINGD
    initial: dict[str, Tensor]
    accuracy: float = 0.0
    steps: int = 0
    computed_in: set[torch.dtype] = field(default_factory=set)
    micro_batches: list[dict[str, Tensor]] = field(default_factory=list)  # as far as they are keywords

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach() for p in self.model.parameters()]

    @property
    def layers(self) -> list[nn.Module]:
        return [m for m in self.model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]


@pytest.fixture(autouse=True)
def _in_a_world_of_its_own(tmp_path, monkeypatch) -> Iterator[None]:
    """Frameworks write where they are, and into the environment."""
    start_afresh()
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def run(monkeypatch):
    """Runs an example's main, or as a script without arguments; returns what was trained."""

    def run(name: str, *, crash_at: int | None = None, **arguments: Any) -> Training:
        start_afresh()
        made: list[Training] = []

        def observed(model: nn.Module, **settings: Any) -> SINGD:
            initial = {key: value.clone() for key, value in model.state_dict().items()}
            training = Training(model, SINGD(model, **settings), initial)
            made.append(training)

            def remember(module: nn.Module, _: Any, keywords: dict[str, Tensor]) -> None:
                if module.training:
                    training.micro_batches.append(keywords)

            def count_or_crash(*_: Any) -> None:
                training.steps += 1
                if training.steps == crash_at:
                    raise Crash

            def see_dtype(module: nn.Module, _: Any, output: Tensor) -> None:
                training.computed_in.add(output.dtype)

            model.register_forward_pre_hook(remember, with_kwargs=True)
            for layer in training.layers:
                layer.register_forward_hook(see_dtype)
            training.optimizer.register_step_pre_hook(count_or_crash)
            return training.optimizer

        monkeypatch.setattr(ingot, "SINGD", observed)
        path = str(FOLDER / f"{name}.py")
        if arguments:
            accuracy = runpy.run_path(path)["main"](**arguments)
            made[0].accuracy = float(accuracy)
        else:
            runpy.run_path(path, run_name="__main__")
        (training,) = made
        return training

    return run


def _assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


def _numbers(optimizer: SINGD) -> list[Tensor]:
    """Everything that the optimizer knows."""
    states = (optimizer.state[p] for group in optimizer.param_groups for p in group["params"])
    return [torch.as_tensor(state[key]) for state in states for key in sorted(state)]


# --- What they are ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_a_script_of_30_lines_at_most_that_learns(name, run, capsys):
    lines = [line for line in (FOLDER / f"{name}.py").read_text("utf-8").splitlines() if line.strip()]
    assert lines[0].startswith('"""')
    assert len(lines[1:]) <= 30
    assert max(map(len, lines)) <= 110
    training = run(name)
    (accuracy,) = re.findall(r"^accuracy: ([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
    assert float(accuracy) > 0.9
    steps = 120 if name == "huggingface_trainer" else 6 * STEPS_PER_EPOCH
    assert training.layers
    for layer in training.layers:
        state = training.optimizer.state[layer.weight]
        assert {"K", "C"} <= set(state)
        assert state["steps"] == steps  # one for each batch, not for each micro-batch
        assert 0 < state["updates"] < steps
    assert training.optimizer.describe().preconditioned > 0.9


# --- Resuming ---------------------------------------------------------------------------------------------


def _arguments(name: str, folder: Path) -> dict[str, Any]:
    """Where to write, and how long to train."""
    if name == "huggingface_trainer":
        return {
            "out": str(folder),
            "steps": 28,
        }  # with a checkpoint every seven steps, so in the middle of epochs
    if name in ("plain_loop", "lightning_fabric"):
        return {"checkpoint": folder / "checkpoint.pt", "epochs": 4}
    return {"out": folder, "epochs": 4}


def _to_resume(name: str, folder: Path) -> dict[str, Any]:
    """How to go on from the checkpoint after two epochs, or after 21 steps."""
    if name == "accelerate_loop":
        return {"epochs_done": 2}
    if name == "lightning_module":
        return {"resume": next(folder.rglob(f"epoch=1-step={2 * STEPS_PER_EPOCH}.ckpt"))}
    return {"resume": True}


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_crashed_continues_from_its_checkpoint_to_the_same_weights(name, run, tmp_path):
    folder, other_folder = tmp_path / "one", tmp_path / "other"
    folder.mkdir()
    other_folder.mkdir()
    steps, saved = (28, 21) if name == "huggingface_trainer" else (4 * STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH)
    with pytest.raises(Crash):
        run(name, crash_at=saved + 5, **_arguments(name, folder))
    resumed = run(name, **_arguments(name, folder), **_to_resume(name, folder))
    uninterrupted = run(name, **_arguments(name, other_folder))
    assert (resumed.steps, uninterrupted.steps) == (steps - saved, steps)
    _assert_equal(resumed.weights, uninterrupted.weights)
    _assert_equal(_numbers(resumed.optimizer), _numbers(uninterrupted.optimizer))


# --- The same training by hand ----------------------------------------------------------------------------


def _by_hand(epochs: int, schedule: str, norm_over: str) -> list[Tensor]:
    """The weights after the training that all examples but one are about, in nothing but PyTorch."""
    torch.manual_seed(0)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    train = torch.randperm(len(labels))[: 64 * STEPS_PER_EPOCH]
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10))
    optimizer = SINGD(model, lr=3e-3)
    scheduler = CosineAnnealingLR(optimizer, epochs * (STEPS_PER_EPOCH if schedule == "each step" else 1))
    clipped = list(model.parameters())
    if norm_over == "groups":  # which are ordered otherwise, and so is the sum of the squares
        clipped = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(epochs):
        for batch in train.split(64):
            for part in batch.split(32):
                (cross_entropy(model(images[part].float() / 16), labels[part]) / 2).backward()
            clip_grad_norm_(clipped, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if schedule == "each step":
                scheduler.step()
        if schedule == "each epoch":
            scheduler.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("name", "schedule", "norm_over", "options"),
    [
        ("plain_loop", "each epoch", "model", {"bf16": False}),
        ("accelerate_loop", "each step", "model", {}),
        ("lightning_fabric", "each epoch", "groups", {}),
        ("lightning_module", "each epoch", "groups", {}),
    ],
)
def test_a_framework_trains_exactly_as_a_loop_by_hand(name, schedule, norm_over, options, run):
    _assert_equal(run(name, epochs=3, **options).weights, _by_hand(3, schedule, norm_over))


def test_the_trainer_of_transformers_trains_exactly_as_a_loop_by_hand(run):
    """On the batches that it chose, with the loss that it lets the model compute."""
    from transformers import ConvNextForImageClassification, get_cosine_schedule_with_warmup

    steps = 12
    seen = run("huggingface_trainer", steps=steps)
    model = ConvNextForImageClassification(seen.model.config)
    model.load_state_dict(seen.initial)
    optimizer = SINGD(model, lr=3e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    assert len(seen.micro_batches) == 2 * steps
    for first, second in zip(seen.micro_batches[::2], seen.micro_batches[1::2], strict=True):
        for batch in (first, second):
            scores = model(batch["pixel_values"]).logits
            (cross_entropy(scores, batch["labels"]) / 2).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    _assert_equal(seen.weights, [p.detach() for p in model.parameters()])


def test_the_trainer_of_transformers_may_make_the_optimizer_itself():
    """From a class and its arguments, of which it takes the model for the first."""
    from transformers import ConvNextConfig, ConvNextForImageClassification, Trainer, TrainingArguments

    config = ConvNextConfig(num_channels=1, patch_size=2, num_stages=1, hidden_sizes=[8], depths=[1])
    data = [{"pixel_values": torch.randn(1, 8, 8), "labels": i % 2} for i in range(16)]
    initial, trained = ConvNextForImageClassification(config).state_dict(), []
    for made_by_trainer in (True, False):
        model = ConvNextForImageClassification(config)
        model.load_state_dict(initial)
        how = {"optimizer_cls_and_kwargs": (SINGD, {"model": model, "lr": 3e-3})}
        if not made_by_trainer:
            how = {"optimizers": (SINGD(model, lr=3e-3), None)}
        arguments = TrainingArguments("out", max_steps=3, save_strategy="no")
        trainer = Trainer(model, arguments, train_dataset=data, **how)
        trainer.train()
        assert isinstance(trainer.optimizer.optimizer, SINGD)
        assert trainer.optimizer.state[model.classifier.weight]["updates"] == 3
        trained.append([p.detach() for p in model.parameters()])
    _assert_equal(*trained)


# --- Mixed precision --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("accelerate_loop", {"epochs": 2, "mixed_precision": "bf16"}),
        ("lightning_fabric", {"epochs": 2, "precision": "bf16-mixed"}),
        ("lightning_module", {"epochs": 2, "precision": "bf16-mixed"}),
        ("huggingface_trainer", {"steps": 20, "bf16": True, "use_cpu": True}),
    ],
)
def test_mixed_precision(name, options, run):
    training = run(name, **options)
    assert torch.bfloat16 in training.computed_in
    assert training.accuracy > 0.5
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in training.weights)
    for layer in training.layers:
        state = training.optimizer.state[layer.weight]
        assert state["K"].dtype == torch.float32
        assert state["updates"] > 0
        assert all(value.isfinite().all() for value in state.values() if isinstance(value, Tensor))


# --- The wrapper of Fabric and Lightning, which has attributes of its own ---------------------------------


def _wrapped(**settings: Any) -> tuple[Any, nn.Sequential, Any, Any]:
    from lightning import Fabric

    torch.manual_seed(0)
    fabric, network = Fabric(accelerator="cpu", devices=1), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    model, optimizer = fabric.setup(network, SINGD(network, **settings))
    assert optimizer is not optimizer.optimizer
    return fabric, network, model, optimizer


def _updates(optimizer: SINGD, weight: Tensor) -> int:
    return optimizer.state[weight]["updates"]


def test_curvature_is_given_through_fabrics_wrapper():
    fabric, network, model, optimizer = _wrapped(fisher="separate")
    for steps in (1, 2):
        output = model(torch.ones(5, 4))
        optimizer.curvature_backward(output, "cross_entropy")
        fabric.backward(output.square().mean())
        optimizer.step()
        optimizer.zero_grad()
        assert _updates(optimizer, network[0].weight) == steps


def test_layers_are_replaced_and_added_under_fabrics_wrapper():
    fabric, network, model, optimizer = _wrapped()
    added = nn.Linear(3, 2)
    for change in (None, "replaced", "added"):
        if change == "replaced":
            network[1] = nn.Linear(8, 3)
        if change == "added":
            network.append(added)
            optimizer.add_param_group({"params": list(added.parameters()), "lr": 0.1})
        optimizer.zero_grad()
        fabric.backward(model(torch.ones(5, 4)).square().mean())
        optimizer.step()
    assert [_updates(optimizer, layer.weight) for layer in network] == [3, 3, 1]  # the replaced one inherits


def test_nothing_is_collected_while_fabrics_wrapper_is_paused():
    fabric, _, model, optimizer = _wrapped()
    with optimizer.paused():
        fabric.backward(model(torch.ones(5, 4)).square().mean())
    assert not optimizer.state
