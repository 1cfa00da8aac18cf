"""Consecutive items, a batch of them at a time, so that what they stand for fits in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

BATCH_BYTES = 512 << 20
"""About how many bytes of tensors pass through host memory at once."""


def batches(items: Iterable[T], n_bytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """All items in their order, in lists of about ``BATCH_BYTES`` each; a larger item has one of its own.

    Args:
        items: what to divide.
        n_bytes_of: item → bytes.
    """
    batch: list[T] = []
    total = 0
    for item in items:
        n_bytes = n_bytes_of(item)
        if batch and total + n_bytes > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += n_bytes
    if batch:
        yield batch
