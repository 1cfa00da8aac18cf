"""A save of ShardedTensors that all ranks have agreed on, ready to be written.

::

    prepare_save ──▶ PreparedSave ── staged ──▶ the same save, from copies of the tensors
    (collective)                  ── write ───▶ this rank's bytes
                                  ── finish ──▶ metadata, by one rank

The agreement of the ranks (an ``Agreement``) can be reused by later saves, as long as only the data
changes, and by the first save after a load of what it is recorded in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from core.dist_checkpointing._background.staging import POOL
from core.dist_checkpointing._directory.sums import sums_dir_of
from core.dist_checkpointing._engine import bridge
from core.dist_checkpointing._live.save import LiveSave, ProcessContribution
from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing._values.objects import stream_of
from core.engine.catalog.facets import WriteOptions
from core.engine.plan.plan import DEFAULT_THREADS
from core.errors import UsageError
from core.files.url import find_location
from core.formats.format import Format
from core.formats.mcore.common_state import COMMON_FILE
from core.formats.mcore.metadata_json import CONFIG
from core.formats.registry import format_called

if TYPE_CHECKING:
    from core.arrays.box import Box, Shape
    from core.dist_checkpointing._live.tensors import Chunk
    from core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from core.engine.catalog.catalog import TargetCatalog
    from core.engine.catalog.file_image import FileImage


class Change(IntEnum):
    """The difference between a save and an earlier one, whose agreement of the ranks it may reuse.

    The ranks have to exchange nothing, sizes, or all metadata again.
    """

    NOTHING = 0
    """Only data: the files are laid out already."""
    SIZES = 1
    """The sizes of objects, or the files; only sizes have to be exchanged."""
    ENTRIES = 2
    """Tensors, objects or ranks."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The outcome of the ranks' exchange of metadata, valid while only the data changes.

    Args:
        format: format of the target.
        contributions: the tensors and objects of each rank, by rank.
        options: the write options of the layout.
        layout: the target catalog and its file images. None if only the contributions are known,
            from a loaded checkpoint; the sizes of objects are not valid then.
    """

    format: Format
    contributions: Sequence[ProcessContribution]
    options: WriteOptions | None = None
    layout: tuple[TargetCatalog, tuple[FileImage, ...]] | None = None

    def change_to(
        self,
        format: Format,
        options: WriteOptions,
        contribution: ProcessContribution,
        *,
        number: int,
        n_ranks: int,
    ) -> Change:
        """Compare with the save of rank ``number`` of ``n_ranks``."""
        if (format.name, n_ranks) != (self.format.name, len(self.contributions)):
            return Change.ENTRIES
        agreed = self.contributions[number]
        if self.layout is not None and (options, contribution) == (self.options, agreed):
            return Change.NOTHING
        keys, agreed_keys = ({key for key, _ in side.streams} for side in (contribution, agreed))
        has_same_tensors = contribution.chunks == agreed.chunks or (
            _boxes_of(contribution.chunks) == _boxes_of(agreed.chunks) is not None
        )
        return Change.SIZES if has_same_tensors and keys == agreed_keys else Change.ENTRIES


def _boxes_of(chunks: Iterable[Chunk]) -> set[tuple[str, str, Shape, Box]] | None:
    """Return the boxes that chunks stand for, in any order; None if a tensor has no elements.

    The plans of a checkpoint do not say which rank has an empty tensor.
    """
    chunks = tuple(chunks)
    if any(0 in chunk.shape for chunk in chunks):
        return None
    return {
        (chunk.key, chunk.dtype, chunk.shape, box)
        for chunk in chunks
        for _, box in chunk.runs()
        if not box.is_empty
    }


@dataclass(slots=True)
class PreparedSave:
    """A save that every rank has agreed on.

    ``write`` and ``finish`` do not communicate, so another process may run them.

    Args:
        work: the engine's description of the save, still without this rank's tensors.
        tensors: the tensors that this rank writes, on any device, each with its chunk.
        change: how much of the previous agreement the save has changed on any rank.
    """

    work: LiveSave
    tensors: list[tuple[Chunk, torch.Tensor]]
    change: Change = Change.ENTRIES

    @property
    def agreement(self) -> Agreement:
        """Agreement of the ranks, to be passed as ``previous`` to the next save."""
        return Agreement(
            self.work.format, self.work.contributions, self.work.options, self.work.laid_out()
        )

    def staged(self) -> PreparedSave:
        """Return the save with copies of the tensors in host memory.

        The originals may then be changed.

        Raises:
            OSError: there is not enough memory.
        """
        copies = POOL.copy_tensors([data for _, data in self.tensors])
        return replace(
            self,
            tensors=[(chunk, data) for (chunk, _), data in zip(self.tensors, copies, strict=True)],
        )

    def write(self) -> int:
        """Write this rank's tensors and objects into the directory.

        Returns:
            Size of the written tensors, in bytes.

        Raises:
            CheckpointingException: a file cannot be written; incomplete files remain.
        """
        # Keep the host copies in a list: a LiveTensor does not keep its memory alive.
        hosts = [(chunk, bridge.to_host(chunk, data)) for chunk, data in self.tensors]
        return replace(
            self.work, tensors=[bridge.live_tensor(chunk, host) for chunk, host in hosts]
        ).write()

    def finish(self) -> None:
        """Write the metadata; called by one rank after all ranks have written.

        Raises:
            CheckpointingException: a file cannot be written.
        """
        self.work.finish()


def prepare_save(
    tensors: Iterable[ShardedTensor],
    objects: Iterable[ShardedObject],
    checkpoint_dir: str | Path,
    *,
    format: str,
    separation_hint: str | None = None,
    files_per_rank: int = 1,
    threads: int = DEFAULT_THREADS,
    records_plans: bool = False,
    previous: Agreement | None = None,
) -> PreparedSave:
    """Exchange the metadata of all ranks and lay out the files of the save; collective.

    Args:
        tensors: the tensors that this rank writes: main replicas with data, on any device.
        objects: the objects that this rank writes if the format stores ShardedObjects as items,
            else ().
        checkpoint_dir: an existing directory, or the URL of a prefix.
        format: name of a writable format.
        separation_hint, files_per_rank: as in ``core.engine.catalog.facets.WriteOptions``.
        threads: number of copying threads on each rank.
        records_plans: record in the checkpoint what each rank writes, for a later job's
            ``previous``, as ``core.engine.catalog.facets.WriteOptions.recorded_ranks``.
        previous: agreement of an earlier save. If all ranks pass one that still fits, metadata is
            neither exchanged nor computed; if only sizes of objects differ, only they are
            exchanged.

    Raises:
        CheckpointingException: a tensor has no data, ranks disagree on a tensor, or the format
            cannot store it; on every rank.
    """
    kind = format_called(format)
    options = WriteOptions(
        separation_hint=separation_hint,
        files_per_rank=files_per_rank,
        recorded_ranks=comm.world_size() if records_plans else 0,
    )

    def prepare_own() -> tuple[list[tuple[Chunk, torch.Tensor]], list[tuple[str, bytes]]]:
        pairs = []
        for tensor in tensors:
            if tensor.data is None:
                raise UsageError("the tensor has no data to save", key=tensor.key)
            pairs.append((bridge.build_chunk(tensor), tensor.data.detach()))
            bridge.check_data(*pairs[-1])
        return pairs, [(item.unique_key, stream_of([item.data])) for item in objects]

    # Collect what this rank writes.
    pairs, streams = comm.together(prepare_own)
    contribution = ProcessContribution(
        tuple(chunk for chunk, _ in pairs), tuple((key, len(data)) for key, data in streams)
    )
    # Reuse the earlier agreement as far as it fits on all ranks. A rank without one must also vote.
    change = Change.ENTRIES
    if previous is not None:
        change = previous.change_to(
            kind, options, contribution, number=comm.rank(), n_ranks=comm.world_size()
        )
    change = Change(comm.largest(change))
    # Otherwise exchange the metadata of all ranks, or only the sizes of their objects.
    if previous is None or change is Change.ENTRIES:
        contributions: Sequence[ProcessContribution] = comm.all_gather(contribution)
    elif change is Change.SIZES:
        contributions = [
            replace(agreed, streams=sizes)
            for agreed, sizes in zip(
                previous.contributions, comm.all_gather(contribution.streams), strict=True
            )
        ]
    else:
        contributions = previous.contributions
    work = LiveSave(
        format=kind,
        root=find_location(checkpoint_dir),
        number=comm.rank(),
        contributions=contributions,
        streams=streams,
        options=options,
        without=(CONFIG, COMMON_FILE) if kind.has_common_state else (),
        threads=threads,
        sums_dir=sums_dir_of(checkpoint_dir),
        _layout=previous.layout if previous and change is Change.NOTHING else None,
    )
    # Lay out the files on all ranks, so that an error is raised on all before any byte is written.
    comm.together(work.laid_out)
    return PreparedSave(work, pairs, change)
