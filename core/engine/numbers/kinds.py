"""Table of the bit patterns of floating-point types that are not finite.

A pattern is taken as an integer of the type's width. In types with a sign bit and IEEE 754's order
of magnitudes, it is not finite if its magnitude (all bits but the sign) is at least ``first``:
``first`` itself is infinity if the type has infinities, and everything above is NaN.

=================  ==========  ==========================================
type               first       remark
=================  ==========  ==========================================
float64            7ff0 …
float32            7f800000
float16            7c00
bfloat16           7f80
float8_e5m2        7c
float8_e4m3fn      7f          no infinities: 7f and ff are NaN
float8_e4m3fnuz    –           only 80 is NaN
float8_e5m2fnuz    –           only 80 is NaN
float8_e8m0fnu     –           no sign; only ff is NaN
float8_e3m4        70
float8_e4m3b11fnuz –           only 80 is NaN
=================  ==========  ==========================================

Complex numbers are two of float64, float32 or float16. ``float4_e2m1fn`` and its packed form have
neither NaN nor infinity.

Source: IEEE 754-2019; OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats 1.0;
ml_dtypes 0.6 for the ``fnuz`` types.
"""

from __future__ import annotations

from core.values import dataclass


@dataclass(frozen=True, slots=True)
class NumberKind:
    """A floating-point type, or the type of the parts of a complex one.

    Args:
        n_bytes: bytes of one number.
        first: the smallest magnitude that is not finite; None where a single pattern is NaN.
        has_infinity: ``first`` is infinity.
        nan: the only pattern that is NaN, where ``first`` is None.
        n_parts: numbers in an element.
        huge: the magnitude of 2¹⁰⁰, where the type has such numbers: no weight is so large, but a
            flipped bit of the exponent makes one.
    """

    n_bytes: int
    first: int | None
    has_infinity: bool = True
    nan: int | None = None
    n_parts: int = 1
    huge: int | None = None


KINDS = {
    "float64": NumberKind(8, 0x7FF0 << 48, huge=(1023 + 100) << 52),
    "float32": NumberKind(4, 0x7F80_0000, huge=(127 + 100) << 23),
    "float16": NumberKind(2, 0x7C00),
    "bfloat16": NumberKind(2, 0x7F80, huge=(127 + 100) << 7),
    "float8_e5m2": NumberKind(1, 0x7C),
    "float8_e4m3fn": NumberKind(1, 0x7F, has_infinity=False),
    "float8_e4m3fnuz": NumberKind(1, None, nan=0x80),
    "float8_e5m2fnuz": NumberKind(1, None, nan=0x80),
    "float8_e8m0fnu": NumberKind(1, None, nan=0xFF),
    "float8_e3m4": NumberKind(1, 0x70),
    "float8_e4m3b11fnuz": NumberKind(1, None, nan=0x80),
    "complex128": NumberKind(8, 0x7FF0 << 48, n_parts=2, huge=(1023 + 100) << 52),
    "complex64": NumberKind(4, 0x7F80_0000, n_parts=2, huge=(127 + 100) << 23),
    "complex32": NumberKind(2, 0x7C00, n_parts=2),
}
"""Floating-point types by canonical dtype name; types that are not listed are always finite."""
