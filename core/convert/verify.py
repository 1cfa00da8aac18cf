"""Reading a finished destination again, and comparing every byte with the source.

The destination is opened as any checkpoint is, so that what is compared is what its readers will see: its own metadata
say where the bytes of each tensor lie. The source is moved a second time to those places, by a plan of its own, and
instead of being written every byte is compared with the one that is there.
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
    """Finds out beforehand whether there is memory for the metadata of source and destination.

    Raises:
        CapacityError: there is not.
    """
    spare = plan.threads * (plan.buffer_bytes - MIN_BUFFER_BYTES) + plan.cache_bytes
    least = plan.memory_bytes - spare + plan.metadata_bytes
    if least > memory_bytes:
        raise CapacityError(
            f"{memory_bytes} bytes of memory are allowed, but the work and then --verify need {least}",
            hint=f"allow at least {-(-least // MIB)} MiB",
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
    """Compare a destination with the source that it was made of.

    Args:
        plan: the one that made it.
        source_store: the source's files.
        written: where the destination is now.
        rules: the layout's table, for rank files.
        memory_bytes: most bytes the process may use.
        progress: told about compared bytes.
        device: on which per-byte work may be done.

    Returns:
        The bytes of tensors that were compared.

    Raises:
        CorruptError: a byte, a tensor, a dtype or a shape is not what it should be.
        CheckpointingException: any other, if the destination cannot be read.
    """
    with planned_again(plan, written, rules=rules, memory_bytes=memory_bytes) as (again, store):
        options = CopyOptions(crc=False, digest=False, progress=progress, device=device)
        execute(again, source_store, Comparison(store), options)
        return again.write_bytes


@contextmanager
def planned_again(plan: Plan, written: Path, *, rules: Rules, memory_bytes: int) -> Iterator[tuple[Plan, LocalStore]]:
    """The plan whose target is a destination that exists, and the destination's files.

    Args:
        plan, written, rules, memory_bytes: as for ``verify``.

    Raises:
        CheckpointingException: as for ``verify``.
    """
    found = open_checkpoint(written)
    try:
        for name in found.store.files():
            forget_cached(found.store.path(name))
        catalog = _in_the_plans_keys(found, plan, rules)
        bound = _bound(catalog, plan.target, found.store)
        target = _as_target(bound)
        yield (
            make_plan(
                plan.source,
                target,
                _images(bound, found.store),
                zeros={key: boxes for key, boxes in plan.zeros.items() if key in target.tensors},
                threads=plan.threads,
                memory_bytes=memory_bytes - plan.metadata_bytes,
                compares=plan.compares,
            ),
            found.store,
        )
    finally:
        found.store.close()


def forget_cached(path: Path) -> None:
    """Asks the system to read a file from the disk again; what it has not written yet stays cached."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _in_the_plans_keys(found: Checkpoint, plan: Plan, rules: Rules) -> Catalog:
    """The destination's tensors under the keys that the plan has."""
    catalog = found.catalog
    if not catalog.is_rank_local:
        return catalog
    topology, ranks = plan.target.facet(Topology), plan.target.facet(RankFacts)
    assert topology is not None and ranks is not None, "a target of rank files has both"
    return transposed(unshard(catalog, rules=rules, target_tp=topology.tp, store=found.store), ranks.transposed)


def _bound(catalog: Catalog, wanted: TargetCatalog, store: ReadStore) -> Catalog:
    """The tensors of the destination whose places are all known; they are those that were to be written.

    Raises:
        CorruptError: a tensor is missing, or has another dtype or shape.
    """
    aliases = catalog.aliases
    for key, meta in wanted.tensors.items():
        have = catalog.tensors.get(key)
        if have is None or (have.dtype, have.shape) != (meta.dtype, meta.shape):
            what = "is not there" if have is None else f"is {have.dtype} of shape {have.shape}"
            raise CorruptError(
                f"the destination was to hold {meta.dtype} of shape {meta.shape}, but reading it again, it {what}",
                key=key,
            )
    arrays: dict[str, StoredArray] = {}

    def bound(array: StoredArray) -> StoredArray:
        known = arrays.get(array.name)
        if known is None:
            known = arrays[array.name] = catalog.bind(store, array)
            extent = known.extent
            if extent.encoding or extent.strides not in (None, c_strides(known.shape)):
                raise UnsupportedError(
                    "--verify compares dense arrays, this one is compressed or strided", key=array.name
                )
        return known

    def fragments_of(key: str) -> Sequence[Fragment]:
        found = catalog.fragments(key)
        return tuple(piece if piece.array is None else replace(piece, array=bound(piece.array)) for piece in found)

    tensors = {key: wanted.tensors[key] for key in wanted.tensors if key not in aliases}
    return replace(
        catalog, tensors=tensors, hidden={}, fragments_of=fragments_of, bind=bind_nothing, aliases={}, zeros={}
    )


def _images(catalog: Catalog, store: ReadStore) -> list[FileImage]:
    """The files as they are: which array lies where."""
    placed: dict[str, dict[str, PlacedArray]] = {}
    for fragment in catalog.all_fragments():
        array = fragment.array
        if array is not None:
            placed.setdefault(array.extent.file, {})[array.name] = PlacedArray(array.extent.offset, _planned(array))
    return [
        FileImage(file, store.size(file), sorted(arrays.values(), key=lambda one: (one.offset, one.array.n_bytes)))
        for file, arrays in placed.items()
    ]


class Comparison:
    """A stage that compares what it is given with what is there."""

    def __init__(self, store: ReadStore) -> None:
        self._store = store

    def create(self, name: str, n_bytes: int) -> None:
        """The file exists."""

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """Compares.

        Raises:
            CorruptError: the bytes differ.
        """
        view = memoryview(data).cast("B")
        there = self._store.read(name, offset, len(view))
        if there != view:
            first = next(at for at, (one, other) in enumerate(zip(there, view, strict=True)) if one != other)
            raise CorruptError(
                f"byte {offset + first} of the written file is {there[first]:#04x}, but the source says "
                f"{view[first]:#04x}",
                file=name,
                span=(offset, offset + len(view)),
                hint="nothing was made visible; the disk or the memory may be faulty: run it again",
            )

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Reads what is there."""
        self._store.read_into(name, offset, buffer)

    def settle(self, name: str, offset: int, n_bytes: int) -> None:
        """Nothing was written."""


def _as_target(catalog: Catalog) -> TargetCatalog:
    """Return a catalog of what a destination holds as the one that it was written by."""

    def fragments_of(key: str) -> Sequence[TargetFragment]:
        return tuple(
            Fragment(key, piece.box, None if piece.array is None else _planned(piece.array), piece.at)
            for piece in catalog.fragments(key)
        )

    return catalog.as_target(catalog.format, fragments_of)


def _planned(array: StoredArray) -> PlannedArray:
    return PlannedArray(array.name, array.dtype, array.shape, array.coords)
