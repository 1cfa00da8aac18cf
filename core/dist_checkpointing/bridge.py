"""The one place where ShardedTensors and ShardedObjects become what the engine works with, and come back.

::

    ShardedTensor ── chunk_of ──▶ core.live.Chunk      (metadata)
                  ── live ──────▶ core.live.LiveTensor (its memory, on the CPU)
    Catalog ── sharded_metadata ──▶ ShardedTensors and ShardedObjects without data

Saving is ``core.live_save``, loading is ``core.live_load``: the engine that converts files, with memory as one end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from core.box import Box
from core.catalog import Catalog
from core.dist_checkpointing import comm
from core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from core.dist_checkpointing.objects import live_object, load_stream, stream_of
from core.dist_checkpointing.staging import POOL
from core.dtypes import DTYPES
from core.errors import MissingShardError, UnsupportedError, UsageError
from core.formats import Format, format_called, sniffed
from core.formats.mcore_common import COMMON_FILE
from core.formats.mcore_config import CONFIG
from core.image import FileImage
from core.live import Chunk, LiveTensor
from core.live_load import fill
from core.live_save import DEFAULT_THREADS, Held, LiveSave
from core.optim_global import in_true_shapes
from core.store import LocalStore

FILL_BYTES = 512 << 20
"""About how many bytes are loaded at once by way of host memory, where tensors lie on a device or not dense."""


def chunk_of(tensor: ShardedTensor) -> Chunk:
    """The region of the global tensor that a ShardedTensor stands for.

    Raises:
        UnsupportedError: an element type that checkpoints do not have.
    """
    name = dtype_name(tensor.dtype, key=tensor.key)
    box = Box(tuple(tensor.global_offset), (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape))
    flat = tensor.flattened_range
    return Chunk(
        tensor.key,
        name,
        tuple(tensor.global_shape),
        box,
        None if flat is None else (flat.start, flat.stop),
        bool(tensor.allow_shape_mismatch),
    )


def dtype_name(dtype: torch.dtype, *, key: str | None = None) -> str:
    """The canonical name of a torch dtype.

    Raises:
        UnsupportedError: checkpoints do not have it.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedError(f"tensors of type {dtype} are not stored", key=key, hint="cast the tensor first")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a canonical name."""
    return getattr(torch, name)


def live(chunk: Chunk, data: torch.Tensor) -> LiveTensor:
    """A chunk with the memory of a tensor on the CPU; the tensor must outlive it.

    Args:
        chunk: says how many elements there are.
        data: strided, and dense for a flat range. Its shape is the chunk's box without leading axes of extent 1, or one
            axis for a flat range.

    Raises:
        UsageError: data and chunk disagree.
    """
    check_data(chunk, data)
    if data.is_contiguous():
        return LiveTensor(chunk, memory_of(data))
    assert chunk.flat is None, "flat ranges are made dense by the caller, who keeps the copy"
    return LiveTensor(chunk, memory_of(data), (0,) * (chunk.box.rank - data.dim()) + tuple(data.stride()))


def check_data(chunk: Chunk, data: torch.Tensor) -> None:
    """Returns if a tensor can be what a chunk says.

    Raises:
        UsageError: another type, or another number of elements.
        UnsupportedError: it is sparse.
    """
    if data.numel() != chunk.n_elements or dtype_name(data.dtype, key=chunk.key) != chunk.dtype:
        raise UsageError(
            f"the data is {data.dtype} of {data.numel()} elements, the metadata says {chunk.dtype} of "
            f"{chunk.n_elements}",
            key=chunk.key,
        )
    if data.layout != torch.strided:
        raise UnsupportedError(f"tensors of layout {data.layout} are not stored", key=chunk.key)


def memory_of(data: torch.Tensor) -> memoryview:
    """The bytes from a tensor's first element to the end of its last; writable, and valid as long as the tensor is."""
    if data.numel() == 0:
        return memoryview(bytearray())
    n_spanned = 1 + sum((n - 1) * step for n, step in zip(data.shape, data.stride(), strict=True))
    n_bytes = n_spanned * data.element_size()
    return memoryview((ctypes.c_ubyte * n_bytes).from_address(data.data_ptr())).cast("B")


