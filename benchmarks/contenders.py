"""The optimizers that are compared: ingot's, torch's own, and those of other packages if installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

import torch
from torch import nn

import ingot
from ingot.lab import peers
from ingot.stability import SETTLED_STEPS

# So small that nothing diverges in a few hundred steps on random labels: times do not depend on the learning
# rate, but they do on infinities and denormal numbers.
LR = 1e-4

TIME_REFERENCE, STATE_REFERENCE = "SGD momentum", "AdamW"

PEERS = ("singd", "pytorch_optimizer", "heavyball")
"""Packages that are measured if they are installed."""

OFFICIAL_NAMES: Mapping[str, str] = {
    "dense": "dense",
    "diagonal": "diagonal",
    "block_diagonal(30)": "block30diagonal",
    "hierarchical(15,15)": "hierarchical15_15",
    "tril_toeplitz": "triltoeplitz",
    "triu_toeplitz": "triutoeplitz",
}
"""Ingot's text for each structure of the official package, and the official name of it."""

DEFAULTS = "ingot SINGD, defaults"
"""The title of SINGD as it comes."""

DEFAULT_EVERY = 20
"""How often factors are updated by default, once their warm-up is over."""


Steps: TypeAlias = torch.optim.Optimizer
Maker: TypeAlias = Callable[[nn.Module], Steps]


@dataclass(frozen=True)
class Contender:
    """An optimizer as it is measured.

    Attributes:
        title: Its name in the report.
        make: Makes it for a model.
        package: Where it comes from.
        structure: Its factors' structure in ingot's words, if it has any.
        every: Steps between updates of its factors, if there are such: T.
        splits: Whether steps 0, T, 2 T, ... are those with an update, so that their times can be told apart.
        reported: The T to report, by weighing both kinds of steps, where it is not ``every`` alone.
        slow: Whether it takes part in the first rounds only, with just one interval in each.
        warmup: How many iterations pass before any is measured. By default one with an update of the factors
            and one without: allocations are made by then. Ours take the usual steps only once the first ones
            have shown what is usual.
    """

    title: str
    make: Maker
    package: str = "torch"
    structure: str = ""
    every: int | None = None
    splits: bool = False
    reported: tuple[int, ...] = ()
    slow: bool = False
    warmup: int = 2


def peer_versions() -> dict[str, str | None]:
    """The version of each peer, None where it is not installed."""
    found: dict[str, str | None] = {}
    for package in PEERS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def contenders(intervals: Sequence[int], per_token: bool, only: Sequence[str] = ()) -> list[Contender]:
    """Every optimizer that can be measured here, once for each interval T between updates where it has one.

    ``only`` takes those whose title contains one of these texts, and the references.
    """
    installed = {name for name, found in peer_versions().items() if found}
    longest = max(intervals)
    found = [*_first_order()]
    if "pytorch_optimizer" in installed:
        for name, make in (("SOAP", _soap), ("Shampoo", _shampoo)):
            title = f"{name} of pytorch_optimizer"
            found.append(Contender(title, partial(make, longest), "pytorch_optimizer", every=longest))
    if "heavyball" in installed:
        found.append(Contender("PSGD of heavyball", partial(_psgd, longest), "heavyball", every=longest))
    if "singd" in installed:
        found += _official_ones(intervals, per_token)
    found += [replace(c, warmup=SETTLED_STEPS + 2) for c in _ours(intervals, per_token)]
    references = (TIME_REFERENCE, STATE_REFERENCE)
    return [c for c in found if not only or c.title in references or any(text in c.title for text in only)]


# --- Ours -------------------------------------------------------------------------------------------------


