"""The number formats of the release: codecs, block quantisers, packing, error measures."""

from labkit.numerics.blocks import (
    FORMATS,
    Quantized,
    Rounding,
    dequantize,
    fake_quantize,
    quantize,
    rounds,
)
from labkit.numerics.errors import max_error, relative_rms, sqnr_db
from labkit.numerics.packing import Packed, pack, packed_bytes, unpack

__all__ = [
    "FORMATS", "Packed", "Quantized", "Rounding", "dequantize", "fake_quantize", "max_error",
    "pack", "packed_bytes", "quantize", "relative_rms", "rounds", "sqnr_db", "unpack",
]
