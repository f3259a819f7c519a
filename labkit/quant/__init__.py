"""Weights in fewer bits. Importing this room registers every kind."""

from labkit.quant.calibrated import AWQ, GPTQ
from labkit.quant.format import WeightFormat, form_of, format_of
from labkit.quant.grid import Grid, Groups
from labkit.quant.grouped import GroupLinear
from labkit.quant.linear import Int4Linear, Int8Linear, PackedEmbedding, PackedLinear
from labkit.quant.rtn import RTN, W8A8, Int2, Int3, Int4, Int8
from labkit.quant.size import predict_nbytes
from labkit.quant.stored import Packed, Stored, StoredLinear

__all__ = [
    "AWQ",
    "GPTQ",
    "RTN",
    "W8A8",
    "Grid",
    "GroupLinear",
    "Groups",
    "Int2",
    "Int3",
    "Int4",
    "Int4Linear",
    "Int8",
    "Int8Linear",
    "Packed",
    "PackedEmbedding",
    "PackedLinear",
    "Stored",
    "StoredLinear",
    "WeightFormat",
    "form_of",
    "format_of",
    "predict_nbytes",
]
