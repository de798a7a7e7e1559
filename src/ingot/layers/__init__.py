"""Families of layers, found by the class of a module."""

from ingot.layers import attention, convolution, embedding, linear
from ingot.layers.base import Family, LayerAdapter, Tap, columns, family_of, register, registered

__all__ = ["Family", "LayerAdapter", "Tap", "attention", "columns", "convolution", "embedding"]
__all__ += ["family_of", "linear", "register", "registered"]
