"""The members of the family as the optimizer calls them: what each keeps, and how it stays sound.

What a factor update is stands in ``rules``, as a few functions; here it meets damping, momentum, bounds, and
statistics that must not get in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ingot.precision import computing
from ingot.rules import Curvature, Factor, Pair, curvature, damped_inverse, ikfac, ingd, move, moving_average
from ingot.scalars import Flag, Number, flag, is_at_hand, is_finite, is_known, no, number, where
from ingot.stability import (
    MIN_DAMPING,
    NO_CURVATURE,
    PATIENCE,
    SETTLED_UPDATES,
    are_finite,
    bounded_rate,
    has_exploded,
    may_be_too_far,
)
from ingot.structures import Square, Structure
from ingot.structures.base import Anew, InTurn, Symmetric


class Statistics(NamedTuple):
    """The curvature of a batch as one factor update sees it."""

    k: Curvature
    c: Curvature
    trace_u: Number  # tr(U) / d_i
    trace_g: Number


class Settings(NamedTuple):
    """The numbers of one factor update, named as in a parameter group."""

    precond_lr: float  # β₁ in the paper, as it is at this update
    precond_momentum: float  # α₁
    damping: float  # λ
    relative_damping: bool
    max_factor_step: float | None
    factor_start: str  # "identity" or "trace"


State: TypeAlias = dict[str, Tensor]
Numbers: TypeAlias = dict[str, Number]
Dampings: TypeAlias = tuple[Number, Number]


class Proposal(NamedTuple):
    """What a factor update would make of the state."""

    factors: State
    numbers: Numbers
    finite: Flag  # with squares that the dtype can hold
    alive: Flag = True  # whether there has been any curvature above round-off
    exploded: Flag = False  # whether this batch's is beyond all that was seen


TRACES = ("trace_u", "trace_g")
"""The state's keys for the moving averages of tr(U) / d_i and tr(G) / d_o, kept where damping needs them."""

COUNTS = ("skipped", "trouble")
"""The state's keys for the number of factor updates that were refused, in all and lately in a row."""

NORMS = ("norm_m_K", "norm_m_C")
"""The state's keys for the sizes of the last directions (``_size``), of the rules that have directions."""

NUMBERS = (*TRACES, *COUNTS, *NORMS)
"""All keys of single numbers for each matrix, which are kept in the dtype of the computation."""

SIZES = ("size", "noise", "gain", "dropped")
"""The state's keys for the usual size of a layer's momentum, the size that it would have if gradients were
noise, that of the natural gradient in units of the plain one's, and how many gradients were not trusted."""

_NO_MOMENTUM = "{} has no Riemannian momentum: leave precond_momentum at 0, or choose SINGD, which has"


