"""Read a finished destination back, and compare every byte with the source.

The destination is opened like any checkpoint, so that readers will see exactly what was compared:
its own metadata locates the bytes of each tensor. A second plan copies the source to those
positions, and every byte is compared with the one in the file instead of being written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from core.arrays.box import c_strides
from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.catalog.facets import RankFacts
from core.engine.catalog.file_image import FileImage, PlacedArray
from core.engine.catalog.stored import PlannedArray, StoredArray
from core.engine.copy.options import CopyOptions
from core.engine.copy.run import execute
from core.engine.device.device import Device
from core.engine.plan.memory import MIB
from core.engine.plan.plan import MIN_BUFFER_BYTES, Plan, make_plan
from core.errors import CapacityError, CorruptError, UnsupportedError
from core.files.source_store import SourceStore
from core.files.store import LocalStore, TargetStore, list_files_below
from core.files.syscalls import drop_from_cache
from core.megatron.model.topology import Topology
from core.megatron.placement.adapter_rows import to_stored_order
from core.megatron.reshard.unshard import unshard
from core.megatron.rules.experts import transposed
from core.megatron.rules.rules import Rules
from core.opening.open import open_checkpoint
from core.progress import OnProgress, Phase, count_steps

if TYPE_CHECKING:
    from core.files.store import ReadStore


def check_memory(plan: Plan, memory_bytes: int) -> None:
    """Raise unless there is memory for the metadata of both source and destination.

    Raises:
        CapacityError: the memory limit is too low.
    """
    spare = plan.threads * (plan.buffer_bytes - MIN_BUFFER_BYTES) + plan.cache_bytes
    least = plan.memory_bytes - spare + plan.metadata_bytes
    if least > memory_bytes:
        raise CapacityError(
            f"--verify needs {-(-least // MIB):,} MiB of memory, "
            f"but the limit is {memory_bytes // MIB:,} MiB",
            hint=f"set --memory to at least {-(-least // MIB)}MiB",
        )


def verify(
    plan: Plan,
    source_store: ReadStore,
    written: Path,
    *,
    rules: Rules,
    memory_bytes: int,
    progress: OnProgress | None = None,
    device: Device | None = None,
) -> int:
    """Compare a destination with the source that it was written from.

    Args:
        plan: the plan that the destination was written by.
        source_store: the source's files.
        written: current path of the destination.
        rules: the layout rules, for rank files.
        memory_bytes: memory limit of the process.
        progress: called with the number of bytes that have been compared.
        device: the device for per-byte work, or None.

    Returns:
        The bytes of tensors that were compared.

    Raises:
        CorruptError: a byte, a tensor, a dtype or a shape differs from the source.
        CheckpointingException: the destination cannot be read.
    """
    with plan_comparison(plan, written, rules=rules, memory_bytes=memory_bytes) as (again, store):
        options = CopyOptions(
            crc=False,
            digest=False,
            progress=count_steps(progress, Phase.VERIFYING, again.write_bytes),
            device=device,
        )
        execute(again, source_store, ComparingStage(store), options)
        return again.write_bytes


@contextmanager
def plan_comparison(
    plan: Plan, written: Path, *, rules: Rules, memory_bytes: int
) -> Iterator[tuple[Plan, SourceStore]]:
    """Plan the source against a destination that exists.

    Args:
        plan, written, rules, memory_bytes: as for ``verify``.

    Yields:
        The plan whose target is the destination, and the destination's files.

    Raises:
        CheckpointingException: as for ``verify``.
    """
    checkpoint = open_checkpoint(written)
    store = checkpoint.store
    try:
        for name in list_files_below(store) if isinstance(store, LocalStore) else ():
            forget_cached(store.path(name))

        # Bring the destination under the plan's keys; rank files hold shards under other names.
        catalog = checkpoint.catalog
        if catalog.is_rank_local:
            topology, ranks = plan.target.facet(Topology), plan.target.facet(RankFacts)
            assert topology is not None and ranks is not None, "a target of rank files has both"
            catalog = unshard(catalog, rules=rules, target_tp=topology.tp, store=store)
            catalog = to_stored_order(transposed(catalog, ranks.transposed), topology.tp)
        bound = _locate_arrays(catalog, plan.target, store)

        # Use its arrays as the target, in its files as they are.
        target = bound.as_target(bound.format, lambda _, tensor: tensor.with_arrays(_plan_array))
        yield (
            make_plan(
                plan.source,
                target,
                _describe_files(bound, store),
                threads=plan.threads,
                memory_bytes=memory_bytes - plan.metadata_bytes,
                compares=plan.compares,
            ),
            store,
        )
    finally:
        store.close()


def forget_cached(path: Path) -> None:
    """Drop a file from the page cache, except for bytes that are not on the disk yet."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        drop_from_cache(fd)
    finally:
        os.close(fd)


