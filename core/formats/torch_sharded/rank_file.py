"""The content of one rank's file: its tree, and the tensors in it by key.

The DTensors and ShardedTensors, which stay inert in the tree, are found and parsed.

::

    _rebuild_from_type_v2(_rebuild_wrapper_subclass, DTensor or ShardedTensor,
                          (class, dtype, shape, strides, 0, layout, device, requires_grad),
                          state)      of a DTensor: see ``local_part``

Either may be wrapped in a parameter.

Versions: torch 2.2 (``torch.distributed._tensor``) and later.

Source: torch 2.13 ``torch/_tensor.py`` (``_reduce_ex_internal``).

The state of a ShardedTensor lists offset and size of every shard.

::

    ([Shard {"tensor", "metadata": ShardMetadata}, …],          the shards of this rank
     ShardedTensorMetadata {"shards_metadata": [ShardMetadata {"shard_offsets", "shard_sizes",
                                                               "placement": rank}, …],
                            "size": shape of the tensor, …},
     ProcessGroupState {"global_rank", "global_world_size", …}, sharding spec, flag)

Source: torch 2.13 ``torch/distributed/_shard/sharded_tensor/api.py``; files that it wrote, in
tests/golden/dtensor.tar.xz.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from core.arrays.box import Box, Shape
from core.arrays.dtypes import DTYPES
from core.arrays.sharding import ShardPiece
from core.engine.catalog.dropped import Dropped
from core.errors import CheckpointingException, CorruptError, UnsupportedError
from core.formats.torch.tree import keys_of, parse
from core.formats.torch_sharded.local_part import (
    HeldArray,
    LocalPart,
    dtensor_part,
    is_rank,
    plain_array,
    shape_of,
    unwrapped,
)
from core.pickle.fields import list_or_empty
from core.pickle.inert import Global, Inert, ObjectLeaf, TensorLeaf, attributes, walk
from core.pickle.nesting import LeafEntry, Path, entries, map_leaves
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The tensors and values in the file of one rank, under the keys of the checkpoint.

    Args:
        file: name of the file.
        number: number of the rank in the file's name.
        rank: number of the rank according to the tensors, else that in the name.
        ranks: the ranks of the job that the tensors name.
        skeleton: the tree, with a ``TensorLeaf`` for every tensor and distributed tensor, and an
            ``ObjectLeaf`` for everything else.
        parts: distributed tensors.
        tensors: plain tensors.
        values: everything else.
        hidden: tensors inside the values, by the keys of their leaves.
        unsupported: key → kind, for values that are tensors which cannot be read.
        paths: key → path in the tree.
        notes, dropped: as in the catalog.
    """

    file: str
    number: int
    rank: int
    ranks: frozenset[int]
    skeleton: object
    parts: Mapping[str, LocalPart]
    tensors: Mapping[str, StoredArray]
    values: Mapping[str, object]
    hidden: Mapping[str, StoredArray]
    unsupported: Mapping[str, str]
    paths: Mapping[str, Path]
    notes: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()


