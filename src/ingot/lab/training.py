"""The one training loop, on accelerate: one process or many, in any precision, from a checkpoint or anew."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from accelerate.utils import send_to_device, set_seed
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import ingot
from ingot.lab.accelerators import accelerator_for, default_precision
from ingot.lab.interrupting import Interrupted, stop_signals
from ingot.lab.loading import test_batches, training_batches
from ingot.lab.memory import resident_bytes, state_bytes
from ingot.lab.records import Folder, Record, Run
from ingot.lab.schedules import scheduled
from ingot.lab.task import Task

SAVE_SECONDS = float(os.environ.get("INGOT_SAVE_SECONDS", "30"))
"""A checkpoint is written after an epoch, but not sooner than so long after the last."""

LOOK_EVERY = 10
"""Steps from one look at the loss to the next: to look means to wait for the device."""


@dataclass(frozen=True)
class Loop:
    """How a task is trained; what is None is the task's own.

    Attributes:
        epochs: Passes over the training data; the last one may be a part.
        batch_size: Examples of a step, over all processes.
        schedule: Of the learning rate.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        clip: Bound on the norm of all gradients together.
        evaluate_every: Epochs from one evaluation to the next, or a part of one.
        workers: Processes that load data.
        tensorboard: Whether to write for TensorBoard as well.
    """

    epochs: float | None = None
    batch_size: int | None = None
    schedule: str | None = None
    precision: str | None = None
    clip: float | None = None
    evaluate_every: float = 1
    workers: int = 0
    tensorboard: bool = True


Watcher: TypeAlias = Callable[["Progress"], None]


@dataclass
class Progress:
    """How far a run is, for those who watch it."""

    run: Run
    step: int = 0
    steps: int = 0
    loss: float = float("nan")
    seconds_left: float | None = None
    memory: int = 0


class Maker(Protocol):
    """An optimizer with its settings, and its name in a report."""

    @property
    def label(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...

    def make(self, model: nn.Module, common: Mapping[str, Any] | None = None) -> Optimizer:
        """The optimizer of a model."""


class Trainer:
    """A run of a task with an optimizer from a seed, in a folder that keeps all of it."""

    def __init__(
        self,
        task: Task,
        chosen: Maker,
        seed: int,
        loop: Loop,
        folder: Path | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        own = task.training
        self.task, self.chosen, self.seed, self.loop = task, chosen, seed, loop
        self.epochs, self.batch_size = loop.epochs or own.epochs, loop.batch_size or own.batch_size
        self.schedule = loop.schedule or own.schedule
        self.precision = loop.precision or default_precision(task)
        self.folder = None if folder is None else Folder(folder)
        self.notes = dict(notes or {})
        self.step, self.seconds = 0, 0.0
        self.losses = 0.0, 0  # of this epoch before an interruption: their sum and their number
        self._saved_at = time.monotonic()

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that speaks and writes."""
        return self.accelerator.is_main_process

    @property
    def processes(self) -> int:
        """How many take part."""
        return self.accelerator.num_processes

    @property
    def device(self) -> torch.device:
        """Where this process trains."""
        return self.accelerator.device

    # --- Setting up ---------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        self.accelerator = accelerator_for(self.precision)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        self.train_loader, self.order = training_batches(
            self.task.train, self.batch_size, self.seed, rank, world, self.loop.workers
        )
        self.test_loader, self.shares = test_batches(
            self.task.test,
            max(self.batch_size, 256) if self.batch_size > 1 else 1,
            rank,
            world,
            self.loop.workers,
        )
        if not len(self.order):
            raise ValueError(f"{self.task.title} has no examples to train with")
        set_seed(self.seed)
        model = self.task.model()
        optimizer = self.chosen.make(model, self.task.training.common)
        self.steps_per_epoch = len(self.order)
        self.steps = max(1, round(self.epochs * self.steps_per_epoch))
        self.scheduler = LambdaLR(
            optimizer,
            scheduled(self.schedule, self.task.training.decay_every, self.steps_per_epoch, self.steps),
        )
        self.plain_optimizer = optimizer
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.accelerator.register_for_checkpointing(self.scheduler)
        set_seed(self.seed, device_specific=True)  # dropout need not be the same everywhere

    def _described(self) -> dict[str, Any]:
        model = self.accelerator.unwrap_model(self.model)
        lr = self.plain_optimizer.param_groups[0]["lr"]
        return {
            **self.notes,
            "optimizer": self.chosen.label,
            "optimizer settings": dict(self.chosen.settings),
            "learning rate": float(self.scheduler.base_lrs[0]) if self.scheduler.base_lrs else float(lr),
            "parameters": sum(p.numel() for p in model.parameters()),
            "training examples": self.order.examples,
            "test examples": sum(len(batch) for batch in self.shares.batches),
            "epochs": self.epochs,
            "steps": self.steps,
            "batch size": self.order.batch_size,
            "schedule": self.schedule,
            "precision": self.precision,
            "gradient clipping": self.loop.clip,
            "seed": self.seed,
            "processes": self.accelerator.num_processes,
            "device": str(self.device.type),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "ingot": ingot.__version__,
        }

    # --- The loop -----------------------------------------------------------------------------------------

    def train(self, watch: Watcher = lambda progress: None, *, resume: bool = True) -> Run:
        """Train to the end, from the last checkpoint of the folder if there is one and ``resume`` is on.

        A signal to stop (Ctrl-C) lets the step at hand end, saves, and raises ``Interrupted``.
        """
        self._set_up()
        run = self._begin(resume)
        if run.is_over:
            return run
        progress = Progress(run, self.step, self.steps)
        self.writer = self._writer()
        try:
            with stop_signals() as stop:
                if not run.records:
                    self._evaluate(run, float("nan"))
                while self.step < self.steps and run.state != "diverged":
                    self._epoch(run, progress, watch, stop)
                    is_over = self.step == self.steps or run.state == "diverged"
                    if not is_over and time.monotonic() - self._saved_at > SAVE_SECONDS:
                        self._save(run)
                if run.state == "diverged":
                    self._evaluate(run, float("nan"))
        finally:
            if self.writer is not None:
                self.writer.close()
            self.accelerator.free_memory()
        run.state = "done" if run.state == "running" else run.state
        run.state_bytes = state_bytes(self.plain_optimizer)
        if self.folder is not None and self.is_main:
            self.folder.save(run)
            shutil.rmtree(self.folder.checkpoint, ignore_errors=True)  # nothing is left to resume
        return run

    def _begin(self, resume: bool) -> Run:
        new = Run(
            self.task.title,
            self.chosen.label,
            self.seed,
            self._described(),
            self.task.objective.error,
            started=time.time(),
        )
        if self.folder is None:
            return new
        if resume and self.folder:
            run = self.folder.load()
            self._check_same(run, new)
            if run.is_over:
                return run
            if self.folder.checkpoint.is_dir():
                self._restore(run)
                return run
        if self.is_main:
            self.folder.start(new)
        self.accelerator.wait_for_everyone()
        return new

    def _check_same(self, old: Run, new: Run) -> None:
        """A run goes on as it was begun, or not at all."""
        free = ("torch", "ingot", "threads", "processes", "device")
        asked, was = ({k: str(v) for k, v in run.settings.items() if k not in free} for run in (new, old))
        changed = sorted(key for key in asked.keys() | was.keys() if asked.get(key) != was.get(key))
        assert self.folder is not None
        if changed:
            pairs = ", ".join(f"{key} was {was.get(key)}, now {asked.get(key)}" for key in changed)
            raise ValueError(
                f"{self.folder.path} holds a run with other settings ({pairs}): choose another --out, or "
                "--fresh to begin anew"
            )

    def _epoch(self, run: Run, progress: Progress, watch: Watcher, stop: Callable[[], bool]) -> None:
        """One pass over the data, or what is left of it, with the evaluations that are due."""
        self.order.epoch, self.order.first = divmod(self.step, self.steps_per_epoch)
        self.model.train()
        before, count = self.losses
        total = torch.tensor(before, device=self.device)
        start = time.perf_counter()
        for batch in self.train_loader:
            batch = send_to_device(batch, self.device, non_blocking=True)
            total += self._step(self.task.batch(batch, training=True))
            count += 1
            self.step += 1
            progress.step = self.step
            due, over = self._is_evaluation_due(), self.step == self.steps
            if self.step % LOOK_EVERY == 0 or due or over or stop():
                progress.loss, progress.memory = self._mean(total, count), resident_bytes(self.device)
                spent = self.seconds + time.perf_counter() - start
                progress.seconds_left = spent / self.step * (self.steps - self.step)
                if not isfinite(progress.loss):
                    run.state = "diverged"
                    break
            if due:
                self._stop_clock(start)
                self._evaluate(run, progress.loss)
                self.model.train()
                start = time.perf_counter()
            watch(progress)
            if stop() and not over:
                self._stop_clock(start)
                ended = self.step % self.steps_per_epoch == 0
                self.losses = (0.0, 0) if ended else (total.item(), count)
                self._interrupt(run)
            if over:
                break
        self._stop_clock(start)
        self.losses = 0.0, 0

    def _is_evaluation_due(self) -> bool:
        """After the last step, and after each that completes so many epochs."""
        steps = self.loop.evaluate_every * self.steps_per_epoch
        return self.step == self.steps or int(self.step / steps) > int((self.step - 1) / steps)

    def _stop_clock(self, start: float) -> None:
        """Count the time since then as training."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start

    def _mean(self, total: Tensor, count: int) -> float:
        mean = self.accelerator.reduce(total / count, "mean")
        assert isinstance(mean, Tensor)
        return mean.item()

    def _step(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad()
        with self.accelerator.autocast():
            loss = self.task.objective.loss(self.model, batch)
        self.accelerator.backward(loss)
        if self.loop.clip is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.loop.clip)
        self.optimizer.step()
        if not self.accelerator.optimizer_step_was_skipped:
            self.scheduler.step()
        return loss.detach().float()

    # --- Judging ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _evaluate(self, run: Run, train_loss: float) -> None:
        self.model.eval()
        total = torch.zeros(3, device=self.device)
        for number, batch in enumerate(self.test_loader):
            batch = send_to_device(batch, self.device, non_blocking=True)
            with self.accelerator.autocast():
                score = self.task.objective.score(self.model, self.task.batch(batch, training=False))
            if self.shares.counts(number):
                total += torch.stack([part.float() for part in score])
        loss, wrong, count = self.accelerator.reduce(total, "sum").tolist()
        record = Record(
            step=self.step,
            epoch=self.step / self.steps_per_epoch,
            seconds=self.seconds,
            lr=float(self.plain_optimizer.param_groups[0]["lr"]),
            train_loss=train_loss,
            test_loss=loss / count,
            error=self.task.objective.unit * wrong / count,
            memory=resident_bytes(self.device),
        )
        run.records.append(record)
        health = self._diagnostics()
        if health is not None:
            run.diagnostics.append({"step": self.step, **health})
        if self.folder is not None and self.is_main:
            self.folder.add(record, health)
        if self.writer is not None:
            for name in ("train_loss", "test_loss", "error", "lr", "seconds"):
                if isfinite(value := getattr(record, name)):
                    self.writer.add_scalar(name, value, self.step)

    def _diagnostics(self) -> dict[str, Any] | None:
        if not isinstance(self.plain_optimizer, ingot.NaturalGradient) or not self.step:
            return None
        return dict(self.plain_optimizer.diagnostics(conditions=False).scalars())

    def _writer(self) -> Any:
        if not self.loop.tensorboard or self.folder is None or not self.is_main:
            return None
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.folder.path / "tensorboard"), purge_step=self.step or None)

    # --- Checkpoints --------------------------------------------------------------------------------------

    def _save(self, run: Run) -> None:
        if self.folder is None:
            return
        new, kept = self.folder.checkpoint.with_suffix(".new"), self.folder.checkpoint
        if self.is_main:
            shutil.rmtree(new, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(new))
        if self.is_main:
            place = {"step": self.step, "seconds": self.seconds, "losses": self.losses}
            (new / "loop.json").write_text(json.dumps(place) + "\n", encoding="utf-8")
            old = kept.with_suffix(".old")
            if kept.is_dir():
                os.replace(kept, old)
            os.replace(new, kept)
            shutil.rmtree(old, ignore_errors=True)
            self.folder.save(run)
        self.accelerator.wait_for_everyone()
        self._saved_at = time.monotonic()

    def _restore(self, run: Run) -> None:
        assert self.folder is not None
        place = json.loads((self.folder.checkpoint / "loop.json").read_text(encoding="utf-8"))
        self.accelerator.load_state(str(self.folder.checkpoint))
        self.step, self.seconds, self.losses = place["step"], place["seconds"], tuple(place["losses"])
        run.state = "running"
        if self.is_main:
            self.folder.cut(run, self.step)
        self.accelerator.wait_for_everyone()

    def _interrupt(self, run: Run) -> None:
        run.state = "interrupted"
        self._save(run)
        raise Interrupted
