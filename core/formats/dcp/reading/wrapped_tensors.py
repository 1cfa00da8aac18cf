"""Tensors of torchao's classes in DCP items, which become their parts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from core.arrays.dtypes import dtype_of, itemsize
from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.tensor import Tensor
from core.formats.dcp.columns import DcpTensor
from core.formats.dcp.metadata import DcpMetadata
from core.formats.torch.tree import parse
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping
from core.pickle.nesting import LeafEntry, map_leaves

if TYPE_CHECKING:
    from core.files.store import ReadStore
    from core.formats.torch.joined_parts import JoinedParts


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
        f"torchao tensors are split into their parts ({listed}): values, scales and settings "
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
