"""Accelerate's view of this process, in the precision that a task is trained in."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from ingot.lab.task import Task

PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def default_precision(task: Task) -> str:
    """bfloat16 where the task is for it and the hardware has it."""
    has = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return "bf16" if task.training.short_floats and has else "fp32"


def accelerator_for(precision: str) -> Accelerator:
    """Accelerate's view of this process; those of one precision share it."""
    if precision not in PRECISIONS:
        raise ValueError(f"there is no precision {precision!r}: choose {', '.join(PRECISIONS)}")
    from accelerate.state import AcceleratorState

    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != PRECISIONS[precision]:
        AcceleratorState._reset_state()  # keeps the process group
    # Several processes without a device of their own are seen as such only if the CPU is asked for.
    on_cpu = not (torch.cuda.is_available() or torch.backends.mps.is_available())
    return Accelerator(mixed_precision=PRECISIONS[precision], cpu=on_cpu)
