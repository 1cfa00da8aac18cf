"""The one place where ShardedTensors and ShardedObjects become what the engine works with, and come back.

::

    ShardedTensor ── chunk_of ──▶ core.live.tensors.Chunk      (metadata)
                  ── live ──────▶ core.live.tensors.LiveTensor (its memory, on the CPU)
    Catalog ── sharded_metadata ──▶ ShardedTensors and ShardedObjects without data

Loading is ``core.live.load``, saving ``core.live.save`` (by ``prepared_save``): the engine that converts files, with
memory as one end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from core.arrays.box import Box
from core.catalog.catalog import Catalog
from core.dist_checkpointing._engine.batches import batches
from core.dist_checkpointing._engine.torch_dtypes import dtype_name, torch_dtype
from core.dist_checkpointing._values.objects import live_object, load_stream
from core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from core.errors import MissingShardError, UnsupportedError, UsageError
from core.files.store import LocalStore
from core.formats.registry import sniffed
from core.formats.zarr.fill import missing_chunk, unstored
from core.live.load import fill
from core.live.tensors import Chunk, LiveTensor
from core.megatron.optimizer.sharded.read import in_true_shapes


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
def opened(checkpoint_dir: str | Path) -> Iterator[tuple[Catalog, LocalStore]]:
    """The catalog and the files of one checkpoint's directory, tensors in their true shapes.

    Args:
        checkpoint_dir: the directory itself, no training root.

    Raises:
        CheckpointingException: it is not there, not whole, or in no known format; absent zarr chunks are errors, as
            Megatron's backend writes all.
    """
    with closing(LocalStore(Path(checkpoint_dir))) as store:
        catalog = sniffed(store).read(store)
        for tensor in unstored(catalog):
            raise missing_chunk(tensor)
        yield in_true_shapes(catalog, catalog.tensors), store


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
            key: whole_tensor(meta.key, torch_dtype(meta.dtype), meta.shape) for key, meta in catalog.tensors.items()
        }
        if not tensors_only:
            for key in catalog.objects:
                found[key] = ShardedObject.empty_from_unique_key(key)
        return found


def whole_tensor(key: str, dtype: torch.dtype, shape: Sequence[int]) -> ShardedTensor:
    """A ShardedTensor without data that is all of a global tensor."""
    size = tuple(shape)
    return ShardedTensor(key, None, dtype, size, size, (0,) * len(size), (1,) * len(size))


def load_tensors(tensors: Iterable[ShardedTensor], checkpoint_dir: str | Path) -> None:
    """Fills the data of ShardedTensors from a checkpoint of any layout; no collective call.

    Args:
        tensors: with allocated ``data``, on any device and with any strides. They may be cut otherwise than in the
            checkpoint, be of another dtype, or be a flattened range; those with ``allow_shape_mismatch`` are zero where
            the checkpoint has nothing.
        checkpoint_dir: of a distributed checkpoint.

    Raises:
        CheckpointingException: a tensor or a region of it is not there, a shape differs, or bytes are damaged.
    """
    pairs = []
    for tensor in tensors:
        if tensor.data is None:
            raise UsageError("the tensor has no data to be filled", key=tensor.key, hint="call init_data first")
        pairs.append((chunk_of(tensor), tensor.data))
    with opened(checkpoint_dir) as (catalog, store):
        fill_tensors(pairs, catalog, store)


def fill_tensors(
    pairs: Iterable[tuple[Chunk, torch.Tensor]], catalog: Catalog, store: LocalStore, *, checks_crc: bool = True
) -> None:
    """Fills tensors with regions of an opened checkpoint, by way of host memory if they lie on a device or not dense.

    Args:
        pairs: the regions, each with the tensor that gets it; chunks of one key are of one dtype.
        catalog, store: the checkpoint, with global tensors under the same keys.
        checks_crc: compare checksums where the checkpoint states them and whole records are read.

    Raises:
        CheckpointingException: as ``core.live.load.fill``.
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
    for batch in batches(aside, lambda pair: pair[0].n_bytes):
        hosts = [torch.empty(data.shape, dtype=data.dtype) for _, data in batch]
        made = [live(chunk, host) for (chunk, _), host in zip(batch, hosts, strict=True)]
        fill(made, catalog, store, checks_crc=checks_crc)
        for (_, data), host in zip(batch, hosts, strict=True):
            data.copy_(host)


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
        value = live_value(item.value, catalog, store, key=item.key)
    if not isinstance(value, list) or len(value) != 1:
        raise UnsupportedError("the object is not a list of one value, as that of a ShardedObject is", key=item.key)
    return value[0]


def _others(catalog: Catalog, key: str) -> str | None:
    """Which shards of an object there are."""
    there = [name for name in catalog.objects if name.rpartition("/")[0] == key]
    return f"of {key} there are: {', '.join(there[:8])}" if there else None


def live_value(inert: object, catalog: Catalog, store: LocalStore, *, key: str | None = None) -> object:
    """The live value of an inert one of an opened checkpoint; tensors inside are read.

    Args:
        inert: a value of the catalog.
        catalog, store: the checkpoint.
        key: the object's name, for errors.

    Raises:
        UnsafeError: it names what runs code; objects of unknown classes are no error, see ``objects``.
        CheckpointingException: any other, from reading.
    """
    return live_object(inert, lambda name: _hidden_tensor(catalog, store, name), key=key)


def _hidden_tensor(catalog: Catalog, store: LocalStore, key: str) -> torch.Tensor:
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
        if catalog.common is None:
            raise UnsupportedError(
                f"a {catalog.format} checkpoint has no common state",
                file=str(checkpoint_dir),
                hint="ckpt convert --to torch_dist makes one that has",
            )
        value = live_value(catalog.common, catalog, store)
        assert isinstance(value, dict), "the format has checked it"
        return value


def on_host(chunk: Chunk, data: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory, as it is if it lies there in a way that ``live`` takes."""
    host = data.cpu().resolve_conj().resolve_neg()
    return host if chunk.flat is None else host.contiguous()
