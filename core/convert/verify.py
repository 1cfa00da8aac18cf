"""Read a finished destination back, and compare every byte with the source.

The destination is opened like any checkpoint, so that readers will see exactly what was compared:
its own metadata locate the bytes of each tensor. A second plan moves the source to those positions,
and every byte is compared with the one that is there instead of being written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from core.arrays.box import c_strides
from core.catalog.catalog import Catalog, Fragment, TargetCatalog, TargetFragment, bind_nothing
from core.catalog.facets import RankFacts
from core.catalog.file_image import FileImage, PlacedArray
from core.catalog.stored import PlannedArray, StoredArray
from core.copy.options import CopyOptions, Progress
from core.copy.run import execute
from core.device.device import Device
from core.errors import CapacityError, CorruptError, UnsupportedError
from core.files.store import LocalStore
from core.megatron.model.topology import Topology
from core.megatron.reshard.reshard import Rules, unshard
from core.megatron.rules.experts import transposed
from core.opening.open import Checkpoint, open_checkpoint
from core.plan.plan import MIB, MIN_BUFFER_BYTES, Plan, make_plan

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
            f"--verify needs {-(-least // MIB):,} MiB of memory, but the limit is {memory_bytes // MIB:,} MiB",
            hint=f"set the memory limit to at least {-(-least // MIB)} MiB",
        )


def verify(
    plan: Plan,
    source_store: ReadStore,
    written: Path,
    *,
    rules: Rules,
    memory_bytes: int,
    progress: Progress | None = None,
    device: Device | None = None,
) -> int:
    """Compare a destination with the source it was made from.

    Args:
        plan: the plan that made the destination.
        source_store: the source's files.
        written: where the destination is now.
        rules: the layout rules, for rank files.
        memory_bytes: memory limit of the process.
        progress: called with the number of bytes of each comparison.
        device: the device for per-byte work, or None.

    Returns:
        The bytes of tensors that were compared.

    Raises:
        CorruptError: a byte, a tensor, a dtype or a shape differs from the source.
        CheckpointingException: the destination cannot be read.
    """
    with plan_comparison(plan, written, rules=rules, memory_bytes=memory_bytes) as (again, store):
        options = CopyOptions(crc=False, digest=False, progress=progress, device=device)
        execute(again, source_store, ComparingStage(store), options)
        return again.write_bytes


@contextmanager
def plan_comparison(
    plan: Plan, written: Path, *, rules: Rules, memory_bytes: int
) -> Iterator[tuple[Plan, LocalStore]]:
    """Plan the source against a destination that exists.

    Args:
        plan, written, rules, memory_bytes: as for ``verify``.

    Yields:
        The plan whose target is the destination, and the destination's files.

    Raises:
        CheckpointingException: as for ``verify``.
    """
    checkpoint = open_checkpoint(written)
    try:
        for name in checkpoint.store.files():
            forget_cached(checkpoint.store.path(name))
        catalog = _with_keys_of_plan(checkpoint, plan, rules)
        bound = _bind_arrays(catalog, plan.target, checkpoint.store)
        target = _as_target(bound)
        yield (
            make_plan(
                plan.source,
                target,
                _images(bound, checkpoint.store),
                zeros={key: boxes for key, boxes in plan.zeros.items() if key in target.tensors},
                threads=plan.threads,
                memory_bytes=memory_bytes - plan.metadata_bytes,
                compares=plan.compares,
            ),
            checkpoint.store,
        )
    finally:
        checkpoint.store.close()


def forget_cached(path: Path) -> None:
    """Ask the system to read a file from the disk again; what is not written yet stays cached."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _with_keys_of_plan(checkpoint: Checkpoint, plan: Plan, rules: Rules) -> Catalog:
    """Return the destination's tensors under the keys of the plan."""
    catalog = checkpoint.catalog
    if not catalog.is_rank_local:
        return catalog
    topology, ranks = plan.target.facet(Topology), plan.target.facet(RankFacts)
    assert topology is not None and ranks is not None, "a target of rank files has both"
    return transposed(
        unshard(catalog, rules=rules, target_tp=topology.tp, store=checkpoint.store),
        ranks.transposed,
    )


def _bind_arrays(catalog: Catalog, wanted: TargetCatalog, store: ReadStore) -> Catalog:
    """Return the destination's tensors with the positions of all their arrays.

    Args:
        wanted: the target catalog that the destination was written by.

    Raises:
        CorruptError: a tensor is missing, or has another dtype or shape than was written.
        UnsupportedError: an array is compressed or strided.
    """
    aliases = catalog.aliases
    for key, meta in wanted.tensors.items():
        actual = catalog.tensors.get(key)
        if actual is None or (actual.dtype, actual.shape) != (meta.dtype, meta.shape):
            state = "is missing" if actual is None else f"is {actual.dtype} of shape {actual.shape}"
            raise CorruptError(
                f"the tensor was written as {meta.dtype} of shape {meta.shape}, but {state} when read back",
                key=key,
            )
    arrays: dict[str, StoredArray] = {}

    def bind(array: StoredArray) -> StoredArray:
        bound = arrays.get(array.name)
        if bound is None:
            bound = arrays[array.name] = catalog.bind(store, array)
            extent = bound.extent
            if extent.encoding or extent.strides not in (None, c_strides(bound.shape)):
                raise UnsupportedError(
                    "--verify compares dense arrays, but this array is compressed or strided",
                    key=array.name,
                )
        return bound

    def fragments_of(key: str) -> Sequence[Fragment]:
        pieces = catalog.fragments(key)
        return tuple(
            piece if piece.array is None else replace(piece, array=bind(piece.array))
            for piece in pieces
        )

    tensors = {key: wanted.tensors[key] for key in wanted.tensors if key not in aliases}
    return replace(
        catalog,
        tensors=tensors,
        hidden={},
        fragments_of=fragments_of,
        bind=bind_nothing,
        aliases={},
        zeros={},
    )


def _images(catalog: Catalog, store: ReadStore) -> list[FileImage]:
    """Return the destination's files as they are: which array lies at which offset."""
    placed: dict[str, dict[str, PlacedArray]] = {}
    for fragment in catalog.all_fragments():
        array = fragment.array
        if array is not None:
            placed.setdefault(array.extent.file, {})[array.name] = PlacedArray(
                array.extent.offset, _planned(array)
            )
    return [
        FileImage(
            file,
            store.size(file),
            sorted(arrays.values(), key=lambda item: (item.offset, item.array.n_bytes)),
        )
        for file, arrays in placed.items()
    ]


class ComparingStage:
    """A stage that compares bytes with those in its files instead of writing them."""

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
                f"byte {offset + first} of the written file is {stored[first]:#04x}, but {view[first]:#04x} in the "
                "source",
                file=name,
                span=(offset, offset + len(view)),
                hint="nothing was made visible; the disk or the memory may be faulty: run it again",
            )

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Read bytes of the file."""
        self._store.read_into(name, offset, buffer)

    def settle(self, name: str, offset: int, n_bytes: int) -> None:
        """Do nothing: no bytes were written."""


def _as_target(catalog: Catalog) -> TargetCatalog:
    """Return a catalog of what a destination holds as the target catalog that it was written by."""

    def fragments_of(key: str) -> Sequence[TargetFragment]:
        return tuple(
            Fragment(
                key, piece.box, None if piece.array is None else _planned(piece.array), piece.at
            )
            for piece in catalog.fragments(key)
        )

    return catalog.as_target(catalog.format, fragments_of)


def _planned(array: StoredArray) -> PlannedArray:
    return PlannedArray(array.name, array.dtype, array.shape, array.coords)
