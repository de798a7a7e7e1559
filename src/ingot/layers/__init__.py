"""Layer adapters, found by the class of a module."""

from ingot.layers import convolution, linear
from ingot.layers.base import LayerAdapter, adapter_for, gradient_rows, input_rows, register, registered

__all__ = ["LayerAdapter", "adapter_for", "convolution", "gradient_rows", "input_rows", "linear"]
__all__ += ["register", "registered"]
