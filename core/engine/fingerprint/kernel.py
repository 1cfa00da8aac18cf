"""Multiply bytes by the factors of a fingerprint: exact sums for many blocks at once.

Bytes times factors is a matrix product, (blocks × bytes) · (bytes × 16). Two engines give the same
numbers:

* torch's int8 product with int32 sums, if it is exact on this processor (tested one time with the
  extreme values: some processors add pairs in 16 bits and truncate them);
* numpy's product of float32, exact because every partial sum of 1024 products is an integer below
  2^24.

A device (``core.engine.device.device``) also multiplies float32. Bytes and factors are exact in
TF32 and bfloat16 too, so that its sums are exact whatever its matrix units do, as long as they add
in float32.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

from core.engine.device.device import FINGERPRINT, Device
from core.engine.device.lane import Kernel, Lane, lane_of
from core.engine.fingerprint.definition import LANES, PRIME, TABLE

Array = Any
"""A numpy array: bytes as int8, sums and block numbers as int64."""

TORCH_BYTES = 64 << 20
"""Amount of data from which importing torch is worth its time."""
_EXACT_TERMS = 1024
"""Number of products of byte and factor that float32 adds exactly: 1024 · 128 · 127 < 2^24."""
_FEW = 32
"""Average number of blocks with the same upper digits from which each such run is added alone."""
_SAFE_TERMS = 32
"""Number of products of a block's sum (26 bits) and a weight (31 bits) that int64 can add."""


class Products(Protocol):
    """An engine that multiplies bytes by factors."""

    def __call__(self, data: Array, first: int) -> Array:
        """Return the sum over j of ``data[m, j] * factors[first + j, :]`` for every row m.

        Args:
            data: (rows, bytes), int8.
            first: position in the block of the first byte of each row.

        Returns:
            (rows, 16), int64.
        """


@cache
def _tables() -> tuple[Array, tuple[Array, ...]]:
    """Return the factors of bytes and those of block numbers' digits, (4096, 16) each."""
    import numpy as np

    # SplitMix64 with seed 0: its state is a counter, so that all outputs are computed at once.
    number: Array = np.arange(1, 4 * TABLE * LANES + 1, dtype=np.uint64)
    z = number * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    z = (z ^ z >> np.uint64(31)).reshape(4, TABLE, LANES)

    # Odd factors -127 … 127 for bytes, and 1 … p - 1 for the three digits of a block's number.
    small = (2 * (z[0] >> np.uint64(57)).astype(np.int16) - 127).astype(np.int8)
    digits = 1 + (z[1:] % np.uint64(PRIME - 1)).astype(np.int64)
    return small, tuple(digits)


@cache
def _floats() -> Array:
    """Return the factors of bytes as float32."""
    import numpy as np

    return _tables()[0].astype(np.float32)


def products_in_numpy(data: Array, first: int) -> Array:
    """Multiply by numpy's product of float32 (see ``Products``)."""
    import numpy as np

    sums = np.zeros((data.shape[0], LANES), np.int64)
    for start in range(0, data.shape[1], _EXACT_TERMS):
        part = data[:, start : start + _EXACT_TERMS].astype(np.float32)
        sums += (part @ _floats()[first + start : first + start + part.shape[1]]).astype(np.int64)
    return sums


def products_in_torch(data: Array, first: int) -> Array:
    """Multiply by torch's int8 product on one processor core (see ``Products``)."""
    import numpy as np
    import torch

    # Every copying thread works on one core; with OpenMP the setting belongs to the thread.
    if getattr(_of_thread, "torch_threads", None) != 1:
        torch.set_num_threads(1)
        _of_thread.torch_threads = 1
    factors = _torch_factors()[first : first + data.shape[1]]
    return torch._int_mm(torch.from_numpy(data), factors).numpy().astype(np.int64)


_of_thread = threading.local()


@cache
def _torch_factors() -> Any:
    """Return the factors of bytes as a torch tensor."""
    import torch

    return torch.from_numpy(_tables()[0].copy())


@cache
def _is_exact_in_torch() -> bool:
    """Return whether torch has an int8 product that is exact, even for the largest sums."""
    import numpy as np

    try:
        import torch
    except ImportError:
        return False
    if not hasattr(torch, "_int_mm"):
        return False

    # Rows with the largest sums of either sign, and ranges with odd starts and lengths.
    lowest: Array = np.full((33, TABLE), -128, np.int8)
    signs = np.where(_tables()[0][:, 0] > 0, np.int8(127), np.int8(-128))[None, :].repeat(
        17, axis=0
    )
    try:
        return all(
            bool(
                (
                    products_in_torch(data[:, :n], first) == products_in_numpy(data[:, :n], first)
                ).all()
            )
            for data in (lowest, signs)
            for first, n in ((0, TABLE), (0, 1), (5, 1000), (TABLE - 96, 96))
        )
    except (RuntimeError, NotImplementedError):
        # This build of torch lacks the product for this processor.
        return False


