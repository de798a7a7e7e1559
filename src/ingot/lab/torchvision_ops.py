"""torchvision beside a torch that cannot load its compiled operators."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

import torch


def make_torchvision_importable() -> None:
    """Import torchvision if it is installed, declaring two of its operators where it cannot load its own.

    A wheel built for CUDA has no operators to offer to a torch without it. Its import goes on without them
    up to the shape functions of ``nms`` and ``qnms``, which are refused because nothing declares these two,
    and timm and transformers fail with it. Declarations are enough: no model calls them. A torchvision that
    works declares them itself and is only imported.
    """
    if find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except RuntimeError:
        missing = [name for name in ("nms", "qnms") if not hasattr(torch.ops.torchvision, name)]
        if not missing:
            raise  # something else is wrong
        # What was imported before the failure belongs to a package that is gone.
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in missing:
            torch.library.define(
                f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        import_module("torchvision")
