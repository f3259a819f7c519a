"""Weights in fewer bits. Importing this room registers every kind."""

from labkit.quant.linear import Int4Linear, Int8Linear, PackedEmbedding, PackedLinear
from labkit.quant.rtn import W8A8, Int4, Int8
from labkit.quant.size import predict_nbytes

__all__ = ["W8A8", "Int4", "Int4Linear", "Int8", "Int8Linear", "PackedEmbedding", "PackedLinear", "predict_nbytes"]
