"""Division of a sequence of tensors into batches that fit in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

BATCH_BYTES = 512 << 20
"""Approximate size of the tensors that pass through host memory at once, in bytes."""


def batches(items: Iterable[T], n_bytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield all items in their order, in lists of at most ``BATCH_BYTES`` each.

    A larger item has a list of its own.

    Args:
        items: the items to divide.
        n_bytes_of: returns the size of an item, in bytes.
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