@contextmanager
def opened(checkpoint_dir: str | Path, *, format: Format | None = None) -> Iterator[tuple[Catalog, LocalStore]]:
    """The catalog and the files of one checkpoint's directory, tensors in their true shapes.

    Args:
        checkpoint_dir: the directory itself, no training root.
        format: what it must be in; None finds out.

    Raises:
        CheckpointingException: it is not there, not whole, or in no known format.
    """
    store = LocalStore(Path(checkpoint_dir))
    try:
        catalog = (format or sniffed(store)).read(store)
        yield in_true_shapes(catalog, catalog.tensors), store
    finally:
        store.close()


def sharded_metadata(checkpoint_dir: str | Path, *, tensors_only: bool = False) -> dict[str, ShardedBase]:
    """What a checkpoint holds, without data and sharding.

    Args:
        checkpoint_dir: of a distributed checkpoint.
        tensors_only: leave out ShardedObjects.

    Returns:
        key → ShardedTensor that is the whole tensor; unique key → ShardedObject.

    Raises:
        CheckpointingException: it cannot be read.
    """
    with opened(checkpoint_dir) as (catalog, _):
        found: dict[str, ShardedBase] = {
            key: whole_tensor(meta.key, meta.dtype, meta.shape) for key, meta in catalog.tensors.items()
        }
        if not tensors_only:
            for key in catalog.objects:
                found[key] = ShardedObject.empty_from_unique_key(key)
        return found


def whole_tensor(key: str, dtype: str, shape: Sequence[int]) -> ShardedTensor:
    """A ShardedTensor without data that is all of a global tensor."""
    size = tuple(shape)
    return ShardedTensor(key, None, torch_dtype(dtype), size, size, (0,) * len(size), (1,) * len(size))


def load_tensors(tensors: Iterable[ShardedTensor], checkpoint_dir: str | Path, *, checks_crc: bool = True) -> None:
    """Fills the data of ShardedTensors from a checkpoint of any layout; no collective call.

    Args:
        tensors: with allocated ``data``, on any device and with any strides. They may be cut otherwise than in the
            checkpoint, be of another dtype, or be a flattened range; those with ``allow_shape_mismatch`` are zero where
            the checkpoint has nothing.
        checkpoint_dir: of a distributed checkpoint.
        checks_crc: compare checksums where the checkpoint states them and whole records are read.

    Raises:
        CheckpointingException: a tensor or a region of it is not there, a shape differs, or bytes are damaged.
    """
    pairs = []
    for tensor in tensors:
        if tensor.data is None:
            raise UsageError("the tensor has no data to be filled", key=tensor.key, hint="call init_data first")
        pairs.append((chunk_of(tensor), tensor.data))
    with opened(checkpoint_dir) as (catalog, store):
        fill_tensors(pairs, catalog, store, checks_crc=checks_crc)


def fill_tensors(
    pairs: Iterable[tuple[Chunk, torch.Tensor]], catalog: Catalog, store: LocalStore, *, checks_crc: bool = True
) -> None:
    """Fills tensors with regions of an opened checkpoint, by way of host memory if they lie on a device or not dense.

    Args:
        pairs: the regions, each with the tensor that gets it; chunks of one key are of one dtype.
        catalog, store: the checkpoint, with global tensors under the same keys.
        checks_crc: see ``load_tensors``.

    Raises:
        CheckpointingException: as ``core.live_load.fill``.
    """
    direct: list[LiveTensor] = []
    aside: list[tuple[Chunk, torch.Tensor]] = []
    for chunk, tensor in pairs:
        data = tensor.detach()
        if data.device.type == "cpu" and data.is_contiguous() and not (data.is_conj() or data.is_neg()):
            direct.append(live(chunk, data))
        else:
            aside.append((chunk, data))
    fill(direct, catalog, store, checks_crc=checks_crc)
    for batch in _batches(aside):
        hosts = [torch.empty(data.shape, dtype=data.dtype) for _, data in batch]
        made = [live(chunk, host) for (chunk, _), host in zip(batch, hosts, strict=True)]
        fill(made, catalog, store, checks_crc=checks_crc)
        for (_, data), host in zip(batch, hosts, strict=True):
            data.copy_(host)