def read_tensor_file(store: ReadStore, file: str, number: int) -> TensorFile:
    """Read one rank's file; metadata only.

    Args:
        number: number of the rank in the file's name.

    Raises:
        CorruptError, TruncatedError: the file is damaged, or a distributed tensor contradicts
            itself.
        UnsupportedError: the file is of another kind.
        UnsafeError: the pickle is hostile.
    """
    # The prefix makes the names of arrays unique; keys go without it.
    prefix = f"{file}:"
    tree = parse(store, file, prefix=prefix)
    arrays = {**tree.arrays, **tree.hidden}
    parts: dict[str, LocalPart] = {}
    values: dict[str, object] = {}
    tensors: dict[str, StoredArray] = {}
    unsupported = {
        key.removeprefix(prefix): item.refused
        for key, item in tree.objects.items()
        if item.refused is not None
    }
    paths: dict[str, Path] = {}

    def leaf_of(entry: LeafEntry) -> object:
        key = entry.key.removeprefix(prefix)
        full_key = prefix + key
        paths[key] = entry.path
        if isinstance(entry.leaf, TensorLeaf):
            tensors[key] = tree.arrays[full_key]
            return replace(entry.leaf, key=key)
        value = tree.objects[full_key].value
        if is_distributed(value):
            try:
                part = parse_distributed(value, arrays)
                parts[key] = part
                unsupported.pop(key, None)
                return TensorLeaf(key, part.wrapper, part.requires_grad)
            except UnsupportedError as err:
                unsupported[key] = err.message
            except CheckpointingException as err:
                err.file, err.key = err.file or file, err.key or key
                raise
        elif key not in unsupported and holds_distributed(value):
            unsupported[key] = "value that contains distributed tensors"
        values[key] = value
        return ObjectLeaf(key)

    skeleton = map_leaves(tree.value, leaf_of)
    ranks = {part.rank for part in parts.values() if part.rank is not None}
    if len(ranks) > 1:
        raise CorruptError(
            f"the file contains tensors from several ranks: {', '.join(map(str, sorted(ranks)))}",
            file=file,
        )
    return TensorFile(
        file=file,
        number=number,
        rank=ranks.pop() if ranks else number,
        ranks=frozenset().union(*(part.ranks for part in parts.values())),
        skeleton=skeleton,
        parts=parts,
        tensors=tensors,
        values=values,
        hidden=tree.hidden,
        unsupported=unsupported,
        paths=paths,
        notes=tree.notes,
        dropped=tree.dropped,
    )


def rekey_by_skeleton(file: TensorFile, skeleton: object) -> TensorFile:
    """Return a file whose entries have the keys of their paths in another skeleton.

    Args:
        skeleton: has the leaves of the file's own, in other places.
    """
    leaf_entries = list(entries(skeleton))
    keys = [key for key, _ in keys_of(leaf_entries)]
    new_of = {entry.key: key for entry, key in zip(leaf_entries, keys, strict=True)}

    def renamed(entry: LeafEntry) -> object:
        assert isinstance(entry.leaf, (TensorLeaf, ObjectLeaf))
        return replace(entry.leaf, key=new_of[entry.leaf.key])

    return replace(
        file,
        skeleton=map_leaves(skeleton, renamed),
        parts={new_of[key]: part for key, part in file.parts.items()},
        tensors={new_of[key]: array for key, array in file.tensors.items()},
        values={new_of[key]: value for key, value in file.values.items()},
        unsupported={new_of[key]: kind for key, kind in file.unsupported.items()},
        paths=dict(zip(keys, (entry.path for entry in leaf_entries), strict=True)),
    )


_DTENSOR = (
    Global("torch.distributed.tensor", "DTensor"),
    Global("torch.distributed._tensor.api", "DTensor"),
    Global("torch.distributed._tensor", "DTensor"),
)
_SHARDED_TENSOR = (Global("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"),)
_REBUILD = Global("torch._tensor", "_rebuild_from_type_v2")


def is_distributed(value: object) -> bool:
    """Return whether an inert value is a DTensor or ShardedTensor, also one inside a parameter."""
    tensor = unwrapped(value)
    return (
        isinstance(tensor, Inert)
        and tensor.fn == _REBUILD
        and len(tensor.args) == 4
        and tensor.args[1] in (*_DTENSOR, *_SHARDED_TENSOR)
    )


def holds_distributed(value: object) -> bool:
    """Return whether a DTensor or ShardedTensor is anywhere in an inert value."""
    return any(is_distributed(node) for node in walk(value) if type(node) is Inert)


