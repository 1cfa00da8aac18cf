"""Top-level entries that each rank has of its own: random states, counters, a data loader.

An entry without distributed tensors may be the same on every rank, or of each rank alone. If it
differs, the entry becomes a mapping from ``rank_3`` to that rank's. Tensors in it are compared by
dtype, shape and the CRC-32 of their records; the data are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.catalog.stored import StoredArray
from core.formats.torch_sharded.rank_file import TensorFile, relocated
from core.megatron.extras.common_state import same
from core.pickle.inert import as_mapping, rebuild


def entries_of_ranks(files: Sequence[TensorFile]) -> list[object]:
    """Return the names of top-level entries without distributed tensors that differ between ranks.

    The tensors of a state dict that is itself the top level are no such entries, although each has
    a name of its own there: plain ones are replicas.
    """
    if any(as_mapping(file.skeleton) is None for file in files):
        return []
    sharded: set[object] = set()
    for file in files:
        of_classes = [file.paths[key] for key in (*file.parts, *file.unsupported)]
        sharded |= {path[0] for path in of_classes if path}
        if any(len(path) == 1 for path in of_classes):
            sharded |= {file.paths[key][0] for key in file.tensors if len(file.paths[key]) == 1}
    # The entries of every file: name → key → array or value.
    contents: dict[object, list[dict[str, object]]] = {}
    for file in files:
        of_file: dict[object, dict[str, object]] = {}
        for key, path in file.paths.items():
            if path and path[0] not in sharded:
                content = file.tensors.get(key, file.values.get(key))
                of_file.setdefault(path[0], {})[key] = content
        for name, content_of in of_file.items():
            contents.setdefault(name, []).append(content_of)
    return [
        name
        for name, content in contents.items()
        if any(not _are_alike(content[0], other) for other in content[1:])
    ]


def _are_alike(first: Mapping[str, object], second: Mapping[str, object]) -> bool:
    """Return whether two ranks have the same entry, as far as metadata tell.

    Args:
        first, second: key → array of a tensor, or value.
    """
    if first.keys() != second.keys():
        return False
    for key, a in first.items():
        b = second[key]
        if isinstance(a, StoredArray) != isinstance(b, StoredArray):
            return False
        if not isinstance(a, StoredArray) or not isinstance(b, StoredArray):
            if not same(a, b):
                return False
        elif (a.dtype, a.shape) != (b.dtype, b.shape) or (
            a.extent.crc and b.extent.crc and a.extent.crc != b.extent.crc
        ):
            return False
    return True


def nested_by_rank(file: TensorFile, names: Sequence[object]) -> TensorFile:
    """Put some top-level entries of a file below the name of its rank."""
    root = as_mapping(file.skeleton)
    assert root is not None, "only a mapping has named entries"
    parts = {
        name: {f"rank_{file.rank}": item} if name in names else item for name, item in root.items()
    }
    return relocated(file, rebuild(file.skeleton, parts))