def _batches(pairs: Sequence[tuple[Chunk, torch.Tensor]]) -> Iterator[list[tuple[Chunk, torch.Tensor]]]:
    """Consecutive pairs of about ``FILL_BYTES`` together."""
    batch: list[tuple[Chunk, torch.Tensor]] = []
    n_bytes = 0
    for chunk, data in pairs:
        if batch and n_bytes + chunk.n_bytes > FILL_BYTES:
            yield batch
            batch, n_bytes = [], 0
        batch.append((chunk, data))
        n_bytes += chunk.n_bytes
    if batch:
        yield batch


def load_objects(objects: Iterable[ShardedObject], checkpoint_dir: str | Path) -> dict[str, object]:
    """The live values of ShardedObjects, by unique key.

    Raises:
        MissingShardError: the checkpoint has no such object.
        UnsafeError: it names what runs code; objects of unknown classes are no error, see ``objects``.
        CheckpointingException: any other, from reading.
    """
    found: dict[str, object] = {}
    with opened(checkpoint_dir) as (catalog, store):
        for wanted in objects:
            key = wanted.unique_key
            item = catalog.objects.get(key)
            if item is None:
                raise MissingShardError(
                    "the checkpoint has no such object",
                    key=key,
                    file=str(checkpoint_dir),
                    hint=_others(catalog, wanted.key),
                )
            found[key] = _value(catalog, store, item)
    return found


def _value(catalog: Catalog, store: LocalStore, item: Any) -> object:
    """What a ShardedObject holds; in a catalog it is a list of one."""
    if item.raw_key is not None:
        array = catalog.fragments(item.raw_key)[0].array
        value = load_stream(store, array, key=item.key)
    else:
        value = live_object(item.value, lambda key: hidden_tensor(catalog, store, key))
    if not isinstance(value, list) or len(value) != 1:
        raise UnsupportedError("the object is not a list of one value, as that of a ShardedObject is", key=item.key)
    return value[0]


def _others(catalog: Catalog, key: str) -> str | None:
    """Which shards of an object there are."""
    there = [name for name in catalog.objects if name.rpartition("/")[0] == key]
    return f"of {key} there are: {', '.join(there[:8])}" if there else None


def hidden_tensor(catalog: Catalog, store: LocalStore, key: str) -> torch.Tensor:
    """A tensor inside an object."""
    meta = catalog.meta(key)
    data = torch.empty(meta.shape, dtype=torch_dtype(meta.dtype))
    chunk = Chunk(key, meta.dtype, meta.shape, Box((0,) * len(meta.shape), meta.shape))
    fill([live(chunk, data)], replace(catalog, tensors=catalog.hidden), store)
    return data