def parse_distributed(value: object, arrays: Mapping[str, StoredArray]) -> LocalPart:
    """Parse a distributed tensor.

    Args:
        value: an inert value for which ``is_distributed`` is true.
        arrays: the arrays of the file by the keys of their leaves.

    Raises:
        UnsupportedError: it cannot be read; the message is a noun phrase that says what it is.
        CorruptError: it is malformed, or its parts contradict each other.
    """
    tensor = unwrapped(value)
    assert isinstance(tensor, Inert)
    args, state = tensor.args[2], tensor.args[3]
    if not isinstance(args, tuple) or len(args) < 3 or not isinstance(args[1], Global):
        raise CorruptError("a distributed tensor is malformed")
    shape = shape_of(args[2], "its shape")
    parse = dtensor_part if tensor.args[1] in _DTENSOR else sharded_tensor_part
    part = parse(state, shape, arrays)
    # The dtype is that of the local parts; a rank may have none.
    dtype = args[1].name
    if args[1].module != "torch" or part.dtype not in ("", dtype):
        raise CorruptError(
            f"a {part.kind} with dtype {dtype} has local parts with dtype {part.dtype}"
        )
    if dtype not in DTYPES:
        raise UnsupportedError(f"{part.kind} with the unsupported dtype {dtype}")
    # torch.nn.Parameter(dtensor) stays a DTensor, with a mark in its __dict__.
    marks = state[0] if isinstance(state, tuple) and state and isinstance(state[0], dict) else {}
    is_parameter = tensor is not value or marks.get("_is_param") is True
    return replace(
        part,
        dtype=dtype,
        wrapper="parameter" if is_parameter else None,
        requires_grad=args[7:8] == (True,),
    )


def sharded_tensor_part(
    state: object, shape: Shape, arrays: Mapping[str, StoredArray]
) -> LocalPart:
    """Parse the state of a ShardedTensor; raises the errors of ``local_part``."""
    if not isinstance(state, tuple) or len(state) < 3 or not isinstance(state[0], list):
        raise CorruptError("a ShardedTensor is malformed")
    shards, metadata, group = state[0], attributes(state[1]), attributes(state[2]) or {}
    if metadata is None or shape_of(metadata.get("size"), "its size") != shape:
        raise CorruptError(f"a ShardedTensor's metadata does not match its shape {shape}")
    rank, world_size = group.get("global_rank"), group.get("global_world_size")
    arrays_of_rank: list[HeldArray] = []
    for shard in shards:
        fields = _slots(shard)
        array = plain_array(fields.get("tensor"), arrays, "ShardedTensor")
        place = _slots(fields.get("metadata"))
        offset = shape_of(place.get("shard_offsets"), "the offset of a shard")
        sizes = shape_of(place.get("shard_sizes"), "the size of a shard")
        if not len(offset) == len(sizes) == len(shape) or array.shape != sizes:
            raise CorruptError(
                f"a ShardedTensor of shape {shape} has a shard of shape {sizes} at offset "
                f"{offset}, but the shard's data has shape {array.shape}"
            )
        if any(o + n > extent for o, n, extent in zip(offset, sizes, shape, strict=True)):
            raise CorruptError(
                f"a shard of shape {sizes} at offset {offset} does not fit in its ShardedTensor of "
                f"shape {shape}"
            )
        if 0 not in sizes:
            box = ShardPiece(Box(offset, sizes), (0,) * len(sizes))
            arrays_of_rank.append(HeldArray(array, (box,)))
    return LocalPart(
        "ShardedTensor",
        arrays_of_rank[0].array.dtype if arrays_of_rank else "",
        shape,
        tuple(arrays_of_rank),
        rank=rank if is_rank(rank) else None,
        ranks=_ranks_of(metadata.get("shards_metadata"), world_size),
        cuts=_shards_text(metadata.get("shards_metadata")),
    )


def _slots(value: object) -> Mapping[str, object]:
    """Return the attributes of an object with slots, whose state is (None, attributes)."""
    state = value.state if isinstance(value, Inert) else None
    fields = state[1] if isinstance(state, tuple) and len(state) == 2 else state
    return fields if isinstance(fields, dict) else {}


def _ranks_of(shards: object, world_size: object) -> frozenset[int]:
    """Return the ranks of a ShardedTensor's process group."""
    if is_rank(world_size):
        return frozenset(range(world_size))
    ranks = [
        (attributes(_slots(shard).get("placement")) or {}).get("_rank")
        for shard in list_or_empty(shards)
    ]
    return frozenset(rank for rank in ranks if is_rank(rank))


def _shards_text(shards: object) -> str:
    """Return the number of shards of a ShardedTensor as text."""
    n_shards = len(list_or_empty(shards))
    return f"{n_shards} shard{'' if n_shards == 1 else 's'}"
