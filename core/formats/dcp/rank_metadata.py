"""Metadata of single ranks, which torch writes where ranks save without talking to each other.

On disk (``use_collectives=False``)::

    step-10/
    ├── __0.metadata    as ``.metadata``, but only with the chunks and objects of rank 0
    ├── __1.metadata …  one per rank
    └── __0_0.distcp …

What several ranks list under one key and offset are copies of one another: of tensors they become replicas, which the
engine compares; objects must be equal byte for byte. How many ranks there were stands nowhere: their numbers must begin
at 0 and have no gap, and every data file must belong to one of them. A tensor that lacks chunks is found when it is
planned.

Not supported: objects in which the ranks differ (random states, positions of data loaders), which have one name and
several values.

Source: torch 2.13 ``torch/distributed/checkpoint/{filesystem,state_dict_saver}.py``.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.formats.dcp.columns import DcpItem, DcpMetadata, DcpTensor

if TYPE_CHECKING:
    from core.files.store import ReadStore

RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_RANK_FILE = re.compile(r"__(\d+)(_\d+\.distcp|\.metadata\.tmp)")
_COMPARED_BYTES = 1 << 20


def rank_files(store: ReadStore) -> list[str]:
    """Names of the metadata files of all ranks, by rank; [] if there are none.

    Raises:
        MissingShardError: one of them is not there.
    """
    names = store.files()
    ranks = {int(found[1]): name for name in names if (found := RANK_METADATA.fullmatch(name))}
    if not ranks:
        return []
    owners = {int(found[1]): name for name in names if (found := _RANK_FILE.fullmatch(name))}
    for rank in range(max(*ranks, *owners, 0) + 1):
        if rank not in ranks:
            because = owners.get(rank) or ranks[max(ranks)]
            raise MissingShardError(
                f"__{rank}.metadata is not there, but {because} is: the save (or the copy) did not finish",
                file=f"__{rank}.metadata",
                hint="copy the checkpoint again, or use an older one",
            )
    return [ranks[rank] for rank in sorted(ranks)]


def merged(parts: Sequence[DcpMetadata], store: ReadStore) -> DcpMetadata:
    """What the ranks' metadata say together.

    Args:
        parts: by rank.
        store: the checkpoint, to compare objects.

    Raises:
        CorruptError: two ranks contradict each other.
        UnsupportedError: an object has different values on different ranks.
    """
    tensors: dict[str, DcpTensor] = {}
    offsets, sizes, file_index, item_offset, item_bytes = (array("q") for _ in range(5))
    files: dict[str, int] = {}
    descriptors: dict[int, tuple[str, ...]] = {}
    for key in dict.fromkeys(key for part in parts for key in part.tensors):
        tensor = _one_tensor(key, parts)
        first, start = len(item_offset), len(offsets)
        for part in parts:
            for row, (box, item) in enumerate(part.chunks(key), part.tensors[key].first) if key in part.tensors else ():
                offsets.extend(box.offset)
                sizes.extend(box.shape)
                if row in part.descriptors:
                    descriptors[len(item_offset)] = part.descriptors[row]
                file_index.append(files.setdefault(item.file, len(files)))
                item_offset.append(item.offset)
                item_bytes.append(item.n_bytes)
        tensors[key] = tensor._replace(first=first, n_chunks=len(item_offset) - first, start=start)
    objects = {
        key: _one_object(key, [part.objects[key] for part in parts if key in part.objects], store)
        for key in dict.fromkeys(key for part in parts for key in part.objects)
    }
    for key, item in objects.items():
        if key in tensors:
            raise CorruptError("a tensor on one rank is an object on another", key=key)
        files.setdefault(item.file, len(files))
    return DcpMetadata(
        tensors=tensors,
        offsets=offsets,
        sizes=sizes,
        files=list(files),
        file_index=file_index,
        item_offset=item_offset,
        item_bytes=item_bytes,
        objects=objects,
        planner_data=_paths(parts),
        mcore_data=None,
        version=parts[0].version,
        extras=tuple(dict.fromkeys(name for part in parts for name in part.extras)),
        orphans=tuple(dict.fromkeys(name for part in parts for name in part.orphans)),
        descriptors=descriptors,
        object_descriptors={key: found for part in reversed(parts) for key, found in part.object_descriptors.items()},
    )


def _one_tensor(key: str, parts: Sequence[DcpMetadata]) -> DcpTensor:
    """The tensor of a key, which must be the same on every rank that has it."""
    found = [part.tensors[key] for part in parts if key in part.tensors]
    for other in found[1:]:
        if (other.dtype, other.shape) != (found[0].dtype, found[0].shape):
            raise CorruptError(
                f"one rank says {found[0].dtype} and shape {found[0].shape}, another {other.dtype} and {other.shape}",
                key=key,
            )
    return found[0]


def _one_object(key: str, items: Sequence[DcpItem], store: ReadStore) -> DcpItem:
    """The first of several copies, if they are equal."""
    first = items[0]
    for other in items[1:]:
        same = first.n_bytes == other.n_bytes
        for at in range(0, first.n_bytes if same else 0, _COMPARED_BYTES):
            n = min(_COMPARED_BYTES, first.n_bytes - at)
            same = same and store.read(first.file, first.offset + at, n) == store.read(other.file, other.offset + at, n)
        if not same:
            raise UnsupportedError(
                f"the ranks that wrote {first.file} and {other.file} have different values under one name",
                key=key,
                hint="this was saved without collectives; load and save it again with torch, collectives on",
            )
    return first


def _paths(parts: Sequence[DcpMetadata]) -> dict[str, tuple[str | int, ...]] | None:
    """The paths of all ranks' entries, or None where a rank has none."""
    paths: dict[str, tuple[str | int, ...]] = {}
    for part in parts:
        if part.planner_data is None:
            return None
        for key, path in part.planner_data.items():
            if paths.setdefault(key, path) != path:
                raise CorruptError(f"one rank has it at {paths[key]}, another at {path}", key=key)
    return paths
