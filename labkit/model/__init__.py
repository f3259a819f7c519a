"""The model: embedding, rotary positions, attention, FFN.

One legend for shapes everywhere in labkit:

    B batch    T queries (new tokens)    S keys (stored tokens)
    H query heads    G KV heads    D head width    M model width    V vocabulary
"""

from labkit.model.config import ModelConfig
from labkit.model.model import Model
from labkit.model.transformer import Transformer

__all__ = ["Model", "ModelConfig", "Transformer"]
