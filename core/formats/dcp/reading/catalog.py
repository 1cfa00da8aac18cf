"""The catalog of a DCP directory: tensors by chunks, objects as hidden streams, the nesting.

Tensors of torchao's classes in DCP items become their parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from core.arrays.dtypes import dtype_of, itemsize
from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.facets import DcpFacts, TorchDistFacts
from core.engine.catalog.stored import Extent, StoredArray, array_name
from core.engine.catalog.tensor import Fragment, Tensor, bind_argument, tensors_of, whole_fragment
from core.errors import CorruptError, UnsupportedError
from core.formats.dcp.columns import DcpTensor
from core.formats.dcp.metadata import DcpItem, DcpMetadata
from core.formats.dcp.reading.data_files import METADATA
from core.formats.torch.item import torch_item
from core.formats.torch.tree import parse
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping
from core.pickle.nesting import LeafEntry, ListIndex, Path, map_leaves, nest_leaves

if TYPE_CHECKING:
    from core.files.store import ReadStore
    from core.formats.torch.joined_parts import JoinedParts


def build_catalog(
    metadata: DcpMetadata,
    *,
    format: str,
    without: Sequence[str] = (),
    store: ReadStore | None = None,
) -> Catalog:
    """Build the catalog of checked metadata.

    Args:
        metadata: metadata with tensors and objects.
        format: ``dcp`` or ``torch_dist``.
        without: keys of objects to skip.
        store: the checkpoint. Objects inside zstd frames are read at once, as their length is only
            known after inflating; without a store they are refused.

    Raises:
        UnsupportedError, CorruptError, UnsafeError: such an object cannot be read.
    """
    list_chunks = partial(_chunks, metadata)
    tensors = {
        key: Tensor(tensor.dtype, tensor.shape, bind_argument(list_chunks, key))
        for key, tensor in metadata.tensors.items()
    }
    # Read the objects inside zstd frames. The tensors inside them are hidden.
    objects, packed_arrays = _read_packed_objects(metadata, without, store)
    hidden: dict[str, Tensor] = {}

    # All other objects become hidden streams, to be read when they are needed.
    stream_items: dict[str, DcpItem] = {}

    def find_stream(raw_key: str) -> tuple[Fragment]:
        item = stream_items[raw_key]
        extent = Extent(item.file, item.offset)
        return (whole_fragment(StoredArray(raw_key, "uint8", (item.n_bytes,), extent)),)

    for key, item in metadata.objects.items():
        if key in without or key in objects:
            continue
        raw_key = f"raw:{key}"
        while raw_key in tensors:
            raw_key = f"raw:{raw_key}"
        stream_items[raw_key] = item
        hidden[raw_key] = Tensor("uint8", (item.n_bytes,), bind_argument(find_stream, raw_key))
        objects[key] = StoredObject(key, raw_key=raw_key)
    hidden |= tensors_of(packed_arrays)

    # Entries keep the order of the file.
    catalog = Catalog(
        format=format,
        version=metadata.version,
        tensors=tensors,
        objects={key: objects[key] for key in metadata.objects if key in objects},
        hidden=hidden,
        skeleton=_skeleton(metadata, objects),
    ).with_facet(DcpFacts(item_files=tuple(metadata.files), orphans=metadata.orphans))
    if metadata.mcore_data is None:
        return catalog
    return catalog.with_facet(TorchDistFacts(mcore_data=metadata.mcore_data))


def _read_packed_objects(
    metadata: DcpMetadata, without: Sequence[str], store: ReadStore | None
) -> tuple[dict[str, StoredObject], dict[str, StoredArray]]:
    """Read the values of compressed objects, and the tensors inside them.

    Args:
        without, store: the arguments of ``build_catalog``.
    """
    objects: dict[str, StoredObject] = {}
    arrays_inside: dict[str, StoredArray] = {}
    for key, transforms in metadata.object_descriptors.items():
        item = metadata.objects.get(key)
        if item is None or key in without:
            continue
        if store is None:
            raise UnsupportedError(
                "compressed objects are not supported in this format",
                file=item.file,
                key=key,
            )
        from core.formats.dcp.zstd_streams import read_inflated_object

        value, arrays = read_inflated_object(store, item, transforms, key=key)
        objects[key] = StoredObject(key, value=value)
        arrays_inside |= arrays
    return objects, arrays_inside


def _chunks(metadata: DcpMetadata, key: str) -> list[Fragment]:
    """Return the chunks of a tensor as fragments."""
    tensor = metadata.tensors[key]
    origin = (0,) * len(tensor.shape)
    fragments = []
    for row, (box, item) in enumerate(metadata.chunks(key), tensor.first):
        transforms = metadata.descriptors.get(row)
        if transforms:
            from core.formats.dcp.zstd_streams import StreamItem

            n_bytes = prod(box.shape) * itemsize(tensor.dtype)
            extent = Extent(
                item.file, item.offset, encoding=StreamItem(transforms, item.n_bytes, n_bytes)
            )
        elif metadata.raw_files and metadata.file_index[row] in metadata.raw_files:
            # Elements in a safetensors file: their position is final.
            extent = Extent(item.file, item.offset)
        else:
            # A torch zip: `StoredArray.locate` finds the elements in it later.
            extent = Extent(item.file, item.offset, item=torch_item(item.n_bytes))
        array = StoredArray(array_name(key, box), tensor.dtype, box.shape, extent)
        fragments.append(Fragment(box, array, origin))
    return fragments


def _skeleton(metadata: DcpMetadata, objects: Mapping[str, StoredObject]) -> object:
    """Build the nesting that planner_data describes; None without planner_data.

    Raises:
        CorruptError: two entries have the same path, or a path is empty.
    """
    if metadata.planner_data is None:
        return None
    # The order of planner_data is that of the state dict. Entries without a path are at the root.
    keys = {**metadata.tensors, **objects}.keys()
    ordered_keys = dict.fromkeys((*(key for key in metadata.planner_data if key in keys), *keys))
    leaves: dict[Path, object] = {}
    for key in ordered_keys:
        path = metadata.planner_data.get(key, (key,))
        full_path: Path = tuple(ListIndex(part) if isinstance(part, int) else part for part in path)
        if full_path in leaves or not full_path:
            raise CorruptError(
                f"planner_data assigns the path {path} to two entries", file=METADATA, key=key
            )
        leaves[full_path] = ObjectLeaf(key) if key in objects else TensorLeaf(key)
    return nest_leaves(leaves)


def with_parts(catalog: Catalog, metadata: DcpMetadata, store: ReadStore) -> Catalog:
    """Replace tensors of torchao's classes by their parts.

    Raises:
        CorruptError, TruncatedError, UnsafeError: such an item is damaged or hostile.
    """
    wrappers = _possible_wrappers(metadata)
    if not wrappers:
        return catalog
    from core.formats.torch.joined_parts import JoinedParts

    parts_of: dict[str, JoinedParts] = {}
    unsupported: dict[str, str] = {}
    for key, tensor in wrappers.items():
        parts = _parts_of(metadata, key, tensor, store)
        if isinstance(parts, JoinedParts):
            parts_of[key] = parts
        elif parts is not None:
            unsupported[key] = parts
    if not parts_of and not unsupported:
        return catalog

    # The parts take the place of their tensors; a tensor that cannot be read is an object.
    tensors: dict[str, Tensor] = {}
    for key, meta in catalog.tensors.items():
        if key in parts_of:
            tensors |= parts_of[key].tensors
        elif key not in unsupported:
            tensors[key] = meta

    def leaf_of(entry: LeafEntry) -> object:
        if entry.key in parts_of and isinstance(entry.leaf, TensorLeaf):
            return parts_of[entry.key].skeleton
        return ObjectLeaf(entry.key) if entry.key in unsupported else entry.leaf

    objects = {key: StoredObject(key, refused=kind) for key, kind in unsupported.items()}
    objects |= {key: item for joined in parts_of.values() for key, item in joined.objects.items()}
    classes = Counter(str(item.objects[f"{key}.class"].value) for key, item in parts_of.items())
    listed = ", ".join(f"{n} × {name}" for name, n in classes.items())
    note = (
        f"torchao tensors are split into parts ({listed}); their values, scales and settings "
        "become separate entries"
    )
    result = replace(
        catalog,
        tensors=tensors,
        objects={**catalog.objects, **objects},
        skeleton=None if catalog.skeleton is None else map_leaves(catalog.skeleton, leaf_of),
    )
    return result.noted([note]) if parts_of else result


def _possible_wrappers(metadata: DcpMetadata) -> dict[str, DcpTensor]:
    """Return the tensors that may be of torchao's classes; {} if none of the checkpoint is.

    ``.metadata`` does not tell the class of a tensor. If an item is smaller than the elements of
    its chunk, its tensor is no plain one; then any tensor of floats may be of these classes.
    """
    raw_files = metadata.raw_files or ()
    tensors = {
        key: tensor
        for key, tensor in metadata.tensors.items()
        if dtype_of(tensor.dtype).kind == "float"
        and tensor.shape
        # Items without a zip hold plain tensors only.
        and not any(
            row in metadata.descriptors or metadata.file_index[row] in raw_files
            for row in range(tensor.first, tensor.first + tensor.n_chunks)
        )
    }
    # By the columns, as there may be millions of chunks.
    has_wrappers = any(
        metadata.item_bytes[tensor.first + number] < prod(metadata.sizes[at : at + rank]) * width
        for tensor in tensors.values()
        for rank, width in ((len(tensor.shape), itemsize(tensor.dtype)),)
        for number, at in enumerate(
            range(tensor.start, tensor.start + tensor.n_chunks * rank, rank)
        )
    )
    return tensors if has_wrappers else {}


def _parts_of(
    metadata: DcpMetadata, key: str, tensor: DcpTensor, store: ReadStore
) -> JoinedParts | str | None:
    """Read the parts of a tensor of torchao's classes.

    Returns:
        The parts, the reason if they cannot be joined, or None for a plain tensor.
    """
    from core.formats.torch.joined_parts import joined_parts

    chunks = []
    for box, item in metadata.chunks(key):
        tree = parse(
            store,
            item.file,
            start=item.offset,
            n_bytes=item.n_bytes,
            prefix=f"{key}.",
            keeps_modules=True,
        )
        if as_mapping(tree.value) is None:
            return None
        chunks.append((box, tree))
    return joined_parts(key, tensor.shape, chunks) if chunks else None
