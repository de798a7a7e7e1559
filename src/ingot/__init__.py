"""ingot: inverse-free natural-gradient optimizers for PyTorch."""

from ingot import layers, rules, structures
from ingot.health import HealthWarning
from ingot.optimizer import IKFAC, INGD, KFAC, PAPER, SINGD, NaturalGradient

__version__ = "0.1.0"

__all__ = [
    "IKFAC",
    "INGD",
    "KFAC",
    "PAPER",
    "SINGD",
    "HealthWarning",
    "NaturalGradient",
    "__version__",
    "layers",
    "rules",
    "structures",
]