def _ours(intervals: Sequence[int], per_token: bool) -> Iterator[Contender]:
    """As users have them, and as in the paper. The warm-up is off: it updates the factors at every step."""
    average = "token" if per_token else "batch"
    as_it_comes: Maker = partial(ingot.SINGD, lr=LR, loss_average=average, precond_warmup=0)
    structure = ingot.SINGD.default_structure
    yield Contender(DEFAULTS, as_it_comes, "ingot, defaults", structure, DEFAULT_EVERY, splits=True)
    for every in intervals:
        common: dict[str, Any] = {"lr": LR, "precond_every": every, "loss_average": average}
        for structure in OFFICIAL_NAMES:
            # Dense factors take more memory than AdamW's state anyway, so their products may be kept, too.
            kept = True if structure == "dense" else None
            settings = common | {"cache_products": kept, "precond_warmup": 0}
            as_users: Maker = partial(ingot.SINGD, structure=structure, **settings)
            yield Contender(f"ingot SINGD {structure}", as_users, "ingot", structure, every, splits=True)
        if every == max(intervals):
            yield _compiled(common)
        for structure in ("diagonal", "dense"):
            kept = True if structure == "dense" else None
            as_in_paper: Maker = partial(
                ingot.SINGD, structure=structure, cache_products=kept, **common, **ingot.PAPER
            )
            title = f"ingot SINGD {structure}, paper's settings"
            yield Contender(title, as_in_paper, "ingot, paper's settings", structure, every, splits=True)
    for kind in (ingot.IKFAC, ingot.KFAC):  # INGD is SINGD with dense factors
        make: Maker = partial(kind, structure="dense", precond_warmup=0, **common)
        title = f"ingot {kind.__name__} dense"
        yield Contender(title, make, f"ingot {kind.__name__}", "dense", every, splits=True)


def _compiled(settings: dict[str, Any]) -> Contender:
    make: Maker = partial(ingot.SINGD, structure="diagonal", precond_warmup=0, compile=True, **settings)
    return Contender(
        "ingot SINGD diagonal, compiled",
        make,
        "ingot, compiled",
        "diagonal",
        settings["precond_every"],
        splits=True,
    )


# --- Peers ------------------------------------------------------------------------------------------------


def _first_order() -> Iterator[Contender]:
    yield Contender(TIME_REFERENCE, lambda model: torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9))
    yield Contender(STATE_REFERENCE, lambda model: torch.optim.AdamW(model.parameters(), lr=LR))
    yield Contender("AdamW fused", lambda model: torch.optim.AdamW(model.parameters(), lr=LR, fused=True))
    if hasattr(torch.optim, "Muon"):
        # Its products are in bfloat16, for which a processor may have no instructions.
        yield Contender("Muon", _muon, slow=True)


def _muon(model: nn.Module) -> Steps:
    return peers.muon(model, lr=LR)


def _official_ones(intervals: Sequence[int], per_token: bool) -> Iterator[Contender]:
    """The official SINGD in all its structures. Toeplitz is so slow that one short run serves every T."""
    for structure, name in OFFICIAL_NAMES.items():
        title = f"official singd {name}"
        if "toeplitz" in structure:
            make = partial(_official, name, 2, per_token)
            reported = tuple(intervals)
            yield Contender(title, make, "singd", structure, 2, splits=True, reported=reported, slow=True)
        else:
            for every in intervals:
                make = partial(_official, name, every, per_token)
                yield Contender(title, make, "singd", structure, every, splits=True)


def _official(structure: str, every: int, per_token: bool, model: nn.Module) -> Steps:
    average = "batch+sequence" if per_token else "batch"
    settings = {"weight_decay": 1e-2, "alpha1": 0.0, "lr_cov": 1e-3, "T": every, "loss_average": average}
    return peers.official_singd(model, lr=LR, structure=structure, **settings)


def _soap(every: int, model: nn.Module) -> Steps:
    return peers.soap(model, lr=LR, precondition_frequency=every)


def _shampoo(every: int, model: nn.Module) -> Steps:
    return peers.shampoo(model, lr=LR, preconditioning_compute_steps=every)


def _psgd(every: int, model: nn.Module) -> Steps:
    heavyball = peers.quietly("heavyball")
    heavyball.utils.compile_mode = None  # like all others: compiling one model's step took minutes
    return heavyball.PSGDKron(model.parameters(), lr=LR, preconditioner_update_probability=1 / every)
