"""The plan of a training before it begins: structures, memory and operations of each layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from ingot.costs import Example, Flops, count_passes, layer_flops
from ingot.description import readable, text_table
from ingot.model import named_parameters
from ingot.optimizer import IKFAC, INGD, KFAC, SINGD, NaturalGradient

OPTIMIZERS: dict[str, type[NaturalGradient]] = {cls.__name__: cls for cls in (SINGD, INGD, IKFAC, KFAC)}


class PlanRow(NamedTuple):
    """A layer, weight and bias together, or a parameter that AdamW trains."""

    name: str
    shape: tuple[int, ...]
    trained_by: str
    k: str  # structures of the factors, where there are any
    c: str
    state_bytes: int
    cached_bytes: int  # of which products that are kept between updates of the factors
    adamw_bytes: int  # what the state of AdamW would take, and that of SGD with momentum
    sgd_bytes: int
    flops: Flops
    flops_per_step: float  # in the mean, beyond those of the forward and backward pass


@dataclass(frozen=True)
class Plan:
    """A table of all trained layers; ``print`` it, or look into its ``rows``."""

    rows: list[PlanRow]
    model_flops: int | None  # of a forward and backward pass, if there was an example

    @property
    def state_bytes(self) -> int:
        """What the whole state takes from the first step on."""
        return sum(row.state_bytes for row in self.rows)

    @property
    def cached_bytes(self) -> int:
        """What of this are products kept between updates of the factors; they are in no checkpoint."""
        return sum(row.cached_bytes for row in self.rows)

    @property
    def adamw_bytes(self) -> int:
        """What AdamW's state would take."""
        return sum(row.adamw_bytes for row in self.rows)

    @property
    def sgd_bytes(self) -> int:
        """What the state of SGD with momentum would take."""
        return sum(row.sgd_bytes for row in self.rows)

    @property
    def flops_per_step(self) -> float:
        """Operations of a step beyond the forward and backward pass, in the mean.

        Without an example those of the statistics are not among them.
        """
        return sum(row.flops_per_step for row in self.rows)

    @property
    def extra_flops(self) -> float | None:
        """Those operations in units of the forward and backward pass, if there was an example."""
        return self.flops_per_step / self.model_flops if self.model_flops else None

    def __str__(self) -> str:
        head = ["layer", "shape", "K", "C", "state", "/ AdamW", "/ SGD", "flops / step"]
        head += ["/ fwd+bwd"] if self.model_flops else []
        lines = [self._line(rows) for rows in _alike(self.rows)]
        return "\n".join([text_table(head, lines, right=head[4:]), "", *self._summary()])

    __repr__ = __str__

    def _line(self, rows: list[PlanRow]) -> list[str]:
        """One line for rows that differ in nothing but the number of their block."""
        first = rows[0]
        name, shape = first.name, "x".join(map(str, first.shape)) or "1"
        if first.trained_by == "AdamW":
            name, shape = f"{len(rows)} by AdamW", ""
        elif len(rows) > 1:
            names = zip(*(row.name.split(".") for row in rows), strict=True)
            name = f"{len(rows)} x " + ".".join("*" if len({*part}) > 1 else part[0] for part in names)
        same = Plan(rows, self.model_flops)
        state, adamw, sgd, flops = same.state_bytes, same.adamw_bytes, same.sgd_bytes, same.flops_per_step
        ratios = f"{state / max(1, adamw):.2f}", f"{state / max(1, sgd):.2f}"
        line = [name, shape, first.k, first.c, readable(state), *ratios, _count(flops) if first.k else ""]
        if self.model_flops:
            line.append(f"{same.extra_flops:.2%}" if first.k else "")
        return line

    def _summary(self) -> Iterable[str]:
        state, adamw, sgd = self.state_bytes, self.adamw_bytes, self.sgd_bytes
        yield (
            f"The state takes {readable(state)}: {state / max(1, adamw):.3f}x AdamW's {readable(adamw)}, "
            f"{state / max(1, sgd):.3f}x the {readable(sgd)} of SGD with momentum."
        )
        if self.cached_bytes:
            yield f"{readable(self.cached_bytes)} of it are products kept between updates of the factors."
        flops = _count(self.flops_per_step)
        if self.model_flops:
            yield (
                f"A step takes {flops} more in the mean, {self.extra_flops:.1%} of the "
                f"{_count(self.model_flops)} of a forward and backward pass."
            )
        else:
            yield (
                f"A step takes {flops} more in the mean, without those of the statistics: give an example "
                "batch to count them, and to compare with the forward and backward pass."
            )