def products_on(device: Device) -> Products:
    """Return an engine that multiplies on a device, in the calling thread's lane."""

    def products(data: Array, first: int) -> Array:
        import numpy as np

        lane = lane_of(device)
        factors = factors_on(lane)
        flat: Array = np.ascontiguousarray(data).reshape(-1)
        width = data.shape[1]
        kernel = products_kernel(factors, first, width)

        # The lane may divide the rows; the results are raw bytes.
        parts = list(lane.map_pieces((memoryview(flat).cast("B"),), kernel, size=width))
        sums: Array = (parts[0] if len(parts) == 1 else np.concatenate(parts)).view(np.int32)
        return sums.reshape(-1, LANES).astype(np.int64)

    return products


def factors_on(lane: Lane) -> Any:
    """Return the factors of bytes as a float32 tensor on the device."""
    return lane.load_table("factors of bytes", _floats)


def products_kernel(factors: Any, first: int, width: int) -> Kernel:
    """Return a kernel that multiplies rows of bytes by factors.

    Args:
        factors: from ``factors_on``.
        first: position in the block of the first byte of each row.
        width: bytes of a row.
    """

    def kernel(data: Any) -> Any:
        import torch

        rows = data.view(torch.int8).view(-1, width).to(torch.float32)
        sums = torch.zeros((len(rows), LANES), dtype=torch.int32, device=data.device)
        for start in range(0, width, _EXACT_TERMS):
            part = rows[:, start : start + _EXACT_TERMS]
            sums += (part @ factors[first + start : first + start + part.shape[1]]).to(torch.int32)
        return sums

    return kernel


@contextmanager
def fastest_products(n_bytes: int, device: Device | None = None) -> Iterator[Products]:
    """Yield the fastest engine for an amount of data; torch's thread count is restored afterwards.

    Args:
        n_bytes: amount of data.
        device: used if fingerprints are among its work.
    """
    if device is not None and device.does(FINGERPRINT):
        yield products_on(device)
        return

    # Importing torch takes longer than fingerprints of a little data in numpy.
    if n_bytes < TORCH_BYTES and "torch" not in sys.modules:
        yield products_in_numpy
        return
    try:
        import torch
    except ImportError:
        yield products_in_numpy
        return
    n_threads = int(torch.get_num_threads())
    if not _is_exact_in_torch():
        yield products_in_numpy
        return
    try:
        yield products_in_torch
    finally:
        torch.set_num_threads(n_threads)
        _of_thread.torch_threads = None


def weigh_blocks(sums: Array, blocks: range | Array) -> Array:
    """Multiply the sums of blocks by the blocks' weights, and add them up.

    Args:
        sums: sums of the blocks, (blocks, 16).
        blocks: numbers of the blocks; a range has step 1.

    Returns:
        16 numbers below p.
    """
    import numpy as np

    low, middle, high = _tables()[1]
    total: Array = np.zeros(LANES, np.int64)

    # Consecutive blocks share the upper digits of their numbers for up to TABLE blocks.
    if isinstance(blocks, range):
        start = blocks.start
        while start < blocks.stop:
            upper, first = divmod(start, TABLE)
            n = min(TABLE - first, blocks.stop - start)
            part = _dot(sums[start - blocks.start :][:n], low[first : first + n])
            total += part * (middle[upper % TABLE] * high[upper // TABLE] % PRIME) % PRIME
            start += n
        return total % PRIME
    if not len(blocks):
        return total

    # Other blocks: if few share their upper digits, compute the weight of each block.
    upper_digits = blocks // TABLE
    low_digits = blocks - upper_digits * TABLE
    borders: Array = np.flatnonzero(np.diff(upper_digits)) + 1
    if len(borders) * _FEW > len(blocks):
        weights = low[low_digits] * middle[upper_digits % TABLE] % PRIME
        return _dot(sums, weights * high[upper_digits // TABLE] % PRIME)

    # Otherwise add up each run with the same upper digits, then multiply by their factors.
    for start, stop in zip((0, *borders), (*borders, len(blocks)), strict=True):
        upper = int(upper_digits[start])
        part = _dot(sums[start:stop], low[low_digits[start:stop]])
        total += part * (middle[upper % TABLE] * high[upper // TABLE] % PRIME) % PRIME
    return total % PRIME


def _dot(sums: Array, weights: Array) -> Array:
    """Return Σ sums · weights mod p, per lane, without overflow of int64."""
    terms = sums * weights
    n_groups = len(terms) // _SAFE_TERMS
    n_grouped = n_groups * _SAFE_TERMS
    total: Array = terms[n_grouped:].sum(axis=0) % PRIME
    # Any terms may be added together; numpy is fastest if they are far apart.
    if n_grouped:
        groups = terms[:n_grouped].reshape(_SAFE_TERMS, -1).sum(axis=0) % PRIME
        total = (total + groups.reshape(n_groups, LANES).sum(axis=0)) % PRIME
    return total
