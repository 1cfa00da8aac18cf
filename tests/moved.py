"""The tensors of a catalog, moved by the engine: planned, decoded, copied, replicas compared."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from core.copy import execute
from core.image import FileImage, PlacedArray
from core.plan import make_plan
from core.store import MemoryStore
from core.target import partitioned

if TYPE_CHECKING:
    from core.catalog import Catalog
    from core.store import ReadStore


def moved(catalog: Catalog, store: ReadStore, *, threads: int = 2, compares: bool = True) -> dict[str, bytes]:
    """The dense bytes of every tensor."""
    target = partitioned(replace(catalog, hidden={}), format="raw", by="whole")
    images = [
        FileImage(key, meta.n_bytes, (PlacedArray(0, target.whole_array(key)),)) for key, meta in target.tensors.items()
    ]
    out = MemoryStore()
    execute(make_plan(catalog, target, images, threads=threads, compares=compares), store, out)
    return {key: bytes(out.contents[key]) for key in target.tensors}
