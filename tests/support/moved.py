"""The tensors of a catalog, moved by the engine: planned, decoded, copied, replicas compared."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.file_image import FileImage, PlacedArray
from core.engine.copy.run import execute
from core.engine.plan.plan import make_plan
from core.files.store import MemoryStore
from core.opening.target import partitioned

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog
    from core.files.store import ReadStore


def moved(
    catalog: Catalog, store: ReadStore, *, threads: int = 2, compares: bool = True
) -> dict[str, bytes]:
    """The dense bytes of every tensor."""
    target = partitioned(replace(catalog, hidden={}), format="raw", by="whole")
    images = [
        FileImage(key, tensor.n_bytes, (PlacedArray(0, target.whole_array(key)),))
        for key, tensor in target.tensors.items()
    ]
    out = MemoryStore()
    execute(make_plan(catalog, target, images, threads=threads, compares=compares), store, out)
    return {key: bytes(out.contents[key]) for key in target.tensors}