class Rule(ABC):
    """How a member of the family keeps its factors: what it stores, how it updates, how it preconditions.

    The state of a layer is a dict of flat tensors. ``start`` and ``update`` return new tensors and change
    nothing. ``names`` are the state's keys for the K and the C side, ``applied`` those of what gradients are
    multiplied with, ``keys`` those of all factors and momenta, which are kept in the factors' dtype;
    ``NUMBERS`` are kept in that of the computation.
    """

    names: ClassVar[tuple[str, str]]
    applied: ClassVar[tuple[str, str]]
    keys: ClassVar[tuple[str, ...]]
    numbers: ClassVar[tuple[str, ...]] = COUNTS

    def start(self, structures: Pair, like: Tensor, batch: tuple[int, ...], settings: Settings) -> State:
        """Identity factors, and zeros for what is averaged or counted."""
        pairs = zip(self.names, structures, strict=True)
        state = {name: s.identity_like(like).repeat(*batch, 1) for name, s in pairs}
        zero = torch.zeros((*batch, 1), dtype=computing(like.dtype), device=like.device)
        numbers = (*TRACES, *self.numbers) if _needs_traces(settings) else self.numbers
        return state | {key: zero.clone() for key in numbers}

    def check(self, structures: Pair, momentum: float) -> None:  # noqa: B027, most rules refuse nothing
        """Refuse what the rule cannot do, and say what can."""

    @abstractmethod
    def statistic(self, factor: Factor, x: Tensor) -> Tensor:
        """What a batch's columns contribute to one side's statistics."""

    @abstractmethod
    def takes_gram(self, structure: Structure, n: int) -> bool:
        """Whether the statistic of n columns is to be had from their Gram matrix alone, and sooner."""

    @abstractmethod
    def statistic_of_gram(self, factor: Factor, gram: Tensor) -> Tensor:
        """The statistic of columns whose Gram matrix is given."""

    def preconditioners(self, structures: Pair, state: State) -> tuple[Factor, Factor]:
        """What gradients are multiplied with: K and C, or KFAC's inverses."""
        k, c = (Factor(s, state[name]) for s, name in zip(structures, self.applied, strict=True))
        return k, c

    @abstractmethod
    def squares(self, structures: Pair, kept_for: int) -> tuple[Square, Square]:
        """How gradients are multiplied with K Kᵀ and C Cᵀ, if products may be kept for so many steps."""

    def update(
        self, structures: Pair, state: State, seen: Statistics, settings: Settings, updates: int
    ) -> State:
        """The state after a factor update, of which there have been ``updates`` so far.

        Nothing that is not finite, or far beyond all that was seen, gets in: the factors stay as they are.
        After repeated trouble they start anew.
        """
        new = self._proposed(structures, state, seen, settings, updates)
        counts: Numbers = {key: state.get(key, 0.0) for key in COUNTS}
        sound = (new.finite | no(new.alive)) & no(new.exploded)
        if is_known(sound & new.alive & (number(counts["trouble"]) == 0)):  # as nearly always
            return new.factors | _tensors(new.numbers | counts, new.factors[self.names[0]])
        return self._chosen(structures, state, seen, settings, new)

    def _chosen(
        self, structures: Pair, state: State, seen: Statistics, settings: Settings, proposal: Proposal
    ) -> State:
        """What is sound of a proposal, the old state where it is not, a new start after that too often."""
        like = proposal.factors[self.names[0]]
        traces = _tensors({"u": seen.trace_u, "g": seen.trace_g}, like).values()
        flags = (torch.as_tensor(flag, device=like.device) for flag in proposal[2:])
        finite, alive, exploded = flags
        sound = (finite | ~alive) & ~exploded & are_finite(seen.k.entries, seen.c.entries, *traces)
        zero = torch.zeros_like(like[..., :1])
        skipped, trouble = (state.get(key, zero) for key in COUNTS)
        trouble = torch.where(sound, 0, trouble + 1)
        anew = trouble >= PATIENCE
        fresh = self.start(structures, like, (), settings)
        new = proposal.factors | _tensors(proposal.numbers, like)
        for key, value in new.items():
            accepted = sound & alive if key in self.keys else sound
            old = state.get(key, torch.zeros_like(value))
            start = fresh.get(key, torch.zeros_like(value[..., :1]))
            new[key] = torch.where(anew, start, torch.where(accepted, value, old))
        return new | {"skipped": skipped + ~sound, "trouble": torch.where(anew, 0, trouble)}

    def _proposed(
        self, structures: Pair, state: State, seen: Statistics, settings: Settings, updates: int
    ) -> Proposal:
        """What the state would be, whether there is curvature to move by, and whether too much of it."""
        if not _needs_traces(settings):
            return self._updated(structures, state, seen, settings, self.dampings({}, settings))
        old = {name: number(state.get(name, 0.0)) for name in TRACES}
        was_alive = _alive(old)
        traces = _averaged(old, seen, updates)
        dampings, alive = self.dampings(traces, settings), _alive(traces)
        if settings.factor_start == "trace" and not is_known(was_alive):
            state, seen = self._begun(state, seen, traces, dampings, alive & no(was_alive))
        # No curvature so far (a branch may begin at zero) says nothing of its scale: the factors wait.
        new = self._updated(structures, state, seen, settings, dampings)
        exploded = has_exploded(old["trace_u"], seen.trace_u) | has_exploded(old["trace_g"], seen.trace_g)
        exploded = exploded & (updates >= SETTLED_UPDATES)
        return new._replace(numbers=traces | new.numbers, alive=alive, exploded=exploded)

    @abstractmethod
    def _updated(
        self, structures: Pair, state: State, seen: Statistics, settings: Settings, dampings: Dampings
    ) -> Proposal:
        """The factors and momenta after the update, for given dampings of U and G."""

    @abstractmethod
    def _begun(
        self, state: State, seen: Statistics, traces: Numbers, dampings: Dampings, begins: Flag
    ) -> tuple[State, Statistics]:
        """The multiple of the identity that fits the traces, where there is curvature for the first time."""

    def dampings(self, traces: Mapping[str, Number], settings: Settings) -> Dampings:
        """λ for U and for G: as given, or in proportion to their traces so that the product is λ tr tr."""
        if not settings.relative_damping:
            return settings.damping, settings.damping
        root = max(settings.damping, MIN_DAMPING) ** 0.5
        return root * traces["trace_u"], root * traces["trace_g"]


