"""Condition numbers of tokens and attention, once or during training."""

from wellcond.monitor.measuring import measure
from wellcond.monitor.rows import Row
from wellcond.monitor.schedule import ConditioningMonitor
from wellcond.monitor.sinks import JsonLines, append_lines, read_lines

__all__ = ["ConditioningMonitor", "JsonLines", "Row", "append_lines", "measure", "read_lines"]
