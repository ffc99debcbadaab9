"""Well-conditioned transformers: measure, fix and compare the conditioning of embedded tokens."""

from wellcond.attach import (
    ConditionHandle,
    condition_,
    is_conditioned,
    remove_,
    restore_,
    save_config,
)
from wellcond.config import ConditioningConfig
from wellcond.linalg import condition_number, polar, spectrum
from wellcond.monitor import ConditioningMonitor, Row, measure
from wellcond.tokens import TokenConditioner, conditioned_tokens, correction

__version__ = "0.1.0"

__all__ = [
    "ConditionHandle",
    "ConditioningConfig",
    "ConditioningMonitor",
    "Row",
    "TokenConditioner",
    "condition_",
    "condition_number",
    "conditioned_tokens",
    "correction",
    "is_conditioned",
    "measure",
    "polar",
    "remove_",
    "restore_",
    "save_config",
    "spectrum",
]