def _needs_traces(settings: Settings) -> bool:
    return settings.relative_damping or settings.factor_start == "trace"


def _averaged(traces: Numbers, seen: Statistics, updates: int) -> Numbers:
    """Moving averages of tr(U) / d_i and tr(G) / d_o."""
    rate = max(0.05, 1 / (updates + 1))
    pairs = zip(traces.items(), (seen.trace_u, seen.trace_g), strict=True)
    return {name: where(old > 0, old + rate * (new - old), new) for (name, old), new in pairs}


def _alive(traces: Numbers) -> Flag:
    """Whether there has been any curvature above round-off."""
    return (traces["trace_u"] > NO_CURVATURE) & (traces["trace_g"] > NO_CURVATURE)


def _tensors(numbers: Numbers, like: Tensor) -> State:
    """Numbers of matrices as they are kept, ``[..., 1]``."""
    shape = (*like.shape[:-1], 1)
    return {k: v if isinstance(v, Tensor) else like.new_full(shape, v) for k, v in numbers.items()}


@dataclass(frozen=True)
class InverseFree(Rule):
    """INGD and SINGD (adaptive traces) and IKFAC (none): K and C move, nothing is inverted."""

    adaptive: bool
    names = applied = ("K", "C")
    keys = ("K", "C", "m_K", "m_C")
    numbers = (*COUNTS, *NORMS)

    def start(self, structures: Pair, like: Tensor, batch: tuple[int, ...], settings: Settings) -> State:
        state = super().start(structures, like, batch, settings)
        if settings.precond_momentum:
            state |= {f"m_{name}": torch.zeros_like(state[name]) for name in self.names}
        return state

    def check(self, structures: Pair, momentum: float) -> None:
        if momentum and not self.adaptive:
            raise ValueError(_NO_MOMENTUM.format("IKFAC"))

    def statistic(self, factor: Factor, x: Tensor) -> Tensor:
        return curvature(factor, x)

    def takes_gram(self, structure: Structure, n: int) -> bool:
        return structure.gram_first(n)

    def statistic_of_gram(self, factor: Factor, gram: Tensor) -> Tensor:
        return factor.structure.sandwich(factor.entries, gram)

    def squares(self, structures: Pair, kept_for: int) -> tuple[Square, Square]:
        k, c = structures
        return _square(k, c.dim, kept_for), _square(c, k.dim, kept_for)

    def _begun(
        self, state: State, seen: Statistics, traces: Numbers, dampings: Dampings, begins: Flag
    ) -> tuple[State, Statistics]:
        # Until now the factors were the identity, and H was U.
        sizes = [traces[name] + damping for name, damping in zip(TRACES, dampings, strict=True)]
        of_k, of_c = (where(begins, size, 1.0) for size in sizes)
        state = state | {"K": state["K"] * of_k**-0.5, "C": state["C"] * of_c**-0.5}
        k, c = (h._replace(scale=h.scale / size) for h, size in ((seen.k, of_k), (seen.c, of_c)))
        return state, seen._replace(k=k, c=c)

    def _updated(
        self, structures: Pair, state: State, seen: Statistics, settings: Settings, dampings: Dampings
    ) -> Proposal:
        k, c = self.preconditioners(structures, state)
        if self.adaptive:
            damping = dampings[0] * dampings[1] if settings.relative_damping else settings.damping
            directions = ingd(k, c, seen.k, seen.c, damping)
        else:
            directions = ikfac(k, c, seen.k, seen.c, *dampings)
        new: State = {}
        numbers: Numbers = {}
        total = seen.trace_u + seen.trace_g  # of all that is not finite if a part of it is not
        for name, factor, m in zip(self.names, (k, c), directions, strict=True):
            if settings.precond_momentum:
                old = state.get(f"m_{name}", torch.zeros_like(m))
                m = new[f"m_{name}"] = settings.precond_momentum * old + m
            size = numbers[f"norm_m_{name}"] = _size(factor.structure, m, settings)
            new[name] = move(factor, m, bounded_rate(size, settings.precond_lr, settings.max_factor_step))
            total = total + size + number(factor.structure.inner(new[name], new[name]))
        return Proposal(new, numbers, is_finite(total))


