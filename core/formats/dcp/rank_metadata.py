"""Metadata files of single ranks, which torch writes if ranks save without communicating.

On disk (``use_collectives=False``)::

    step-10/
    ├── __0.metadata    as ``.metadata``, but only with the chunks and objects of rank 0
    ├── __1.metadata …  one per rank
    └── __0_0.distcp …

Chunks that several ranks list under the same key and offset are copies: they become replicas, which
the engine compares. Copies of objects must be equal byte for byte. The number of ranks is not
recorded: their numbers must begin at 0 and have no gap, and every data file must belong to one of
them. Missing chunks of a tensor are detected when it is planned.

Not supported: objects that differ between ranks (random states, data loader positions), because
they have one name and several values.

Source: torch 2.13 ``torch/distributed/checkpoint/{filesystem,state_dict_saver}.py``.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.formats.dcp.columns import DcpItem, DcpMetadata, DcpTensor

if TYPE_CHECKING:
    from core.files.store import ReadStore

RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_RANK_FILE = re.compile(r"__(\d+)(_\d+\.distcp|\.metadata\.tmp)")
_COMPARED_BYTES = 1 << 20


def list_rank_metadata(store: ReadStore) -> list[str]:
    """Return the names of the ranks' metadata files, by rank; [] if there are none.

    Raises:
        MissingShardError: the file of a rank is missing.
    """
    names = store.files()
    ranks = {int(match[1]): name for name in names if (match := RANK_METADATA.fullmatch(name))}
    if not ranks:
        return []
    # Data files also show which ranks took part in the save.
    data_files = {int(match[1]): name for name in names if (match := _RANK_FILE.fullmatch(name))}
    for rank in range(max(*ranks, *data_files, 0) + 1):
        if rank not in ranks:
            later_file = data_files.get(rank) or ranks[max(ranks)]
            raise MissingShardError(
                f"__{rank}.metadata is missing, but {later_file} exists, so the save or a copy "
                "did not finish",
                file=f"__{rank}.metadata",
                hint="copy the checkpoint again, or use an older one",
            )
    return [ranks[rank] for rank in sorted(ranks)]


def merge_rank_metadata(parts: Sequence[DcpMetadata], store: ReadStore) -> DcpMetadata:
    """Merge the ranks' metadata into that of the checkpoint.

    Args:
        parts: metadata of each rank, by rank.
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
        for key in _distinct(part.objects for part in parts)
    }
    duplicate = next((key for key in objects if key in merged.tensors), None)
    if duplicate is not None:
        raise CorruptError(
            "the entry is a tensor on one rank, but an object on another", key=duplicate
        )
    # Transforms belong to the copy of an object that was chosen, which is that of the first rank.
    object_descriptors: dict[str, tuple[str, ...]] = {}
    for part in reversed(parts):
        object_descriptors |= part.object_descriptors
    return replace(
        merged,
        files=list(_distinct([merged.files, [item.file for item in objects.values()]])),
        objects=objects,
        planner_data=_merge_paths(parts),
        extras=_distinct(part.extras for part in parts),
        orphans=_distinct(part.orphans for part in parts),
        object_descriptors=object_descriptors,
    )


def _distinct(groups: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Return the distinct names of several groups, in order of first appearance."""
    return tuple(dict.fromkeys(chain.from_iterable(groups)))


def _merge_tensors(parts: Sequence[DcpMetadata]) -> DcpMetadata:
    """Return metadata with the tensors of all ranks and their chunks, rank by rank; no objects.

    Raises:
        CorruptError: ranks disagree about dtype or shape of a tensor.
    """
    tensors: dict[str, DcpTensor] = {}
    offsets, sizes, file_index, item_offset, item_bytes = (array("q") for _ in range(5))
    files: dict[str, int] = {}
    descriptors: dict[int, tuple[str, ...]] = {}
    for key in _distinct(part.tensors for part in parts):
        # Dtype and global shape must be the same on every rank that has the tensor.
        holders = [part for part in parts if key in part.tensors]
        tensor = holders[0].tensors[key]
        for other in (part.tensors[key] for part in holders[1:]):
            if (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
                raise CorruptError(
                    f"the tensor is {tensor.dtype} of shape {tensor.shape} on one rank and "
                    f"{other.dtype} of shape {other.shape} on another",
                    key=key,
                )

        # Append the chunks; rows and file numbers of the merged metadata differ from the ranks'.
        first, start = len(item_offset), len(offsets)
        for part in holders:
            for row, (box, item) in enumerate(part.chunks(key), part.tensors[key].first):
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


def _common_object(key: str, items: Sequence[DcpItem], store: ReadStore) -> DcpItem:
    """Return the first of several copies of an object after comparing them byte for byte.

    Raises:
        UnsupportedError: the copies differ.
    """
    first = items[0]
    for other in items[1:]:
        # Objects can be large, so compare a megabyte at a time.
        is_equal = first.n_bytes == other.n_bytes
        for start in range(0, first.n_bytes if is_equal else 0, _COMPARED_BYTES):
            n_bytes = min(_COMPARED_BYTES, first.n_bytes - start)
            is_equal = is_equal and store.read(
                first.file, first.offset + start, n_bytes
            ) == store.read(other.file, other.offset + start, n_bytes)
        if not is_equal:
            raise UnsupportedError(
                f"{first.file} and {other.file} contain different values for the same object",
                key=key,
                hint="load the checkpoint with torch, and save it again with use_collectives=True",
            )
    return first


def _merge_paths(parts: Sequence[DcpMetadata]) -> dict[str, tuple[str | int, ...]] | None:
    """Return the paths of all ranks' entries; None if a rank has no planner_data.

    Raises:
        CorruptError: two ranks place an entry at different paths.
    """
    paths: dict[str, tuple[str | int, ...]] = {}
    for part in parts:
        if part.planner_data is None:
            return None
        for key, path in part.planner_data.items():
            if paths.setdefault(key, path) != path:
                raise CorruptError(
                    f"planner_data places the entry at {paths[key]} on one rank and at {path} on "
                    "another",
                    key=key,
                )
    return paths
