"""Pieces of tensors in safetensors files, as written by torch's Hugging Face storage writer.

On disk, one file per rank and file number, ``shard-0000R-model-0000i-of-0000n.safetensors``, with
this in its header::

    "__metadata__": {"format": "pt", "DCP_VERSION": "1.0",
                     "DCP_SHARDING_INFO": "{\\"w\\": {\\"saved_offsets\\": [65, 0]}, …}"}

A tensor of the file is the piece of a global tensor that begins at its offsets (in elements). The
global shape is not recorded: it is the farthest end of all pieces, and the pieces must tile it. If
the files of the last ranks were missing, only the shape would be smaller, so sizes are also
compared with the index and ``config.json``.

Versions: 1.0. Tensors without axes, integer tensors and bool tensors are read like others (torch
2.13's own consolidation writes zeros for the first kind and fails for the others). Equal pieces in
several files are replicas.

Not supported, refused by name: tensors with two elements per byte, divided along their last axis.

Source: torch 2.13
``torch/distributed/checkpoint/{hf_storage,_hf_utils,_consolidate_hf_safetensors}.py``; written by
it, pinned in tests/golden (``torch_dcp/hf_storage_dp2``, ``hf_storage_consolidated_dp2``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

from core.arrays.box import Box, Shape, full_box
from core.arrays.coverage import first_hole, first_overlap
from core.arrays.dtypes import DTYPES
from core.engine.catalog.stored import StoredArray
from core.engine.catalog.tensor import Fragment, Tensor, bind_argument
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.formats.huggingface.files import config_number
from core.formats.safetensors.header import Header
from core.formats.safetensors.json_text import scanned
from core.pickle.fields import FieldReader

SHARDING_INFO = "DCP_SHARDING_INFO"
VERSION = "DCP_VERSION"
_KNOWN_VERSION = "1.0"


def has_pieces(header: Header) -> bool:
    """Return whether the metadata of a file marks its tensors as pieces."""
    return SHARDING_INFO in header.metadata


def join_pieces(headers: Iterable[Header]) -> dict[str, Tensor]:
    """Assemble the global tensors of some files, by key in the order of the files.

    Files without sharding information contain complete tensors.

    Raises:
        CorruptError: pieces overlap, differ in dtype or axes, or the sharding information does not
            match the file.
        MissingShardError: a region of a tensor is in no piece.
        UnsupportedError: the version is unknown, or a tensor with two elements per byte is divided
            along its last axis.
    """
    # Collect the pieces of each tensor. The offsets of packed tensors count elements, but their
    # shapes count bytes, so these must not be divided along the last axis.
    pieces_of_key: dict[str, list[tuple[Box, StoredArray]]] = {}
    for header in headers:
        offset_of = _piece_offsets(header)
        for key, array in header.arrays.items():
            offset = offset_of[key]
            if DTYPES[array.dtype].kind == "packed" and offset and offset[-1]:
                raise UnsupportedError(
                    f"a {array.dtype} tensor that is split along its last axis is not supported",
                    file=header.file,
                    key=key,
                )
            pieces_of_key.setdefault(key, []).append((Box(offset, array.shape), array))

    # The global shape is the farthest end of all pieces, which must then tile it.
    tensors: dict[str, Tensor] = {}
    for key, pieces in pieces_of_key.items():
        box, first = pieces[0]
        for other, array in pieces:
            if array.dtype != first.dtype or other.rank != box.rank:
                raise CorruptError(
                    f"one piece is {array.dtype} with {other.rank} axes, but another is "
                    f"{first.dtype} "
                    f"with {box.rank} axes",
                    file=array.extent.file,
                    key=key,
                )
        ends = zip(*(box.end for box, _ in pieces), strict=True)
        shape = tuple(map(max, ends))
        fragments = _tiling_fragments(key, shape, pieces)
        tensors[key] = Tensor(first.dtype, shape, bind_argument(tuple, fragments))
    return tensors


def _piece_offsets(header: Header) -> dict[str, Shape]:
    """Return the offset of every tensor of a file in its global tensor, in elements.

    Raises:
        CorruptError: the sharding information is malformed or does not match the file.
        UnsupportedError: the version of the sharding information is unknown.
    """
    text = header.metadata.get(SHARDING_INFO)
    if text is None:
        return {key: (0,) * len(array.shape) for key, array in header.arrays.items()}
    version = header.metadata.get(VERSION, _KNOWN_VERSION)
    if version != _KNOWN_VERSION:
        raise UnsupportedError(
            f"{VERSION} {version[:40]!r} is not supported; the only supported version is "
            f"{_KNOWN_VERSION!r}",
            file=header.file,
            hint="update ckpt-toolkit",
        )
    # Each entry must match a tensor of the file, and each tensor an entry.
    offsets: dict[str, Shape] = {}
    for key, fields in scanned(text.encode(), file=header.file, what=SHARDING_INFO):
        array = header.arrays.get(key)
        if array is None:
            raise CorruptError(
                f"{SHARDING_INFO} lists a tensor that is not in the file", file=header.file, key=key
            )
        offset = fields.get("saved_offsets")
        offsets[key] = FieldReader(header.file, key).read_shape(
            offset, "saved_offsets", n=len(array.shape)
        )
    unlisted = next((key for key in header.arrays if key not in offsets), None)
    if unlisted is not None:
        raise CorruptError(
            f"{SHARDING_INFO} does not list the tensor", file=header.file, key=unlisted
        )
    return offsets


def _tiling_fragments(
    key: str, shape: Shape, pieces: list[tuple[Box, StoredArray]]
) -> tuple[Fragment, ...]:
    """Return the pieces of a tensor as fragments, after checking that they tile it.

    Raises:
        CorruptError: two different pieces overlap.
        MissingShardError: a region of the tensor is in no piece.
    """
    n_elements = prod(shape)
    # An empty piece covers nothing, so it is only kept as the one fragment of an empty tensor.
    if n_elements:
        pieces = [(box, array) for box, array in pieces if not box.is_empty]
    else:
        pieces = pieces[:1]

    # Equal pieces are replicas, of which the first is named in errors. Different ones must neither
    # overlap nor leave a hole.
    array_of = dict(reversed(pieces))
    boxes = list(array_of)
    overlap = first_overlap(boxes) if n_elements else None
    if overlap is not None:
        first, other = boxes[overlap[0]], boxes[overlap[1]]
        raise CorruptError(
            f"two pieces overlap: the piece at offset {list(first.offset)} with shape "
            f"{list(first.shape)} in {array_of[first].extent.file}, and the piece at offset "
            f"{list(other.offset)} with shape {list(other.shape)} in this file",
            file=array_of[other].extent.file,
            key=key,
        )
    if sum(box.n_elements for box in boxes) != n_elements:
        hole = first_hole(full_box(shape), boxes)
        assert hole is not None
        raise MissingShardError(
            f"no piece contains the region at offset {list(hole.offset)} with shape "
            f"{list(hole.shape)} of the tensor, which has shape {list(shape)}",
            key=key,
            hint="copy the checkpoint again, with the files of all ranks",
        )
    return tuple(
        Fragment(box, replace(array, name=f"{key}@{array.extent.file}"), (0,) * box.rank)
        for box, array in pieces
    )


def check_sizes(tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> None:
    """Raise if tensors assembled from pieces are smaller than in the model's configuration.

    Raises:
        MissingShardError: an embedding has fewer rows than the vocabulary, or an embedding or final
            norm is smaller than the hidden size.
        CorruptError: a size in the configuration is not a positive number.
    """
    config_sizes = {name: config_number(config, name) for name in ("vocab_size", "hidden_size")}
    for key, tensor in tensors.items():
        for suffixes, axis, name in _SIZES_IN_CONFIG:
            # Embeddings may be larger: training pads the vocabulary.
            min_size = config_sizes[name]
            if (
                key.endswith(suffixes)
                and axis < len(tensor.shape)
                and min_size is not None
                and tensor.shape[axis] < min_size
            ):
                raise MissingShardError(
                    f"the pieces form a tensor of shape {list(tensor.shape)}, but {name} in "
                    f"config.json is {min_size}",
                    key=key,
                    hint="the last ranks' files may be missing, so copy the files of all "
                    "ranks; if config.json belongs to a different model, replace it",
                )


_SIZES_IN_CONFIG = (
    (("embed_tokens.weight", "wte.weight"), 0, "vocab_size"),
    (("embed_tokens.weight",), 1, "hidden_size"),
    (("model.norm.weight",), 0, "hidden_size"),
)
"""Suffixes of tensor names, axis, and the size in config.json that is the minimum for this axis."""
