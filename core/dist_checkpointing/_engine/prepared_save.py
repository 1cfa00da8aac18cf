"""A save of ShardedTensors that all ranks have agreed on, ready to be written.

::

    prepare_save ──▶ PreparedSave ── staged ──▶ the same, out of memory of its own
    (collective)                  ── write ───▶ this rank's bytes
                                  ── finish ──▶ metadata, by one rank

What was agreed on (an ``Agreement``) serves the next save as well, as long as nothing but the data changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from core.catalog.facets import WriteOptions
from core.dist_checkpointing._background.staging import POOL
from core.dist_checkpointing._engine import bridge
from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing._values.objects import stream_of
from core.errors import UsageError
from core.formats.format import Format
from core.formats.mcore.common_state import COMMON_FILE
from core.formats.mcore.metadata_json import CONFIG
from core.formats.registry import format_called
from core.live.save import Held, LiveSave
from core.plan.plan import DEFAULT_THREADS

if TYPE_CHECKING:
    from core.catalog.catalog import TargetCatalog
    from core.catalog.file_image import FileImage
    from core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from core.live.tensors import Chunk


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the ranks agreed on in a save; it holds for every save in which nothing but the data is new.

    Args:
        format, options: of the target.
        held: what every rank contributed, by rank.
        made: the target catalog and its file images.
    """

    format: Format
    options: WriteOptions
    held: Sequence[Held]
    made: tuple[TargetCatalog, tuple[FileImage, ...]]

    def fits(self, format: Format, options: WriteOptions, held: Held, *, number: int, n_ranks: int) -> bool:
        """Whether rank ``number`` of ``n_ranks`` contributes the same to the same target."""
        return (
            (format.name, n_ranks) == (self.format.name, len(self.held))
            and options == self.options
            and held == self.held[number]
        )


@dataclass(slots=True)
class PreparedSave:
    """A save that every rank has agreed on; ``write`` and ``finish`` talk to nobody, so another process may do them.

    Args:
        work: the engine's part, still without this rank's tensors.
        tensors: what this rank writes, on any device, each with its chunk.
    """

    work: LiveSave
    tensors: list[tuple[Chunk, torch.Tensor]]

    @property
    def agreement(self) -> Agreement:
        """For ``previous`` of the next save."""
        return Agreement(self.work.format, self.work.options, self.work.held, self.work.laid_out())

    def staged(self) -> PreparedSave:
        """The same with copies of the tensors, in host memory; the tensors may then be changed.

        Raises:
            OSError: there is no memory left.
        """
        copies = POOL.copied([data for _, data in self.tensors])
        return replace(self, tensors=[(chunk, data) for (chunk, _), data in zip(self.tensors, copies, strict=True)])

    def write(self) -> int:
        """Writes this rank's share into the directory; returns bytes of tensors.

        Raises:
            CheckpointingException: the system refuses; files that were begun stay.
        """
        hosts = [(chunk, bridge.on_host(chunk, data)) for chunk, data in self.tensors]
        return replace(self.work, tensors=[bridge.live(chunk, host) for chunk, host in hosts]).write()

    def finish(self) -> None:
        """Writes metadata; for one rank, when all have written.

        Raises:
            CheckpointingException: the system refuses.
        """
        self.work.finish()


def prepare_save(
    tensors: Iterable[ShardedTensor],
    objects: Iterable[ShardedObject],
    checkpoint_dir: str | Path,
    *,
    format: str,
    separation_hint: str | None = None,
    threads: int = DEFAULT_THREADS,
    previous: Agreement | None = None,
) -> PreparedSave:
    """Tells all ranks what every one holds, and decides where everything goes; collective.

    Args:
        tensors: what this rank writes: main replicas with data, on any device.
        objects: likewise, for formats that store ShardedObjects as items; () for others.
        checkpoint_dir: exists.
        format: name of a writable format.
        separation_hint: as in ``core.catalog.facets.WriteOptions``.
        threads: that copy, on each rank.
        previous: of an earlier save; if all ranks give one and it still fits, metadata are neither exchanged nor
            computed.

    Raises:
        CheckpointingException: ranks disagree on a tensor, or the format cannot hold it; on every rank.
    """
    kind, options = format_called(format), WriteOptions(separation_hint=separation_hint)

    def own() -> tuple[list[tuple[Chunk, torch.Tensor]], list[tuple[str, bytes]]]:
        found = []
        for tensor in tensors:
            if tensor.data is None:
                raise UsageError("the tensor has no data to be saved", key=tensor.key)
            found.append((bridge.chunk_of(tensor), tensor.data.detach()))
            bridge.check_data(*found[-1])
        return found, [(item.unique_key, stream_of([item.data])) for item in objects]

    held, streams = comm.together(own)
    mine = Held(tuple(chunk for chunk, _ in held), tuple((key, len(data)) for key, data in streams))
    agreed = previous if _still_fits(previous, kind, options, mine) else None
    work = LiveSave(
        format=kind,
        root=Path(checkpoint_dir),
        number=comm.rank(),
        held=agreed.held if agreed is not None else comm.all_gather(mine),
        streams=streams,
        options=options,
        without=(CONFIG, COMMON_FILE) if kind.is_mcore else (),
        threads=threads,
        _made=agreed.made if agreed is not None else None,
    )
    comm.together(work.laid_out)
    return PreparedSave(work, held)


def _still_fits(previous: Agreement | None, format: Format, options: WriteOptions, mine: Held) -> bool:
    """Whether all ranks can go on with what they agreed on before; collective, also where this one has nothing such."""
    number, n_ranks = comm.rank(), comm.world_size()
    fits = previous is not None and previous.fits(format, options, mine, number=number, n_ranks=n_ranks)
    return not comm.any_of_all(not fits)
