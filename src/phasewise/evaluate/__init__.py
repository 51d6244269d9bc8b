"""What a model loses, by length and by position."""

from phasewise.evaluate.loss import Measurement, PositionLoss, measure

__all__ = ["Measurement", "PositionLoss", "measure"]
