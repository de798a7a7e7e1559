"""Layers in one normal form, and the registry that finds the family of a module.

Every layer is seen as a matrix W ``[..., d_o, d_i]`` that meets inputs a ``[..., batch, shared, d_i]`` and
sends back output gradients g ``[..., batch, shared, d_o]``. ``shared`` counts the places where one sample
uses the weight: positions of a sequence or of an image; it is 1 without weight sharing. Leading dimensions
are separate matrices with factor pairs of their own, such as the groups of a convolution.

Kronecker factors follow from that form, with N samples, R places, and g the gradient of each sample's loss:

    expand   U = mean over samples and places of a aᵀ     G = mean over samples of Σ over places of g gᵀ
    reduce   the same after a was averaged and g summed over the places (R = 1)
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor, nn


class Tap(Protocol):
    """Watches one use of a layer's weight."""

    def __call__(self, output: Tensor, x: Tensor, start: int = 0) -> Tensor:
        """The output of the use, to go on with in its place; ``x`` is the input that it came from.

        Where the use was of some of the layer's matrices only, ``start`` is the first of these.
        """


class Family(ABC):
    """What is known of a class of modules: which layers it has, and how their uses are watched."""

    @abstractmethod
    def layers(self, module: Any) -> dict[str, tuple[LayerAdapter, nn.Module]]:
        """The module's layers by name, each with the adapter and the module that describe it."""

    def draws_random_numbers(self, module: Any) -> bool:
        """Whether ``capture`` draws the random numbers of the forward pass once more, as for dropout."""
        return False

    @abstractmethod
    def capture(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, taps: Mapping[str, Tap]
    ) -> Any:
        """The output of a forward call with every use led through the tap of its layer, if it has one."""


class LayerAdapter(Family):
    """How a layer with one weight looks in the normal form. Adapters are stateless."""

    transposed: ClassVar[bool] = False
    """Whether W is the weight's transpose: weights are stored as ``[d_i, d_o]``."""

    input_structure: ClassVar[str | None] = None
    """The structure that K always has, for inputs that leave no choice."""

    @abstractmethod
    def shape(self, module: Any) -> tuple[tuple[int, ...], int, int]:
        """The leading dimensions, d_o and d_i (without bias) of the weight as a matrix."""

    @abstractmethod
    def inputs(self, module: Any, x: Tensor, g: Tensor) -> Tensor:
        """The input of a use as ``[..., batch, shared, d_i]``, given with the gradient of its output."""

    @abstractmethod
    def output_gradients(self, module: Any, x: Tensor, g: Tensor) -> Tensor:
        """The gradient of the output of a use as ``[..., batch, shared, d_o]``, given with its input."""

    def mean_inputs(self, module: Any, x: Tensor, g: Tensor) -> Tensor:
        """The mean of ``inputs`` over the places, ``[..., batch, d_i]``."""
        return self.inputs(module, x, g).mean(-2)

    def growth(self, module: Any) -> int:
        """How many times larger ``inputs`` is than the input."""
        return 1

    def input_squares(self, module: Any, x: Tensor, g: Tensor, approx: str) -> Tensor | None:
        """The sum over rows of the squared inputs, ``[..., d_i]``, if that is cheaper than the rows.

        It is all that a diagonal K needs.
        """
        return None

    def weight(self, module: nn.Module) -> nn.Parameter | None:
        """The weight if it is a parameter of the module's own (not computed, as by a parametrization)."""
        return module._parameters.get("weight")

    def bias(self, module: nn.Module) -> nn.Parameter | None:
        return module._parameters.get("bias")

    def weight_matrix(self, module: Any, weight: Tensor) -> Tensor:
        """The weight (or its gradient) as ``[..., d_o, d_i]``."""
        if self.transposed:
            return weight.mT
        lead, d_o, d_i = self.shape(module)
        return weight.reshape(*lead, d_o, d_i)

    def matrix_weight(self, module: Any, matrix: Tensor, weight: Tensor) -> Tensor:
        """The inverse of ``weight_matrix``: a matrix in the shape of the weight."""
        return matrix.mT if self.transposed else matrix.reshape(weight.shape)

    # A module of one layer: its forward is the one use.

    def layers(self, module: nn.Module) -> dict[str, tuple[LayerAdapter, nn.Module]]:
        return {"": (self, module)}

    def capture(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, taps: Mapping[str, Tap]
    ) -> Any:
        # torch's own layers call it input, those of other libraries x.
        return taps[""](output, args[0] if args else kwargs["input" if "input" in kwargs else "x"])


_FAMILIES: dict[str, Family] = {}

F = TypeVar("F", bound=type[Family])


def register(*classes: str | type[nn.Module]) -> Callable[[F], F]:
    """Make a family of modules known: a decorator for its adapter.

    Classes of modules are given as such, or by their names with their packages, such as
    ``"torch.nn.Linear"``, so that those of other libraries are known without importing these; there, the
    package is the one in which the class is defined::

        @register(MyLinear)
        class MyAdapter(LayerAdapter): ...
    """
    names = [_name(cls) for cls in classes]
    if not names:
        raise TypeError(f"a family is registered for at least one class of modules: {_USAGE}")

    def decorate(family: F) -> F:
        if not (isinstance(family, type) and issubclass(family, Family)):
            raise TypeError(
                f"what is registered is a class derived from LayerAdapter or Family, and {family!r} is none: "
                f"{_USAGE}"
            )
        _FAMILIES.update(dict.fromkeys(names, family()))
        return family

    return decorate


_USAGE = "write @register(MyModule) above the class of its adapter"


def _name(cls: Any) -> str:
    """The full name of a class, by which it is found."""
    given = cls
    if isinstance(cls, str) and "." in cls:
        package, _, name = cls.rpartition(".")
        cls = getattr(sys.modules.get(package), name, None)  # None: of a library that is not imported
        if cls is None:
            return str(given)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(
            "a family is registered for classes of modules, or for their full names such as "
            f"'torch.nn.Linear': {_USAGE}; got {given!r}"
        )
    return _full_name(cls)


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def registered() -> dict[str, Family]:
    """All families by the class name they serve."""
    return dict(_FAMILIES)


def family_of(module: nn.Module) -> Family | None:
    """The family of a module's class or of the nearest base class that has one and whose forward it kept."""
    for cls in type(module).__mro__:
        family = _FAMILIES.get(_full_name(cls))
        if family is not None:
            # A subclass with a forward of its own may compute anything.
            return family if type(module).forward is cls.__dict__.get("forward") else None
    return None


def columns(x: Tensor) -> Tensor:
    """``[..., batch, shared, d]`` as columns ``[..., d, n]``."""
    return x.movedim(-1, -3).flatten(-2)  # in this order, what is stored by features is not turned around
