"""Masters that have names of their own: whether they still belong to the weights beside them."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from core.catalog import Catalog, StoredArray
from core.optim_proof import is_master
from core.optimizer import MASTER, state_key
from core.store import ReadStore

MOST = 64
"""Parameters that are looked at, evenly spread."""


def strange_masters(catalog: Catalog, store: ReadStore) -> list[str]:
    """Parameters whose masters do not round to their weights, among a few that are sampled.

    Names say what belongs to what, so that this is no proof of a mapping; but weights that were edited, or taken from
    another step than the optimizer, show themselves.

    Args:
        catalog: the global per-layer form, of a checkpoint that stores states by name.
    """
    named = [key for key in catalog.tensors if state_key(MASTER, key) in catalog.tensors]
    found = []
    for key in named[:: max(1, len(named) // MOST)]:
        pair = _same_part(catalog, key, state_key(MASTER, key))
        if pair is not None and not is_master(store, pair[1], pair[0], bind=catalog.bind):
            found.append(key)
    return found


def pairs_of_masters(catalog: Catalog) -> Iterator[tuple[str, StoredArray, StoredArray]]:
    """(parameter, array of weights, array of masters) of arrays that hold the same part of their tensors."""
    for key in catalog.tensors:
        if state_key(MASTER, key) in catalog.tensors:
            pair = _same_part(catalog, key, state_key(MASTER, key))
            if pair is not None:
                yield key, *pair


def _same_part(catalog: Catalog, key: str, master: str) -> tuple[StoredArray, StoredArray] | None:
    """A weight's array and a master's that hold the same box of their tensors, and nothing else."""
    boxes = {
        piece.box: piece.array
        for piece in catalog.fragments(key)
        if piece.array is not None and prod(piece.array.shape) == piece.box.n_elements
    }
    for piece in catalog.fragments(master):
        weight = boxes.get(piece.box)
        if weight is not None and piece.array is not None and prod(piece.array.shape) == piece.box.n_elements:
            return weight, piece.array
    return None