def _size(structure: Structure, m: Tensor, settings: Settings) -> Number:
    """|m|₂; a bound from above where that is small enough, if this can be seen without waiting."""
    if is_at_hand(m):
        bound = number(structure.norm_bound(m))
        if not isinstance(bound, Tensor) and not may_be_too_far(
            bound, settings.precond_lr, settings.max_factor_step
        ):
            return bound
    return number(structure.norm(m))


def _square(structure: Structure, columns: int, kept_for: int) -> Square:
    """A Aᵀ takes as long as A times as many columns as it has entries a row, which it saves each time."""
    square = structure.square
    if square is None:
        return InTurn(structure)
    entries_a_row = square.numel / structure.dim
    if entries_a_row < columns * kept_for:
        return square
    return Anew(square) if entries_a_row < columns else InTurn(structure)


class Inverting(Rule):
    """KFAC: S_K and S_C are moving averages, damped and inverted at every update."""

    names = ("S_K", "S_C")
    applied = ("S_K_inverse", "S_C_inverse")
    keys = ("S_K", "S_C", "S_K_inverse", "S_C_inverse")

    def check(self, structures: Pair, momentum: float) -> None:
        for structure in structures:
            if not structure.invertible:
                raise ValueError(
                    f"KFAC inverts its factors and cannot take {structure}: choose 'dense', "
                    "'block_diagonal(k)' or 'diagonal', or IKFAC, which makes the same step without "
                    "inverting, for any structure"
                )
        if momentum:
            raise ValueError(_NO_MOMENTUM.format("KFAC"))

    def start(self, structures: Pair, like: Tensor, batch: tuple[int, ...], settings: Settings) -> State:
        state = super().start(structures, like, batch, settings)
        return state | {f"{name}_inverse": state[name].clone() for name in self.names}

    def statistic(self, factor: Factor, x: Tensor) -> Tensor:
        return factor.structure.gram(x)

    def takes_gram(self, structure: Structure, n: int) -> bool:
        return True

    def statistic_of_gram(self, factor: Factor, gram: Tensor) -> Tensor:
        return gram

    def squares(self, structures: Pair, kept_for: int) -> tuple[Square, Square]:
        return Symmetric(structures[0]), Symmetric(structures[1])

    def _begun(
        self, state: State, seen: Statistics, traces: Numbers, dampings: Dampings, begins: Flag
    ) -> tuple[State, Statistics]:
        sizes = (where(begins, traces[name], 1.0) for name in TRACES)
        return state | {n: state[n] * size for n, size in zip(self.names, sizes, strict=True)}, seen

    def _updated(
        self, structures: Pair, state: State, seen: Statistics, settings: Settings, dampings: Dampings
    ) -> Proposal:
        new: State = {}
        for name, s, u, damping in zip(self.names, structures, (seen.k, seen.c), dampings, strict=True):
            new[name] = moving_average(state[name], u, settings.precond_lr)
            new[f"{name}_inverse"] = damped_inverse(s, new[name], damping)
        found = are_finite(*new.values())
        return Proposal(new, {}, flag(found) & is_finite(seen.trace_u + seen.trace_g))
