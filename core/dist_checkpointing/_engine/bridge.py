"""Conversion of ShardedTensors and ShardedObjects into the engine's types and back.

::

    ShardedTensor ── chunk_of ──────▶ core.dist_checkpointing._live.tensors.Chunk      (metadata)
                  ── live_tensor ───▶ core.dist_checkpointing._live.tensors.LiveTensor (its memory,
                  on the CPU)
    Catalog ── sharded_metadata ──▶ ShardedTensors and ShardedObjects without data

``core.dist_checkpointing._live.load`` loads, and ``core.dist_checkpointing._live.save`` saves
(through ``prepared_save``). Both use the engine that converts files, with memory in place of the
files on one side.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from core.arrays.box import Box, full_box
from core.arrays.cast import is_supported
from core.arrays.dtypes import dtype_of
from core.dist_checkpointing._engine.torch_dtypes import dtype_name, torch_dtype
from core.dist_checkpointing._live.load import fill
from core.dist_checkpointing._live.tensors import Chunk, LiveTensor
from core.dist_checkpointing._values.objects import live_object, load_stream
from core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from core.engine.catalog.catalog import Catalog
from core.errors import MissingShardError, UnsupportedError, UsageError
from core.files.source_store import SourceStore, open_store
from core.files.store import ReadStore
from core.files.url import find_location
from core.formats.registry import sniffed
from core.formats.zarr.fill import missing_chunk, unstored
from core.megatron.optimizer.sharded.read import in_true_shapes

T = TypeVar("T")
BATCH_BYTES = 512 << 20
"""Approximate size of the tensors that pass through host memory at once, in bytes."""


def build_chunk(tensor: ShardedTensor) -> Chunk:
    """Return the region of the global tensor that a ShardedTensor stands for.

    Raises:
        UnsupportedError: checkpoints do not support the dtype of the tensor.
    """
    name = dtype_name(tensor.dtype, key=tensor.key)
    # The local shape lacks the prepended axes, along which the local tensor has the extent 1.
    box = Box(
        tuple(tensor.global_offset), (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
    )
    flat = tensor.flattened_range
    return Chunk(
        tensor.key,
        name,
        tuple(tensor.global_shape),
        box,
        None if flat is None else (flat.start, flat.stop),
        bool(tensor.allow_shape_mismatch),
    )


def live_tensor(chunk: Chunk, data: torch.Tensor) -> LiveTensor:
    """Return a chunk with the memory of a tensor on the CPU; the tensor must outlive it.

    Args:
        chunk: the region that the tensor holds.
        data: a strided tensor, dense for a flat range. Its shape is that of the chunk's box,
            without leading axes of extent 1, or has one axis for a flat range.

    Raises:
        UsageError: the tensor has another dtype or another number of elements than the chunk.
        UnsupportedError: the tensor is sparse.
    """
    check_data(chunk, data)
    if data.is_contiguous():
        return LiveTensor(chunk, memory_of(data))
    assert chunk.flat is None, "the caller makes flat ranges dense and keeps the copy"
    # Leading axes have the extent 1, so their strides do not matter.
    return LiveTensor(
        chunk, memory_of(data), (0,) * (chunk.box.rank - data.dim()) + tuple(data.stride())
    )


def check_data(chunk: Chunk, data: torch.Tensor) -> None:
    """Raise unless a tensor has the dtype and the number of elements of a chunk.

    Raises:
        UsageError: the tensor has another dtype or another number of elements.
        UnsupportedError: the tensor is sparse.
    """
    if data.numel() != chunk.n_elements or dtype_name(data.dtype, key=chunk.key) != chunk.dtype:
        raise UsageError(
            f"the data has {data.numel()} elements of {data.dtype}, but the metadata declares "
            f"{chunk.n_elements} elements of {chunk.dtype}",
            key=chunk.key,
        )
    if data.layout != torch.strided:
        raise UnsupportedError(
            f"checkpoints cannot store tensors with layout {data.layout}", key=chunk.key
        )


def memory_of(data: torch.Tensor) -> memoryview:
    """Return the bytes from a tensor's first element to the end of its last one.

    The memory is writable, and valid as long as the tensor is.
    """
    # An empty tensor may have no address.
    if data.numel() == 0:
        return memoryview(bytearray())
    n_spanned = 1 + sum((n - 1) * step for n, step in zip(data.shape, data.stride(), strict=True))
    n_bytes = n_spanned * data.element_size()
    return memoryview((ctypes.c_ubyte * n_bytes).from_address(data.data_ptr())).cast("B")


@contextmanager
def open_catalog(checkpoint_dir: str | Path) -> Iterator[tuple[Catalog, SourceStore]]:
    """Open the catalog and the files of a checkpoint directory, with tensors in their true shapes.

    Args:
        checkpoint_dir: the checkpoint itself, not a training root.

    Raises:
        CheckpointingException: the checkpoint is missing, incomplete, or in an unknown format.
    """
    with closing(open_store(find_location(checkpoint_dir))) as store:
        catalog = sniffed(store).read(store)
        # Zarr readers take a missing chunk for zeros, but Megatron's backend writes every chunk.
        for tensor in unstored(catalog):
            raise missing_chunk(tensor)
        yield in_true_shapes(catalog, catalog.tensors), store


def sharded_metadata(
    checkpoint_dir: str | Path, *, tensors_only: bool = False
) -> dict[str, ShardedBase]:
    """Return the metadata of a checkpoint's tensors and objects, as if they were not sharded.

    Args:
        checkpoint_dir: of a distributed checkpoint.
        tensors_only: skip ShardedObjects.

    Returns:
        A ShardedTensor without data for each complete tensor, by key, and the ShardedObjects
        without data, by unique key.

    Raises:
        CheckpointingException: the checkpoint cannot be read.
    """
    with open_catalog(checkpoint_dir) as (catalog, _):
        metadata: dict[str, ShardedBase] = {
            key: build_whole_tensor(key, torch_dtype(tensor.dtype), tensor.shape)
            for key, tensor in catalog.tensors.items()
        }
        if not tensors_only:
            for key in catalog.objects:
                metadata[key] = ShardedObject.empty_from_unique_key(key)
        return metadata


def build_whole_tensor(key: str, dtype: torch.dtype, shape: Sequence[int]) -> ShardedTensor:
    """Return a ShardedTensor without data that stands for a complete global tensor."""
    size = tuple(shape)
    return ShardedTensor(key, None, dtype, size, size, (0,) * len(size), (1,) * len(size))


def load_tensors(tensors: Iterable[ShardedTensor], checkpoint_dir: str | Path) -> None:
    """Load the data of ShardedTensors from a checkpoint of any layout; not collective.

    Args:
        tensors: tensors with allocated ``data``, on any device and with any strides. They may be
            sharded in another way than the checkpoint, have another dtype, or be a flattened range.
            Those with ``allow_shape_mismatch`` are zero where the checkpoint has no data.
        checkpoint_dir: of a distributed checkpoint.

    Raises:
        UsageError: a tensor has no data.
        CheckpointingException: a tensor or a region of it is missing, a shape differs, or bytes are
            damaged.
    """
    pairs = []
    for tensor in tensors:
        if tensor.data is None:
            raise UsageError(
                "the tensor has no data to load into", key=tensor.key, hint="call init_data first"
            )
        pairs.append((build_chunk(tensor), tensor.data))
    with open_catalog(checkpoint_dir) as (catalog, store):
        fill_tensors(pairs, catalog, store)


def fill_tensors(
    pairs: Iterable[tuple[Chunk, torch.Tensor]],
    catalog: Catalog,
    store: ReadStore,
    *,
    checks_crc: bool = True,
) -> None:
    """Read regions of an opened checkpoint into tensors, with the values of ``Tensor.copy_``.

    Tensors that are on a device or not dense are filled through host memory, and so are those of
    dtypes that the engine does not cast to, such as a fraction to an integer: torch casts these.

    Args:
        pairs: the regions, each with its tensor; chunks with the same key have the same dtype.
        catalog, store: the checkpoint, with global tensors under the same keys.
        checks_crc: compare checksums where the checkpoint has them and complete records are read.

    Raises:
        UnsupportedError: torch does not cast a stored dtype to that of its tensor.
        CheckpointingException: as ``core.dist_checkpointing._live.load.fill``.
    """
    # Separate the tensors whose memory can be read into. That of a conjugate or negative view has
    # other values than the view.
    direct: list[LiveTensor] = []
    indirect: list[tuple[Chunk, torch.Tensor]] = []
    for chunk, tensor in pairs:
        data = tensor.detach()
        stored = _in_readable_dtype(chunk, catalog)
        if stored is not chunk:
            check_data(chunk, data)
            indirect.append((stored, data))
        elif (
            data.device.type == "cpu"
            and data.is_contiguous()
            and not (data.is_conj() or data.is_neg())
        ):
            direct.append(live_tensor(chunk, data))
        else:
            indirect.append((chunk, data))
    fill(direct, catalog, store, checks_crc=checks_crc)
    # Read the others into host memory, in batches that bound it, and copy them.
    for batch in batches(indirect, lambda pair: pair[0].n_bytes):
        hosts = [torch.empty(data.shape, dtype=torch_dtype(chunk.dtype)) for chunk, data in batch]
        live_tensors = [
            live_tensor(chunk, host) for (chunk, _), host in zip(batch, hosts, strict=True)
        ]
        fill(live_tensors, catalog, store, checks_crc=checks_crc)
        for (_, data), host in zip(batch, hosts, strict=True):
            data.copy_(host)


def _in_readable_dtype(chunk: Chunk, catalog: Catalog) -> Chunk:
    """Return the chunk, in the stored dtype if the engine does not cast from that.

    Raises:
        UnsupportedError: torch does not cast the stored dtype, either.
    """
    tensor = catalog.tensors.get(chunk.key)
    if tensor is None or is_supported(tensor.dtype, chunk.dtype):
        return chunk
    if "packed" in (dtype_of(tensor.dtype).kind, dtype_of(chunk.dtype).kind):
        raise UnsupportedError(
            f"cannot load {tensor.dtype} data into a {chunk.dtype} tensor",
            key=chunk.key,
            hint=f"request the tensor as {tensor.dtype}, and unpack it in your program",
        )
    return replace(chunk, dtype=tensor.dtype)


def load_objects(objects: Iterable[ShardedObject], checkpoint_dir: str | Path) -> dict[str, object]:
    """Load the values of ShardedObjects, by unique key.

    Objects of unknown classes become stand-ins, see ``_values.objects``.

    Raises:
        MissingShardError: an object is not in the checkpoint.
        UnsafeError: an object refers to something that runs code.
        CheckpointingException: an object cannot be read.
    """
    values: dict[str, object] = {}
    with open_catalog(checkpoint_dir) as (catalog, store):
        for requested in objects:
            key = requested.unique_key
            item = catalog.objects.get(key)
            # Name the shards that do exist: often the grid of objects had another size when saved.
            if item is None:
                shards = [
                    name for name in catalog.objects if name.rpartition("/")[0] == requested.key
                ]
                raise MissingShardError(
                    "the object is not in the checkpoint",
                    key=key,
                    file=str(checkpoint_dir),
                    hint=f"request one of these shards of {requested.key}: {', '.join(shards[:8])}"
                    if shards
                    else None,
                )
            # The value is a stream of its own, or a part of the catalog.
            if item.raw_key is not None:
                array = catalog.fragments(item.raw_key)[0].array
                value = load_stream(store, array, key=item.key)
            else:
                value = live_value(item.value, catalog, store, key=item.key)
            # Megatron-Core wraps every ShardedObject in a list with one element.
            if not isinstance(value, list) or len(value) != 1:
                raise UnsupportedError(
                    "the entry is not a ShardedObject, which is stored as a list with one element",
                    key=item.key,
                )
            values[key] = value[0]
    return values


def live_value(
    inert: object, catalog: Catalog, store: ReadStore, *, key: str | None = None
) -> object:
    """Rebuild a live value from an inert value in a catalog, and read the tensors inside.

    Objects of unknown classes become stand-ins, see ``_values.objects``.

    Args:
        inert: a value in the catalog.
        catalog, store: the opened checkpoint.
        key: name of the object, for errors.

    Raises:
        UnsafeError: the value refers to something that runs code.
        CheckpointingException: a tensor inside cannot be read.
    """

    def read_tensor(name: str) -> torch.Tensor:
        tensor = catalog.tensor(name)
        data = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype))
        chunk = Chunk(name, tensor.dtype, tensor.shape, full_box(tensor.shape))
        fill([live_tensor(chunk, data)], replace(catalog, tensors=catalog.hidden), store)
        return data

    return live_object(inert, read_tensor, key=key)


def load_common(checkpoint_dir: str | Path) -> dict[Any, Any]:
    """Load the common state of a distributed checkpoint.

    Objects of unknown classes become stand-ins, see ``_values.objects``.

    Raises:
        CorruptError: the stored value is not a dict.
        UnsafeError: the state refers to something that runs code.
        UnsupportedError: the format has no common state.
        CheckpointingException: the checkpoint cannot be read.
    """
    with open_catalog(checkpoint_dir) as (catalog, store):
        if catalog.common is None:
            raise UnsupportedError(
                f"{catalog.format} checkpoints have no common state",
                file=str(checkpoint_dir),
                hint="convert the checkpoint: ckpt convert SRC DST --to torch_dist",
            )
        value = live_value(catalog.common, catalog, store)
        assert isinstance(value, dict), "the format has checked it"
        return value


def to_host(chunk: Chunk, data: torch.Tensor) -> torch.Tensor:
    """Return the tensor in host memory, dense for a flat range; copied only if necessary."""
    # Resolve lazy conjugation and negation, which the memory of the tensor does not show.
    host = data.cpu().resolve_conj().resolve_neg()
    return host if chunk.flat is None else host.contiguous()


def batches(items: Iterable[T], n_bytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield all items in their order, in lists of at most ``BATCH_BYTES`` each.

    A larger item has a list of its own.

    Args:
        items: the items to divide.
        n_bytes_of: returns the size of an item, in bytes.
    """
    batch: list[T] = []
    total = 0
    for item in items:
        n_bytes = n_bytes_of(item)
        if batch and total + n_bytes > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += n_bytes
    if batch:
        yield batch
