"""TensorPieces of tensors in safetensors files, as torch's Hugging Face storage writer leaves them.

On disk, one file per rank and file number, ``shard-0000R-model-0000i-of-0000n.safetensors``, and in its header::

    "__metadata__": {"format": "pt", "DCP_VERSION": "1.0",
                     "DCP_SHARDING_INFO": "{\\"w\\": {\\"saved_offsets\\": [65, 0]}, …}"}

A tensor of the file is the piece of a global tensor that begins at its offsets (elements). The
global shape is stated
nowhere: it is the farthest end of all pieces. Hence pieces must tile it, and what else says how
large tensors are, an index or ``config.json``, is compared; the last rank's files missing could not
be noticed otherwise.

Versions: 1.0. Tensors without axes, of integers and of bool are read like others (torch 2.13's own
consolidation writes zero for the first kind and fails on the others). Equal pieces in several files
are replicas.

Not supported, refused by name: tensors of two elements a byte that are cut along their last axis.

Source: torch 2.13
``torch/distributed/checkpoint/{hf_storage,_hf_utils,_consolidate_hf_safetensors}.py``; written by
it, pinned in tests/golden (``torch_dcp/hf_storage_dp2``, ``hf_storage_consolidated_dp2``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from core.arrays.box import Box, Shape, full_box
from core.arrays.coverage import first_hole, first_overlap
from core.arrays.dtypes import DTYPES
from core.catalog.catalog import Fragment, TensorMeta
from core.catalog.stored import StoredArray
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.formats.huggingface.files import config_number
from core.formats.safetensors.header import Header
from core.formats.safetensors.json_text import scanned

SHARDING_INFO = "DCP_SHARDING_INFO"
VERSION = "DCP_VERSION"
_KNOWN_VERSION = "1.0"


@dataclass(frozen=True, slots=True)
class TensorPieces:
    """Global tensors and the pieces that tile them.

    Args:
        tensors: by key, in the order of the files.
        fragments: the pieces of each key.
    """

    tensors: dict[str, TensorMeta]
    fragments: dict[str, tuple[Fragment, ...]]


def has_pieces(header: Header) -> bool:
    """Return whether the metadata of a file marks its tensors as pieces."""
    return SHARDING_INFO in header.metadata


def pieces_of(headers: Iterable[Header]) -> TensorPieces:
    """Return the global tensors of some files.

    Files without sharding information hold complete tensors.

    Raises:
        CorruptError: pieces overlap, differ in dtype or axes, or the sharding information does not
            match the file.
        MissingShardError: a region of a tensor is in no piece.
        UnsupportedError: the version is unknown, or a tensor with two elements a byte is cut along
            its last axis.
    """
    pieces_of_key: dict[str, list[tuple[Box, StoredArray]]] = {}
    for header in headers:
        offset_of = _piece_offsets(header)
        for key, array in header.arrays.items():
            offset = (0,) * len(array.shape) if offset_of is None else offset_of[key]
            if DTYPES[array.dtype].kind == "packed" and offset and offset[-1]:
                raise UnsupportedError(
                    f"a {array.dtype} tensor that is cut along its last axis is not supported",
                    file=header.file,
                    key=key,
                )
            pieces_of_key.setdefault(key, []).append((Box(offset, array.shape), array))
    tensors = {key: _global_tensor(key, pieces) for key, pieces in pieces_of_key.items()}
    return TensorPieces(
        tensors,
        {key: _tiling_fragments(tensors[key], pieces) for key, pieces in pieces_of_key.items()},
    )


def _piece_offsets(header: Header) -> dict[str, Shape] | None:
    """Return tensor → offset of its piece, for every tensor of a file.

    None without sharding information.
    """
    text = header.metadata.get(SHARDING_INFO)
    if text is None:
        return None
    version = header.metadata.get(VERSION, _KNOWN_VERSION)
    if version != _KNOWN_VERSION:
        raise UnsupportedError(
            f"{VERSION} {version[:40]!r} is not supported, only {_KNOWN_VERSION!r}",
            file=header.file,
            hint="update ckpt-toolkit",
        )
    # Each entry must match a tensor of the file, and each tensor an entry.
    offsets: dict[str, Shape] = {}
    for key, fields in scanned(text.encode(), file=header.file, what=SHARDING_INFO):
        array = header.arrays.get(key)
        if array is None:
            raise CorruptError(
                f"{SHARDING_INFO} names a tensor that is not in the file", file=header.file, key=key
            )
        offset = fields.get("saved_offsets")
        is_list = isinstance(offset, list) and all(
            type(n) is int and 0 <= n < 1 << 62 for n in offset
        )
        if not isinstance(offset, list) or not is_list or len(offset) != len(array.shape):
            raise CorruptError(
                f"saved_offsets {str(offset)[:60]} do not match the {len(array.shape)} axes of the piece",
                file=header.file,
                key=key,
            )
        offsets[key] = tuple(offset)
    for key in header.arrays:
        if key not in offsets:
            raise CorruptError(
                f"{SHARDING_INFO} has no offset for the piece", file=header.file, key=key
            )
    return offsets


def _global_tensor(key: str, pieces: list[tuple[Box, StoredArray]]) -> TensorMeta:
    """Return the global tensor of some pieces."""
    box, first = pieces[0]
    for other, array in pieces:
        if array.dtype != first.dtype or other.rank != box.rank:
            raise CorruptError(
                f"a piece is {array.dtype} with {other.rank} axes, another {first.dtype} with {box.rank}",
                file=array.extent.file,
                key=key,
            )
    ends = zip(*(box.end for box, _ in pieces), strict=True)
    return TensorMeta(key, first.dtype, tuple(max(axis) for axis in ends))


def _tiling_fragments(
    meta: TensorMeta, pieces: list[tuple[Box, StoredArray]]
) -> tuple[Fragment, ...]:
    """Return the pieces of a tensor, after checking that they tile it.

    Empty pieces are left out unless the tensor is empty.
    """
    if meta.n_elements:
        pieces = [(box, array) for box, array in pieces if not box.is_empty]
    else:
        pieces = pieces[:1]
    # Equal pieces are replicas; different ones must neither overlap nor leave a hole.
    array_of = dict(reversed(pieces))  # of equal pieces the first
    boxes = list(array_of)
    overlap = first_overlap(boxes) if meta.n_elements else None
    if overlap is not None:
        first, other = boxes[overlap[0]], boxes[overlap[1]]
        raise CorruptError(
            f"two pieces overlap: offset {list(first.offset)} shape {list(first.shape)} in "
            f"{array_of[first].extent.file}, and offset {list(other.offset)} shape {list(other.shape)}",
            file=array_of[other].extent.file,
            key=meta.key,
        )
    if sum(box.n_elements for box in boxes) != meta.n_elements:
        hole = first_hole(full_box(meta.shape), boxes)
        assert hole is not None
        raise MissingShardError(
            f"no piece holds offset {list(hole.offset)} shape {list(hole.shape)} of the tensor of shape "
            f"{list(meta.shape)}",
            key=meta.key,
            hint="copy the checkpoint again, with the files of all ranks",
        )
    return tuple(
        Fragment(
            meta.key, box, replace(array, name=f"{meta.key}@{array.extent.file}"), (0,) * box.rank
        )
        for box, array in pieces
    )


def check_sizes(tensors: Mapping[str, TensorMeta], config: Mapping[str, object]) -> None:
    """Compare the sizes that pieces add up to with those that a model's configuration states.

    Raises:
        MissingShardError: an embedding has fewer rows than the vocabulary, or a final norm fewer
            than the hidden size.
        CorruptError: a size in the configuration is not a positive number.
    """
    config_sizes = {name: config_number(config, name) for name in ("vocab_size", "hidden_size")}
    for key, meta in tensors.items():
        for ends, axis, name in _SIZES_IN_CONFIG:
            least = config_sizes[name]
            if (
                key.endswith(ends)
                and axis < len(meta.shape)
                and least is not None
                and meta.shape[axis] < least
            ):
                raise MissingShardError(
                    f"the pieces add up to shape {list(meta.shape)}, but config.json states {name} {least}",
                    key=key,
                    hint="the files of the last ranks may be missing: copy the checkpoint again",
                )


_SIZES_IN_CONFIG = (
    (("embed_tokens.weight", "wte.weight"), 0, "vocab_size"),
    (("embed_tokens.weight",), 1, "hidden_size"),
    (("model.norm.weight",), 0, "hidden_size"),
)
"""Suffixes of names, axis, and the size in config.json that is the minimum for this axis."""