def _locate_arrays(catalog: Catalog, expected: TargetCatalog, store: ReadStore) -> Catalog:
    """Check the destination's tensors, and determine the file positions of all their arrays.

    Args:
        catalog: the destination's tensors under the keys of the plan.
        expected: the target catalog that the destination was written by.
        store: the destination's files.

    Raises:
        CorruptError: a tensor is missing, or has another dtype or shape than was written.
        UnsupportedError: an array is compressed or strided.
    """
    for key, meta in expected.tensors.items():
        actual = catalog.tensors.get(key)
        if actual is None or (actual.dtype, actual.shape) != (meta.dtype, meta.shape):
            state = (
                "is missing" if actual is None else f"is {actual.dtype} with shape {actual.shape}"
            )
            raise CorruptError(
                f"the tensor was written as {meta.dtype} with shape {meta.shape}, "
                f"but {state} when read back",
                key=key,
                hint="rerun the command; if it fails again, check the disk and the memory",
            )

    # Bind each array once; several fragments may refer to it.
    arrays: dict[str, StoredArray] = {}

    def bind(array: StoredArray) -> StoredArray:
        bound = arrays.get(array.name)
        if bound is None:
            bound = arrays[array.name] = array.locate(store)
            extent = bound.extent
            if extent.encoding or extent.strides not in (None, c_strides(bound.shape)):
                raise UnsupportedError(
                    "--verify compares dense arrays, but this array is compressed or strided",
                    key=array.name,
                )
        return bound

    # Tied tensors have the same bytes, so comparing the first is enough.
    tensors = {
        key: replace(catalog.tensors[key].with_arrays(bind), flexible=tensor.flexible)
        for key, tensor in expected.tensors.items()
        if key not in catalog.ties
    }
    return replace(catalog, tensors=tensors, hidden={}, files={})


def _describe_files(catalog: Catalog, store: ReadStore) -> list[FileImage]:
    """Describe the destination's files: their sizes, and the arrays at their offsets."""
    placed: dict[str, dict[str, PlacedArray]] = {}
    for fragment in catalog.all_fragments():
        array = fragment.array
        if array is not None:
            placed.setdefault(array.extent.file, {})[array.name] = PlacedArray(
                array.extent.offset, _plan_array(array)
            )
    return [
        FileImage(
            file,
            store.size(file),
            sorted(arrays.values(), key=lambda item: (item.offset, item.array.n_bytes)),
        )
        for file, arrays in placed.items()
    ]


class ComparingStage(TargetStore):
    """A target store that compares bytes with those in its files instead of writing them."""

    def __init__(self, store: ReadStore) -> None:
        self._store = store

    def create(self, name: str, n_bytes: int) -> None:
        """Do nothing: the file exists."""

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """Compare bytes with those in the file.

        Raises:
            CorruptError: the bytes differ.
        """
        view = memoryview(data).cast("B")
        stored = self._store.read(name, offset, len(view))
        if stored != view:
            first = next(at for at, (a, b) in enumerate(zip(stored, view, strict=True)) if a != b)
            raise CorruptError(
                f"byte {offset + first} of the written file is {stored[first]:#04x}, "
                f"but {view[first]:#04x} in the source",
                file=name,
                span=(offset, offset + len(view)),
                hint="nothing was published, so rerun the command; if it fails again, check the "
                "disk and the memory",
            )

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Read bytes of the file."""
        self._store.read_into(name, offset, buffer)


def _plan_array(array: StoredArray) -> PlannedArray:
    return PlannedArray(array.name, array.dtype, array.shape, array.coords)
