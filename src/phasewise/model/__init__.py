"""A plain decoder for every encoding: its config, its cache, generation, and models on disk."""

from phasewise.model.cache import Cache
from phasewise.model.config import ModelConfig
from phasewise.model.generate import generate
from phasewise.model.transformer import Transformer, rescaled

__all__ = ["Cache", "ModelConfig", "Transformer", "generate", "rescaled"]
