"""Combine CRCs of parts into the CRC of the whole, for any polynomial.

All CRCs here are of the usual kind: bits reflected, all bits set at the start and inverted at the
end.

Source: zlib's ``crc32_combine`` (multiplication by x^(8n) modulo the polynomial); the polynomials
of the catalogue of parametrised CRC algorithms (CRC-32/ISO-HDLC, CRC-32/ISCSI, CRC-64/NVME).
"""

from __future__ import annotations

from functools import lru_cache

from core.values import dataclass


@dataclass(frozen=True, slots=True)
class Crc:
    """A kind of CRC.

    Args:
        polynomial: without its highest power, bits reflected.
        width: number of bits.
    """

    polynomial: int
    width: int

    def combine(self, first: int, second: int, n_second: int) -> int:
        """Compute the CRC of two concatenated byte strings from their CRCs.

        Args:
            first, second: the CRC of each string.
            n_second: length of the second string, in bytes.
        """
        return self._multiply(_power(self, n_second), first) ^ second

    def _multiply(self, a: int, b: int) -> int:
        """Multiply two polynomials modulo the CRC's; the highest bit is x^0."""
        # For each power of x in ``a``, add ``b`` times that power.
        product = 0
        bit = 1 << (self.width - 1)
        while a:
            if a & bit:
                product ^= b
                a ^= bit
            bit >>= 1
            # Times x: the highest power overflows into the polynomial.
            b = (b >> 1) ^ self.polynomial if b & 1 else b >> 1
        return product


CRC32 = Crc(0xEDB88320, 32)
CRC32C = Crc(0x82F63B78, 32)
CRC64_NVME = Crc(0x9A6C9329AC4BC9B5, 64)


@lru_cache(maxsize=4096)
def _power(crc: Crc, n_bytes: int) -> int:
    """Compute x^(8 * n_bytes) modulo the polynomial."""
    power = 1 << (crc.width - 1)
    square = 1 << (crc.width - 9)  # x^8
    # Square and multiply.
    while n_bytes:
        if n_bytes & 1:
            power = crc._multiply(power, square)
        square = crc._multiply(square, square)
        n_bytes >>= 1
    return power
