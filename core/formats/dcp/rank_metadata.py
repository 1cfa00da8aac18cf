"""Metadata of single ranks, which torch writes if ranks save without communicating.

On disk (``use_collectives=False``)::

    step-10/
    ├── __0.metadata    as ``.metadata``, but only with the chunks and objects of rank 0
    ├── __1.metadata …  one per rank
    └── __0_0.distcp …

What several ranks list under one key and offset are copies of one another: of tensors they become
replicas, which the engine compares; objects must be equal byte for byte. The number of ranks is
stated nowhere: their numbers must begin at 0 and have no gap, and every data file must belong to
one of them. A tensor that lacks chunks is found when it is planned.

Not supported: objects in which the ranks differ (random states, positions of data loaders), which
have one name and several values.

Source: torch 2.13 ``torch/distributed/checkpoint/{filesystem,state_dict_saver}.py``.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.formats.dcp.columns import DcpItem, DcpMetadata, DcpTensor

if TYPE_CHECKING:
    from core.files.store import ReadStore

RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_RANK_FILE = re.compile(r"__(\d+)(_\d+\.distcp|\.metadata\.tmp)")
_COMPARED_BYTES = 1 << 20


def rank_files(store: ReadStore) -> list[str]:
    """Return the names of the metadata files of all ranks, by rank; [] if there are none.

    Raises:
        MissingShardError: the file of a rank is missing.
    """
    names = store.files()
    ranks = {int(match[1]): name for name in names if (match := RANK_METADATA.fullmatch(name))}
    if not ranks:
        return []
    owners = {int(match[1]): name for name in names if (match := _RANK_FILE.fullmatch(name))}
    for rank in range(max(*ranks, *owners, 0) + 1):
        if rank not in ranks:
            later_file = owners.get(rank) or ranks[max(ranks)]
            raise MissingShardError(
                f"__{rank}.metadata is missing, but {later_file} exists: the save (or the copy) did not finish",
                file=f"__{rank}.metadata",
                hint="copy the checkpoint again, or use an older one",
            )
    return [ranks[rank] for rank in sorted(ranks)]


def merge_rank_metadata(parts: Sequence[DcpMetadata], store: ReadStore) -> DcpMetadata:
    """Merge the ranks' metadata into that of the checkpoint.

    Args:
        parts: by rank.
        store: the checkpoint, to compare objects.

    Raises:
        CorruptError: two ranks contradict each other.
        UnsupportedError: an object has different values on different ranks.
    """
    merged = _merge_tensors(parts)
    objects = {
        key: _common_object(
            key, [part.objects[key] for part in parts if key in part.objects], store
        )
        for key in dict.fromkeys(key for part in parts for key in part.objects)
    }
    duplicate = next((key for key in objects if key in merged.tensors), None)
    if duplicate is not None:
        raise CorruptError("a tensor on one rank is an object on another", key=duplicate)
    files = dict.fromkeys([*merged.files, *(item.file for item in objects.values())])
    object_descriptors: dict[str, tuple[str, ...]] = {}
    for part in reversed(parts):  # the first rank counts
        object_descriptors |= part.object_descriptors
    return replace(
        merged,
        files=list(files),
        objects=objects,
        planner_data=_merge_paths(parts),
        extras=tuple(dict.fromkeys(name for part in parts for name in part.extras)),
        orphans=tuple(dict.fromkeys(name for part in parts for name in part.orphans)),
        object_descriptors=object_descriptors,
    )


def _merge_tensors(parts: Sequence[DcpMetadata]) -> DcpMetadata:
    """Return metadata with the tensors of all ranks, whose chunks are those of the ranks in order;
    without objects.
    """
    tensors: dict[str, DcpTensor] = {}
    offsets, sizes, file_index, item_offset, item_bytes = (array("q") for _ in range(5))
    files: dict[str, int] = {}
    descriptors: dict[int, tuple[str, ...]] = {}
    for key in dict.fromkeys(key for part in parts for key in part.tensors):
        tensor = _common_tensor(key, parts)
        first, start = len(item_offset), len(offsets)
        for part in parts:
            for row, (box, item) in (
                enumerate(part.chunks(key), part.tensors[key].first) if key in part.tensors else ()
            ):
                offsets.extend(box.offset)
                sizes.extend(box.shape)
                if row in part.descriptors:
                    descriptors[len(item_offset)] = part.descriptors[row]
                file_index.append(files.setdefault(item.file, len(files)))
                item_offset.append(item.offset)
                item_bytes.append(item.n_bytes)
        tensors[key] = tensor._replace(first=first, n_chunks=len(item_offset) - first, start=start)
    return DcpMetadata(
        tensors=tensors,
        offsets=offsets,
        sizes=sizes,
        files=list(files),
        file_index=file_index,
        item_offset=item_offset,
        item_bytes=item_bytes,
        objects={},
        planner_data=None,
        mcore_data=None,
        version=parts[0].version,
        extras=(),
        orphans=(),
        descriptors=descriptors,
    )


def _common_tensor(key: str, parts: Sequence[DcpMetadata]) -> DcpTensor:
    """Return the tensor of a key, which must be the same on every rank that has it."""
    copies = [part.tensors[key] for part in parts if key in part.tensors]
    for other in copies[1:]:
        if (other.dtype, other.shape) != (copies[0].dtype, copies[0].shape):
            raise CorruptError(
                f"one rank has {copies[0].dtype} and shape {copies[0].shape}, another {other.dtype} and {other.shape}",
                key=key,
            )
    return copies[0]


def _common_object(key: str, items: Sequence[DcpItem], store: ReadStore) -> DcpItem:
    """Return the first of several copies of an object, if they are equal."""
    first = items[0]
    for other in items[1:]:
        is_equal = first.n_bytes == other.n_bytes
        for start in range(0, first.n_bytes if is_equal else 0, _COMPARED_BYTES):
            n_bytes = min(_COMPARED_BYTES, first.n_bytes - start)
            is_equal = is_equal and store.read(
                first.file, first.offset + start, n_bytes
            ) == store.read(other.file, other.offset + start, n_bytes)
        if not is_equal:
            raise UnsupportedError(
                f"the ranks that wrote {first.file} and {other.file} have different values under one name",
                key=key,
                hint="this was saved without collectives; load and save it again with torch, collectives on",
            )
    return first


def _merge_paths(parts: Sequence[DcpMetadata]) -> dict[str, tuple[str | int, ...]] | None:
    """Return the paths of all ranks' entries, or None if a rank has none."""
    paths: dict[str, tuple[str | int, ...]] = {}
    for part in parts:
        if part.planner_data is None:
            return None
        for key, path in part.planner_data.items():
            if paths.setdefault(key, path) != path:
                raise CorruptError(f"one rank has it at {paths[key]}, another at {path}", key=key)
    return paths
