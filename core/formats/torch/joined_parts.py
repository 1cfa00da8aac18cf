"""Join the parts of a tensor of torchao's classes whose chunks were saved one by one.

::

    exp_avg  (256, 64) ─┬─ [0:128]    codes (128, 64)  scale (32,)  qmap (256,)
                        └─ [128:256]  codes (128, 64)  scale (32,)  qmap (256,)

    exp_avg.codes (256, 64)   exp_avg.scale (64,)   exp_avg.qmap (256,), the same in all chunks

A scale belongs to a block of consecutive states. Chunks of the first axis end where blocks end
(torchao quantizes no others), so their parts are consecutive parts of the tensor's. The weights of
torchao are one chunk each: their parts are those of the tensor.

Not supported, the tensor stays one that cannot be read: chunks of another axis, whose blocks are
not those of the tensor; chunks of different classes or settings; weights in several chunks.

Source: torchao 0.18.0 ``optim/subclass_*.py``; checkpoints that torch 2.13 wrote of its optimizers
under FSDP2, in tests/golden/quantized_states.tar.xz.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from core.arrays.box import Box, Shape
from core.engine.catalog.catalog import StoredObject
from core.engine.catalog.stored import StoredArray, array_name
from core.engine.catalog.tensor import Fragment, Tensor, bind_argument
from core.formats.torch.tree import TorchTree
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping
from core.values import dataclass

_STATES = ("OptimState4bit", "OptimState8bit", "OptimStateFp8")
_PER_CHUNK = ("codes", "scale")
"""Parts of a state of which each chunk has its own elements; others are the same in all."""
_SHAPES = ("shape", "_shape")
"""Settings that are the shape of a chunk."""


@dataclass(frozen=True, slots=True)
class JoinedParts:
    """The parts of a tensor.

    Args:
        tensors, objects: its parts and settings, by key.
        skeleton: the mapping of the parts, with a leaf for each.
    """

    tensors: Mapping[str, Tensor]
    objects: Mapping[str, StoredObject]
    skeleton: Mapping[object, object]


def joined_parts(
    key: str, shape: Shape, chunks: Sequence[tuple[Box, TorchTree]]
) -> JoinedParts | str:
    """Join the parts of a tensor's chunks.

    Args:
        key, shape: the tensor.
        chunks: each chunk's box, and its item, parsed with the key's prefix; at least one. Each
            value is the mapping that ``parts_of_tensor`` makes.

    Returns:
        The reason, if they cannot be joined.
    """
    chunks = sorted(chunks, key=lambda chunk: chunk[0].offset)
    (_, first_tree) = chunks[0]
    settings = _settings(first_tree)
    if any(_settings(tree) != settings for _, tree in chunks):
        return "torchao tensor with chunks of different classes or settings"
    if len(chunks) > 1 and settings.get("class") not in _STATES:
        return f"torchao {settings.get('class')} that is split into several chunks"
    # Together the chunks must be rows of the tensor, one after the other.
    start = 0
    for box, _ in chunks:
        if box.offset != (start, *(0,) * (len(shape) - 1)) or box.shape[1:] != shape[1:]:
            return f"torchao {settings.get('class')} split along an axis other than 0"
        start += box.shape[0]
    if start != shape[0]:
        return f"torchao {settings.get('class')} with incomplete chunks"

    n_of_row = prod(shape[1:])
    tensors: dict[str, Tensor] = {}
    fragments_of: dict[str, list[Fragment]] = {}
    for box, tree in chunks:
        for part, array in tree.arrays.items():
            name = part.rpartition(".")[2]
            extents, offset = array.shape, (0,) * len(array.shape)
            if len(chunks) > 1 and name in _PER_CHUNK:
                # Elements of the part for each element of the tensor.
                n_all, n_chunk = array.shape[0] * prod(shape), prod(box.shape)
                if n_all % n_chunk or (array.shape[0] * box.offset[0] * n_of_row) % n_chunk:
                    return f"torchao {settings.get('class')} with a block that spans two chunks"
                begin = array.shape[0] * box.offset[0] * n_of_row // n_chunk
                extents = (n_all // n_chunk, *array.shape[1:])
                offset = (begin, *offset[1:])
            elif part in fragments_of:
                # Readers of DCP take either copy, so that the table of one chunk serves.
                first = fragments_of[part][0].array
                if first is None or not _is_copy(array, first):
                    return f"torchao {settings.get('class')} whose chunks have different {name}"
                continue
            fragments = fragments_of.setdefault(part, [])
            tensor = Tensor(array.dtype, extents, bind_argument(tuple, fragments))
            if tensors.setdefault(part, tensor) != tensor:
                return f"torchao {settings.get('class')} whose chunks do not fit together"
            named = replace(array, name=array_name(part, box))
            at = (0,) * len(array.shape)
            fragments.append(Fragment(Box(offset, array.shape), named, at))
    # The shape that is recorded is that of a chunk.
    objects = dict(first_tree.objects)
    leaves: dict[object, object] = {}
    for setting, item in (as_mapping(first_tree.value) or {}).items():
        part = f"{key}.{setting}"
        if isinstance(item, TensorLeaf):
            leaves[setting] = replace(item, key=part)
        else:
            value = list(shape) if setting in _SHAPES else item
            if part not in objects or setting in _SHAPES:
                objects[part] = StoredObject(part, value=value)
            leaves[setting] = ObjectLeaf(part)
    return JoinedParts(tensors, objects, leaves)


def _settings(tree: TorchTree) -> dict[object, object]:
    """Return what a mapping of parts has beside tensors, except for the shape."""
    return {
        name: item
        for name, item in (as_mapping(tree.value) or {}).items()
        if not isinstance(item, TensorLeaf) and name not in _SHAPES
    }


def _is_copy(array: StoredArray, other: StoredArray) -> bool:
    """Return whether two arrays are the same, according to the CRC-32 that their zips record."""
    crc = array.extent.crc
    is_alike = (array.dtype, array.shape) == (other.dtype, other.shape)
    return is_alike and crc is not None and crc == other.extent.crc
