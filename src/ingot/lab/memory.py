"""What memory training takes: what is kept from step to step, and the most that is allocated in a step."""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

from ingot.lab.loading import training_batches
from ingot.lab.task import Task

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler tells each time that it ran


def state_bytes(optimizer: Optimizer) -> int:
    """The bytes of all tensors that the optimizer keeps from step to step."""
    kept = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in kept if isinstance(value, Tensor))


def resident_bytes(device: torch.device) -> int:
    """The most memory so far: of a graphics card what torch allocated, else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Span(NamedTuple):
    """The allocations in a recorded span."""

    totals: list[int]  # bytes that are allocated after each allocation and release
    largest: int  # bytes of the largest single allocation


def spans_of(run: Callable[[], None], names: tuple[str, ...]) -> dict[str, Span]:
    """The allocations in those spans that a function records under these names, on a CPU."""
    gc.collect()  # so that nothing older is freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = sorted(
        (event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"
    )
    totals = list(accumulate(size for _, size in memory))
    found = {}
    for span in (event for event in events if event.get("name") in names and "dur" in event):
        begin, end = span["ts"], span["ts"] + span["dur"]
        inside = [i for i, (time, _) in enumerate(memory) if begin <= time <= end]
        found[span["name"]] = Span(
            [totals[i] for i in inside], max((memory[i][1] for i in inside), default=0)
        )
    return found


def training_peak(task: Task, chosen: Any, batch_size: int, device: torch.device) -> int:
    """The most that is allocated in training steps, of which the last updates factors, the model included."""
    batch = _first_batch(task, batch_size)

    def run() -> None:
        torch.manual_seed(0)
        with record_function("model"):
            model = task.model().to(device)
        optimizer = chosen.make(model, task.training.common)
        for name in ("first", "second", "third"):
            with record_function(name):
                parts = tuple(part.to(device) if isinstance(part, Tensor) else part for part in batch)
                task.objective.loss(model, task.batch(parts, training=True)).backward()
                optimizer.step()
                optimizer.zero_grad()
                del parts

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    spans = spans_of(run, ("second", "third"))
    return max(max(span.totals) for span in spans.values())


def _first_batch(task: Task, batch_size: int) -> tuple[object, ...]:
    loading, _ = training_batches(task.train, batch_size, 0, 0, 1, 0)
    found: tuple[object, ...] = tuple(next(iter(loading)))
    return found