def load_common(checkpoint_dir: str | Path) -> dict[Any, Any]:
    """The common state of a distributed checkpoint, live, wherever its dialect keeps it.

    Raises:
        CorruptError: it is no dict.
        UnsafeError: it names what runs code; objects of unknown classes are no error, see ``objects``.
        CheckpointingException: any other, from reading.
    """
    with opened(checkpoint_dir) as (catalog, store):
        if "common" not in catalog.attrs:
            raise UnsupportedError(
                f"a {catalog.format} checkpoint has no common state",
                file=str(checkpoint_dir),
                hint="ckpt convert --to torch_dist makes one that has",
            )
        value = live_object(catalog.attrs["common"], lambda key: hidden_tensor(catalog, store, key))
        assert isinstance(value, dict), "the format has checked it"
        return value


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the ranks agreed on in a save; it holds for every save in which nothing but the data is new.

    Args:
        format, attrs: of the target.
        held: what every rank contributed, by rank.
        made: the target catalog and its file images.
    """

    format: Format
    attrs: Mapping[str, object]
    held: Sequence[Held]
    made: tuple[Catalog, tuple[FileImage, ...]]

    def fits(self, format: Format, attrs: Mapping[str, object], held: Held, *, number: int, n_ranks: int) -> bool:
        """Whether rank ``number`` of ``n_ranks`` contributes the same to the same target."""
        return (
            (format.name, n_ranks) == (self.format.name, len(self.held))
            and attrs == self.attrs
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
        return Agreement(self.work.format, self.work.attrs, self.work.held, self.work.laid_out())

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
        hosts = [(chunk, on_host(chunk, data)) for chunk, data in self.tensors]
        return replace(self.work, tensors=[live(chunk, host) for chunk, host in hosts]).write()

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
    attrs: Mapping[str, object] | None = None,
    group: Any = None,
    threads: int = DEFAULT_THREADS,
    previous: Agreement | None = None,
) -> PreparedSave:
    """Tells all ranks what every one holds, and decides where everything goes; collective.

    Args:
        tensors: what this rank writes: main replicas with data, on any device.
        objects: likewise, for formats that store ShardedObjects as items; () for others.
        checkpoint_dir: exists.
        format: name of a writable format.
        attrs: of the target catalog.
        group: the ranks that save; None for all.
        threads: that copy, on each rank.
        previous: of an earlier save; if it still fits on all ranks, metadata are neither exchanged nor computed. All
            ranks give one, or none does.

    Raises:
        CheckpointingException: ranks disagree on a tensor, or the format cannot hold it; on every rank.
    """
    kind = format_called(format)

    def own() -> tuple[list[tuple[Chunk, torch.Tensor]], list[tuple[str, bytes]]]:
        found = []
        for tensor in tensors:
            if tensor.data is None:
                raise UsageError("the tensor has no data to be saved", key=tensor.key)
            found.append((chunk_of(tensor), tensor.data.detach()))
            check_data(*found[-1])
        return found, [(item.unique_key, stream_of([item.data])) for item in objects]

    held, streams = comm.together(own, group)
    mine = Held(tuple(chunk for chunk, _ in held), tuple((key, len(data)) for key, data in streams))
    agreed = previous if _still_fits(previous, kind, attrs or {}, mine, group) else None
    work = LiveSave(
        format=kind,
        root=Path(checkpoint_dir),
        number=comm.rank(group),
        held=agreed.held if agreed is not None else comm.all_gather(mine, group),
        streams=streams,
        attrs=attrs or {},
        without=(CONFIG, COMMON_FILE) if kind.is_mcore else (),
        threads=threads,
        _made=agreed.made if agreed is not None else None,
    )
    comm.together(work.laid_out, group)
    return PreparedSave(work, held)


def _still_fits(
    previous: Agreement | None, format: Format, attrs: Mapping[str, object], mine: Held, group: Any
) -> bool:
    """Whether all ranks can go on with what they agreed on before; collective, unless there is nothing such."""
    if previous is None:
        return False
    n_ranks = comm.world_size(group)
    fits = previous.fits(format, attrs, mine, number=comm.rank(group), n_ranks=n_ranks)
    return all(comm.all_gather(fits, group))


def on_host(chunk: Chunk, data: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory, as it is if it lies there in a way that ``live`` takes."""
    host = data.cpu().resolve_conj().resolve_neg()
    return host if chunk.flat is None else host.contiguous()
