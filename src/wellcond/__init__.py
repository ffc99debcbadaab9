"""Well-conditioned transformers: measure, fix and compare the conditioning of embedded tokens."""

from wellcond.attach import (
    ConditionHandle,
    condition_,
    is_conditioned,
    leaks,
    remove_,
)
from wellcond.checkpoint import restore_, save_config, warn_if_forgotten
from wellcond.config import ConditioningConfig
from wellcond.fold import fold_
from wellcond.leak import leak
from wellcond.linalg import condition_number, polar, spectrum
from wellcond.monitor import ConditioningMonitor, Row, measure
from wellcond.static import calibrate_
from wellcond.tokens import TokenConditioner, conditioned_tokens, correction

__version__ = "0.1.0"

__all__ = [
    "ConditionHandle",
    "ConditioningConfig",
    "ConditioningMonitor",
    "Row",
    "TokenConditioner",
    "calibrate_",
    "condition_",
    "condition_number",
    "conditioned_tokens",
    "correction",
    "fold_",
    "is_conditioned",
    "leak",
    "leaks",
    "measure",
    "polar",
    "remove_",
    "restore_",
    "save_config",
    "spectrum",
    "warn_if_forgotten",
]