def plan(
    model: nn.Module,
    *,
    optimizer: str | type[NaturalGradient] = SINGD,
    example: Example | None = None,
    **settings: Any,
) -> Plan:
    """What an optimizer will do with a model, at which cost, before anything is allocated.

    The model may be on any device, ``"meta"`` as well, and is left as it was.

    Args:
        model: The model to be trained.
        optimizer: The optimizer, by its class or name.
        example: What the model is called with in a step: one argument, a tuple of them, or a dict of
            keywords. Only shapes matter. With it the forward and backward passes are counted, too.
        settings: Those of the optimizer, such as ``structure="auto"`` and ``memory_budget="0.8x adamw"``.
    """
    made = _optimizer_class(optimizer)(model, **settings)
    try:
        return _plan(made, example)
    finally:
        made.detach()


def _optimizer_class(given: str | type[NaturalGradient]) -> type[NaturalGradient]:
    if isinstance(given, str):
        by_name = {name.lower(): cls for name, cls in OPTIMIZERS.items()}
        if given.lower() in by_name:
            return by_name[given.lower()]
    elif isinstance(given, type) and issubclass(given, NaturalGradient):
        return given
    raise ValueError(
        f"optimizer must be one of {', '.join(OPTIMIZERS)}, as a class or by name; got {given!r}"
    )


def _plan(optimizer: NaturalGradient, example: Example | None) -> Plan:
    model, layers = optimizer._watch.model, optimizer._layers
    passes = None
    if example is not None:
        passes = count_passes(model, layers, lambda layer: optimizer._group(layer.weight)["approx"], example)
    described = {row.name: row for row in optimizer.describe().rows}
    names = {p: name for name, p in named_parameters(model).items()}
    rows = []
    for p, name in names.items():
        row, flops, per_step, parts = described[name], Flops(0, 0, 0), 0.0, [described[name]]
        if row.trained_by in ("frozen", "not here", "with its weight"):
            continue
        if p in layers:
            layer = layers[p]
            parts += [] if layer.bias is None else [described[names[layer.bias]]]
            uses = passes.uses[p] if passes else []
            flops = layer_flops(
                optimizer.rule, layer.structures, optimizer._kept_squares(layer), layer.shape, uses
            )
            per_step = flops.per_step(optimizer._group(p)["precond_every"])
        rows.append(
            PlanRow(
                *row[:5],
                state_bytes=sum(part.state_bytes for part in parts),
                cached_bytes=row.cached_bytes,
                adamw_bytes=sum(part.adamw_bytes for part in parts),
                sgd_bytes=sum(part.sgd_bytes for part in parts),
                flops=flops,
                flops_per_step=per_step,
            )
        )
    return Plan(rows, passes.flops if passes else None)


def _alike(rows: list[PlanRow]) -> list[list[PlanRow]]:
    """Rows of the same layer in different blocks together, and those of AdamW, which come last."""
    kinds: dict[Any, list[PlanRow]] = {}
    for row in rows:
        pattern = ["" if part.isdecimal() else part for part in row.name.split(".")]
        kind = "AdamW" if row.trained_by == "AdamW" else (*pattern, *row[1:])
        kinds.setdefault(kind, []).append(row)
    adamw = kinds.pop("AdamW", None)
    return [*kinds.values(), *([adamw] if adamw else [])]


def _count(flops: float) -> str:
    for unit in ("", " kflop", " Mflop", " Gflop"):
        if flops < 1000:
            return f"{flops:.3g}{unit}" if unit else f"{flops:.0f} flop"
        flops /= 1000
    return f"{flops:.3g} Tflop"
