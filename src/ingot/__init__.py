"""ingot: inverse-free natural-gradient optimizers for PyTorch."""

from ingot import layers, rules, structures
from ingot.health import HealthWarning
from ingot.optimizer import IKFAC, INGD, KFAC, PAPER, SINGD, NaturalGradient
from ingot.planning import Plan, plan

__version__ = "0.1.0"

__all__ = [
    "IKFAC",
    "INGD",
    "KFAC",
    "PAPER",
    "SINGD",
    "HealthWarning",
    "NaturalGradient",
    "Plan",
    "__version__",
    "layers",
    "plan",
    "rules",
    "structures",
]
