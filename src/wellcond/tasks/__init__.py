"""What a batch means: how a model is called, what is minimised, what is scored. One file for each kind of task."""

from wellcond.tasks.detection import Detection
from wellcond.tasks.images import ImageClassification, Mixing
from wellcond.tasks.language import CausalLanguageModel
from wellcond.tasks.task import Illustrated, Means, Metric, Scored, Scorer, Task

__all__ = [
    "CausalLanguageModel",
    "Detection",
    "Illustrated",
    "ImageClassification",
    "Means",
    "Metric",
    "Mixing",
    "Scored",
    "Scorer",
    "Task",
]
