"""What a model loses, by length and by position, and whether it finds what it was told far back."""

from phasewise.evaluate.loss import Measurement, PositionLoss, measure
from phasewise.evaluate.retrieval import Needle, Retrieval, RetrievalCell, passkeys, retrieve
from phasewise.evaluate.score import TaskScore

__all__ = [
    "Measurement",
    "Needle",
    "PositionLoss",
    "Retrieval",
    "RetrievalCell",
    "TaskScore",
    "measure",
    "passkeys",
    "retrieve",
]
