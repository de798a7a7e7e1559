"""How a run is doing: numbers for each layer, and words when something is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ingot.family import NORMS, Rule
from ingot.model import Layer, named_parameters
from ingot.precision import computing
from ingot.rules import Factor
from ingot.stability import EXPLOSION, OUTLIER, are_finite

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from ingot.optimizer import NaturalGradient


class HealthWarning(UserWarning):
    """Something in a run is wrong that the optimizer noticed; training goes on."""


# --- Numbers --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Diagnostics:
    """Numbers of each layer as tensors on its device, ``[]``; ``scalars`` fetches them, ``print`` too.

    - ``norm_m_K``, ``norm_m_C``: spectral norm of the last directions of the factors, or a bound on it from
      above where this is small enough.
    - ``trace_K``, ``trace_C``: mean of the diagonal of K and C, or of KFAC's inverses.
    - ``condition_K``, ``condition_C``: estimate of their condition, from below; exact for small ones.
    - ``gain``: size of the natural gradient in units of the plain one, at one of the last ten updates.
    - ``skipped``: how many factor updates were refused because of their statistics.
    - ``dropped``: how many gradients were refused.

    Of a layer with several matrices (groups of a convolution, heads' projections) it is the largest number.
    """

    layers: dict[str, dict[str, Tensor]]

    def scalars(self, prefix: str = "") -> dict[str, float]:
        """All numbers by ``layer/number``, fetched from their devices at once."""
        named = {f"{prefix}{layer}/{k}": v for layer, found in self.layers.items() for k, v in found.items()}
        scalars = dict.fromkeys(named, 0.0)
        for device in {value.device for value in named.values()}:
            here = [name for name, value in named.items() if value.device == device]
            fetched = torch.stack([named[name].float() for name in here]).cpu()
            scalars |= {name: float(value) for name, value in zip(here, fetched, strict=True)}
        return scalars

    def __str__(self) -> str:
        keys = list(dict.fromkeys(key for found in self.layers.values() for key in found))
        lines = [("layer", *keys)]
        for layer, found in self.layers.items():
            lines.append((layer, *(f"{float(found[key]):.3g}" if key in found else "" for key in keys)))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines
        )

    __repr__ = __str__


@torch.no_grad()
def diagnose(optimizer: NaturalGradient, conditions: bool) -> Diagnostics:
    """The numbers of all layers that have factors, and of other parameters whose gradients were bad."""
    found = {layer.name: _numbers(optimizer, layer, conditions) for layer in optimizer._layers.values()}
    for name, p in named_parameters(optimizer._watch.model).items():
        state = optimizer.state.get(p, {})
        if "dropped" in state and p not in optimizer._layers:
            found[name] = {"dropped": state["dropped"]}
    return Diagnostics({name: numbers for name, numbers in found.items() if numbers})


def _numbers(optimizer: NaturalGradient, layer: Layer, conditions: bool) -> dict[str, Tensor]:
    rule = optimizer.rule
    with optimizer._whole_factors([layer], rule.applied):
        return _numbers_of(rule, layer, optimizer._factors(layer), conditions)


def _numbers_of(rule: Rule, layer: Layer, state: dict[str, Any], conditions: bool) -> dict[str, Tensor]:
    if rule.names[0] not in state:
        return {key: state[key] for key in ("dropped",) if key in state}
    numbers = {key: state[key].amax() for key in NORMS if key in state}
    factors = dict(zip("KC", rule.preconditioners(layer.structures, state), strict=True))
    for side, (structure, entries) in factors.items():
        entries = entries.to(computing(entries.dtype))
        numbers[f"trace_{side}"] = structure.trace(entries).amax() / structure.dim
        if conditions:
            numbers[f"condition_{side}"] = condition(Factor(structure, entries)).amax()
    return numbers | {key: state[key].amax() for key in ("gain", "skipped", "dropped") if key in state}


def condition(factor: Factor, iterations: int = 32) -> Tensor:
    """An estimate of a factor's condition from below, ``[...]``: by Lanczos' method on AᵀA.

    It is exact where the dimension is no larger than the number of iterations.
    """
    structure, entries = factor[0], factor[1].double()
    entries = entries / entries.abs().amax(-1, keepdim=True)  # squares of what is large would overflow
    finite = are_finite(entries).squeeze(-1)
    entries = entries.nan_to_num(0.0, 0.0, 0.0)
    count, generator = min(iterations, structure.dim), torch.Generator().manual_seed(0)
    noise = torch.randn(structure.dim, count, dtype=entries.dtype, generator=generator).to(entries.device)
    basis = (noise[:, :1] / noise[:, :1].norm()).expand(*entries.shape[:-1], structure.dim, 1)
    for n in range(1, count):
        x = structure.apply_t(entries, structure.apply(entries, basis[..., -1:]))
        # A little noise leads on where the space that A reaches is used up, as that of the identity is.
        x = x + 1e-14 * torch.linalg.vector_norm(x, dim=-2, keepdim=True) * noise[:, n : n + 1]
        for _ in range(2):  # once is not enough for round-off
            x = x - basis @ (basis.mT @ x)
        norm = torch.linalg.vector_norm(x, dim=-2, keepdim=True)
        basis = torch.cat((basis, x / norm.clamp_min(torch.finfo(x.dtype).tiny)), dim=-1)
    image = structure.apply(entries, basis)
    squares = torch.linalg.eigvalsh(image.mT @ image)
    found = (squares[..., -1] / squares[..., 0].clamp_min(torch.finfo(squares.dtype).tiny)).sqrt()
    return torch.where(finite, found, torch.nan)


Log: TypeAlias = Callable[[dict[str, float], int], Any]


def log(optimizer: NaturalGradient, to: Any, every: int, prefix: str, conditions: bool) -> RemovableHandle:
    """Send diagnostics to a logger after every so many steps."""
    write: Log = to
    if hasattr(to, "add_scalar"):  # TensorBoard's SummaryWriter, and those that follow it

        def write(scalars: dict[str, float], step: int) -> None:
            for name, value in scalars.items():
                to.add_scalar(name, value, step)

    elif not callable(to):
        raise TypeError(
            f"diagnostics go to a SummaryWriter or to a function of a dict and the step, not to {to!r}"
        )
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be a whole number of steps, at least 1; got {every!r}")

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        counts = (state.get("steps", state.get("step", 0)) for state in optimizer.state.values())
        steps = int(max(counts, default=0))
        if steps % every == 0:
            write(optimizer.diagnostics(conditions).scalars(prefix), steps)

    return optimizer.register_step_post_hook(after_step)


# --- Words ----------------------------------------------------------------------------------------------

_MESSAGES = {
    "statistics": "the factors of {} were not updated, because the statistics of this batch are not finite, "
    f"or more than {EXPLOSION:g} times their average. Training goes on with the factors as they are; look "
    "for inputs or targets that are out of range.",
    "gradient": "the gradient of {} was taken for zero, because it is not finite, or its step would be "
    f"more than {OUTLIER:g} times the usual momentum. Training goes on; look for inputs or targets that "
    "are out of range, or use torch.amp.GradScaler if the model computes in float16.",
    "rate": "the factors of {} overshoot (β₁ |m| > 2): lower precond_lr, or bound their steps with "
    "max_factor_step=0.5.",
    "loss": "the gradients at {} look like those of a cross entropy with another average: {}. With these "
    "settings the scale of the curvature depends on it.",
}


class Reporter:
    """Collects what went wrong in a step, and says it at its end, once for each layer."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], dict[str, None]] = {}
        self._said: set[tuple[str, str]] = set()
        self._steps_unseen = 0

    def note(self, kind: str, name: str, detail: str = "") -> None:
        """Remember a trouble of a layer or parameter."""
        if (kind, name) not in self._said:
            self._found.setdefault((kind, detail), {})[name] = None

    def after_step(self, optimizer: NaturalGradient) -> None:
        """Warn of what is new. This comes last in a step, since a warning may be made an error."""
        self._steps_unseen += 1
        # Nothing is noted where that would mean to wait for a device: it is looked up once in a while.
        if self._steps_unseen >= 100:
            self._steps_unseen = 0
            if any(weight.device.type != "cpu" for weight in optimizer._layers):
                self._look_up(optimizer.diagnostics(conditions=False))
        self._speak()

    def _look_up(self, diagnostics: Diagnostics) -> None:
        for name, numbers in diagnostics.layers.items():
            for key, kind in (("skipped", "statistics"), ("dropped", "gradient")):
                if key in numbers and float(numbers[key]) > 0:
                    self.note(kind, name)

    def _speak(self) -> None:
        found, self._found = self._found, {}
        self._said |= {(kind, name) for (kind, _), names in found.items() for name in names}
        for (kind, detail), names in found.items():
            listed = ", ".join(repr(name) if name else "the model" for name in list(names)[:5])
            if len(names) > 5:
                listed += f" and {len(names) - 5} more"
            warnings.warn(
                f"{_MESSAGES[kind].format(listed, detail)} This is said once for each layer; "
                "optimizer.diagnostics() has the numbers.",
                HealthWarning,
                stacklevel=6,
            )


# --- A loss with another average ------------------------------------------------------------------------

_AVERAGES = {"batch": "a mean over samples", "token": "a mean over samples and positions", None: "a sum"}


def weight_of_terms(gradients: Tensor) -> float:
    """The weight that a cross entropy gives to each of its terms, if its gradients are these; otherwise 0.

    ``gradients`` are those of a last layer's outputs, ``[batch, places, classes]``. Those of a cross entropy
    are w (p - y): one negative entry in each row, and a sum of zero. The largest positive part, w (1 - p_y),
    is somewhat below w at the beginning of a training, and w tells of how many terms the loss is a mean.
    """
    rows = gradients.flatten(0, -2).float()
    rows = rows[rows.abs().amax(-1) > 0]
    if rows.shape[-1] < 3 or not len(rows):
        return 0.0
    positive, total = rows.clamp_min(0).sum(-1), rows.sum(-1)
    is_one = ((rows < 0).sum(-1) == 1).all() & (total.abs() < 1e-2 * positive).all()
    return positive.max().item() if bool(is_one) else 0.0


def other_average(weight: float, batch: int, places: int, declared: str | None) -> str:
    """What a cross entropy's average seems to be, in words, where that is not what was declared."""
    if batch < 8 or not weight:
        return ""
    terms = {"batch": batch, "token": batch * places, None: 1}
    fitting = [kind for kind, count in terms.items() if 0.3 < weight * count < 1.2]
    if not fitting or terms[declared] in [terms[kind] for kind in fitting]:
        return ""
    return f"it seems to be {_AVERAGES[fitting[0]]}, so set loss_average={fitting[0]!r}"
