"""Families of layers, found by the class of a module."""

from ingot.layers import attention, convolution, embedding, linear
from ingot.layers.base import (
    Family,
    LayerAdapter,
    Tap,
    family_of,
    gradient_rows,
    input_rows,
    register,
    registered,
)

__all__ = ["Family", "LayerAdapter", "Tap", "attention", "convolution", "embedding", "family_of"]
__all__ += ["gradient_rows", "input_rows", "linear", "register", "registered"]
