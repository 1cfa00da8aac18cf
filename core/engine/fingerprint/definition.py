"""Define fp1, a fingerprint of 16 numbers for a tensor's content, however the tensor is stored.

A fingerprint belongs to a *canonical* tensor (``core.opening.canonical``: global, one layer, one
expert, no padding rows). It is a sum over the tensor's bytes in which every byte has its own
weight, so that every part of the tensor contributes independently: rank files, chunks of any shape
and any order of reading give the same sum. Two tensors are considered equal if their dtype, shape
and fingerprint are equal.

Definition of ``fp1``. The tensor's elements are little-endian bytes in C order; each byte is read
as a signed number x, -128 … 127. Everything else is integer arithmetic.

* *Rows.* Trailing axes are joined, from the last on, until they have at least 512 bytes (or until
  no axis remains). The result is a row of R bytes; the other axes number the rows, r = 0, 1, … in C
  order.
* *Blocks.* Rows are cut into blocks of B bytes, where B is the largest divisor of R that is at most
  4096; if that is below 512 and R above 4096, B is 4096 and the last block of each row is shorter.
  Block q of a row's Q blocks has number b = r·Q + q.
* *Lanes.* There are 16, l = 0 … 15, each with its own factors. p is the prime 2^31 - 1.

      sum of a block     S(l, b) = Σ_j  x_j · f(0, j, l)      j = 0 … B-1, the position in the block
      weight of a block  W(l, b) = f(1, b mod 4096, l) · f(2, ⌊b/4096⌋ mod 4096, l)
                                   · f(3, ⌊b/4096²⌋, l)  mod p
      fingerprint        F(l)    = Σ_b  S(l, b) · W(l, b)  mod p

* *Factors.* z is output number ((4096·k + i)·16 + l) of SplitMix64 with seed 0, counted from 0.
  f(0, i, l) is 2·⌊z / 2^57⌋ - 127: odd, -127 … 127. f(k, i, l) for k = 1, 2, 3 is 1 + z mod
  (p - 1): never 0.
* *Text.* The 16 numbers, lane 0 first, eight hexadecimal digits each.

Zeros add nothing, so padding does not matter; an empty tensor has sixteen zeros. Tensors of more
than 2^36 blocks have no fingerprint.

Strength. A change of one byte is always detected: the difference, the factor and the weight are
not multiples of p. For any other two tensors that were chosen independently of the factors, and
factors that are practically independent and uniform: in a lane, the sums of all blocks agree with
probability at most 1/128, and if they do not, the weighted sum vanishes for at most 3 / (p - 1) of
the weights (it is a polynomial of degree 3 in them). The fingerprints of different tensors are
therefore equal with probability below (1/128 + 3·2^-31)^16, about 2^-112. The factors are public:
anyone can construct two tensors with the same fingerprint. It is neither a cryptographic hash nor a
signature.

Source: written for this toolkit; SplitMix64 as in java.util.SplittableRandom; the vanishing
polynomial is the lemma of Schwartz and Zippel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from core.arrays.box import Shape
from core.errors import UnsupportedError
from core.values import dataclass

SCHEME = "fp1"
"""Name of the definition; a changed definition needs a new name."""
LANES = 16
PRIME = (1 << 31) - 1
TABLE = 4096
"""Number of factors in a table, a power of two; also the maximum bytes of a block."""
LEAST_BYTES = 512
"""Minimum bytes of a row, if there are axes to join, and of a block, if it can divide a row."""
_TEXT_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Fingerprint of a canonical tensor.

    Args:
        dtype: canonical dtype name.
        shape: in elements.
        text: the 16 numbers as ``format_lanes`` writes them.
    """

    dtype: str
    shape: Shape
    text: str


@dataclass(frozen=True, slots=True)
class Form:
    """Division of a tensor into rows and blocks.

    Args:
        n_rows: number of rows of the tensor.
        row_bytes: bytes of a row.
        block_bytes: bytes of a block.
        n_outer: number of axes that number the rows; the axes after them are joined to rows.
    """

    n_rows: int
    row_bytes: int
    block_bytes: int
    n_outer: int

    @property
    def n_blocks(self) -> int:
        """Blocks per row."""
        return -(-self.row_bytes // self.block_bytes)

    @property
    def n_bytes(self) -> int:
        """Total bytes of the tensor."""
        return self.n_rows * self.row_bytes


def form_of(shape: Shape, itemsize: int) -> Form:
    """Divide a tensor into rows and blocks.

    Args:
        shape: shape of the tensor, in elements.
        itemsize: bytes of an element.

    Raises:
        UnsupportedError: the tensor has more than 2^36 blocks.
    """
    # Join trailing axes to rows, see the definition above.
    row_bytes, n_outer = itemsize, len(shape)
    while n_outer and row_bytes < LEAST_BYTES:
        n_outer -= 1
        row_bytes *= shape[n_outer]

    # Prefer blocks that divide a row: then all of them have the same length.
    if row_bytes <= TABLE:
        block_bytes = max(row_bytes, 1)
    else:
        divisors = (n for n in range(TABLE, LEAST_BYTES - 1, -1) if row_bytes % n == 0)
        block_bytes = next(divisors, TABLE)
    form = Form(prod(shape[:n_outer]), row_bytes, block_bytes, n_outer)
    if form.n_rows * form.n_blocks > TABLE**3:
        raise UnsupportedError(f"a tensor of {form.n_bytes:,} bytes is too large to fingerprint")
    return form


def format_lanes(lanes: Sequence[int]) -> str:
    """Return the 16 numbers of a fingerprint as text, as in manifests."""
    return "".join(f"{lane % PRIME:0{_TEXT_DIGITS}x}" for lane in lanes)


def parse_lanes(text: str) -> tuple[int, ...]:
    """Parse the text of a fingerprint that ``format_lanes`` wrote.

    Raises:
        ValueError: the text is not a fingerprint.
    """
    if len(text) != LANES * _TEXT_DIGITS or set(text) - set("0123456789abcdef"):
        raise ValueError(f"{text[:160]!r} is not a fingerprint")
    lanes = tuple(
        int(text[start : start + _TEXT_DIGITS], 16) for start in range(0, len(text), _TEXT_DIGITS)
    )
    if max(lanes) >= PRIME:
        raise ValueError(f"{text!r} is not a fingerprint")
    return lanes


def add_lanes(parts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the sum of the contributions of disjoint parts: the numbers of their union."""
    total = [0] * LANES
    for part in parts:
        total = [(a + b) % PRIME for a, b in zip(total, part, strict=True)]
    return tuple(total)
