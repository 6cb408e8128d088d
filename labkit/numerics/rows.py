"""How one vector of the cache lies in memory: a row of bytes, or of numbers.

    form     a row of width n                                  flash: KV + index key, an entry
    packed   the codes of its recipe, then its scales                    288 + 68 =   356 B
    fp8      E4M3 codes, then UE8M0 scales (block 32)                    528 + 132 =  660 B
    bf16     the rounded values in bf16                                1,024 + 256 = 1,280 B
    plain    the values in the model's dtype

`packed` loses nothing against quantise-dequantise: it is what the recipe says. `bf16` neither,
since an FP4 or FP8 value times its scale has at most 6 significant bits. `fp8` rounds compressed
KV once more (an FP4 code times an E4M3 scale does not fit E4M3). Only `plain` can hold values
that were not rounded, and only its rows carry gradients.
"""

from __future__ import annotations

import torch

from labkit.errors import InputError
from labkit.numerics.blocks import block_format, dequantize, fake_quantize, quantize
from labkit.numerics.packing import Packed, pack, packed_bytes, unpack

FORMS = ("packed", "fp8", "bf16", "plain")


class RowCodec:
    """Vectors [..., width] to rows [..., columns] of `row_dtype`, and back.

    recipe    "fp8", "mxfp4" or "nvfp4": how the model rounds these vectors
    form      one of `FORMS`
    dtype     of the vectors
    rounding  False: cache rounding is off, which only `plain` can hold
    InputError for an unknown form, a form that cannot hold the values, a width off the block.
    """

    def __init__(self, width: int, recipe: str, form: str, dtype: torch.dtype,
                 rounding: bool = True) -> None:
        if form not in FORMS:
            raise InputError(f"cache form is {form!r}: choose one of {', '.join(FORMS)}")
        if not rounding and form != "plain":
            raise InputError(f"cache form is {form!r} while cache rounding is off: values that "
                             "were not rounded fit the form 'plain' only")
        self.width, self.recipe, self.form, self.dtype = width, recipe, form, dtype
        self.rounding = rounding
        self.stored = "fp8" if form == "fp8" else recipe  # the recipe of what is written
        if form in ("packed", "fp8"):
            self.row_dtype, self.columns = torch.uint8, packed_bytes(width, self.stored)
            self._data = self.columns - width // block_format(self.stored).block
        else:
            self.row_dtype = torch.bfloat16 if form == "bf16" else dtype
            self.columns = width

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return self.columns * self.row_dtype.itemsize

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors as computed, not rounded yet [..., width] -> rows [..., columns]."""
        if self.stored != self.recipe or self.form == "bf16":
            x = fake_quantize(x, self.recipe)
        if self.form == "plain":
            return fake_quantize(x, self.recipe) if self.rounding else x
        if self.form == "bf16":
            return x.to(torch.bfloat16)
        packed = pack(quantize(x.detach(), self.stored))
        return torch.cat([packed.data, packed.scales], dim=-1)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [..., columns] -> the rounded vectors [..., width] in `dtype`."""
        if self.form in ("plain", "bf16"):
            return rows.to(self.dtype)
        data, scales = rows[..., : self._data], rows[..., self._data :]
        return dequantize(unpack(Packed(data, scales, self.stored, self.dtype)))
