"""Local checkpoints: the in-memory state of each rank, saved to a disk or RAM disk of its node.

On disk (``LocalCheckpointManager`` of nvidia-resiliency-ext)::

    root/                                 or root/<session>/
    ├── 0/                                the directory of rank 0
    │   ├── iter_0000010_0_local.pt       its own state: a torch zip
    │   └── iter_0000010_8_local.pt       a replica of rank 8's
    └── 1/ …                              only the ranks of one node, unless they are collected

A file is one pickled ``MCoreTensorAwareStateDict``: ``common`` is the state that all ranks share,
``sharded_state_dict`` has nested ShardedTensors and ShardedObjects. A ShardedTensor has the key,
shape and position of a shard; its ``data`` is None if another rank keeps the shard.

The catalog of a directory has global tensors, each shard a fragment, from the newest iteration that
most ranks have; of a rank's files, its own directory's is read. Shards that ranks of other nodes
keep are missing then. The catalog of a single file has that rank's shards: a shard that is not its
complete tensor has its position in its key, ``KEY@0,512``. Objects have the keys of
``ShardedObject.unique_key``, and a list of one element as value, as in other distributed
checkpoints. The common state is the first rank's.

Versions: megatron-core 0.12 to 0.20, and ``core.dist_checkpointing``. Read only.

Not supported, refused by name: shards with a ``flattened_range`` (optimizer states before
megatron-core 0.16), and shards that are not plain tensors. Other classes of state dicts in such
files are read as torch files.

Source: files written by nvidia-resiliency-ext 0.4.1 with Megatron-LM 382eeea; their classes
    ``checkpointing/local/ckpt_managers/local_manager.py`` and
    ``megatron/core/dist_checkpointing/{mapping,tensor_aware_state_dict}.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.arrays.box import Box
from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.key_patterns import some_of
from core.engine.catalog.stored import StoredArray, array_name
from core.engine.catalog.tensor import Fragment, Tensor, bind_argument
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.formats.format import Format
from core.formats.mcore.common_state import with_common_state
from core.formats.torch.tree import parse
from core.pickle.fields import FieldReader
from core.pickle.inert import Inert, TensorLeaf, as_mapping, attributes, walk
from core.pickle.noted import gc_paused
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

_FILE = re.compile(r"iter_(?P<iteration>\d{7,})_(?P<rank>\d+)_local\.pt$")
_STATE_DICT = "MCoreTensorAwareStateDict"


def sniff(store: ReadStore) -> bool:
    """Return whether the store is such a file, or a directory of files or rank directories."""
    if store.entry is not None:
        return bool(_FILE.match(store.entry)) and _holds_state_dict(store, store.entry)
    files = [file for ranks in _files_by_iteration(store).values() for file in ranks.values()]
    return bool(files) and _holds_state_dict(store, files[0])


def _holds_state_dict(store: ReadStore, file: str) -> bool:
    """Return whether a file's pickle, which comes first in the zip, begins with the class."""
    return _STATE_DICT.encode() in store.read(file, 0, min(store.size(file), 512))


def read(store: ReadStore) -> Catalog:
    """Read the catalog of one rank's file, or of the files of one iteration.

    Raises:
        CorruptError, TruncatedError: a file is damaged, or shards contradict each other.
        MissingShardError: there is no file.
        UnsupportedError: a shard is not a plain tensor or box.
        UnsafeError: a pickle is hostile.
    """
    if store.entry is not None:
        return _catalog([_read_rank(store, store.entry, "")], label=store.entry, is_single=True)
    files_by_iteration = _files_by_iteration(store)
    if not files_by_iteration:
        raise MissingShardError("the directory has no local checkpoint", file=store.label)
    # A save that was interrupted has fewer ranks than the one before it.
    n_ranks = max(map(len, files_by_iteration.values()))
    iteration = max(n for n, files in files_by_iteration.items() if len(files) == n_ranks)
    files = files_by_iteration[iteration]
    contents = [_read_rank(store, files[rank], f"{rank}:") for rank in sorted(files)]
    catalog = _catalog(contents, label=store.label)
    notes = []
    if others := sorted(files_by_iteration.keys() - {iteration}):
        notes.append(
            f"iteration {iteration} was read; the directory also contains other "
            f"iterations ({', '.join(map(str, others))})"
        )
    if incomplete := _incomplete_tensors(catalog):
        notes.append(
            f"shards of {some_of(incomplete)} are missing; copy the directories of all nodes "
            "into one directory"
        )
    return catalog.noted(notes)


def _incomplete_tensors(catalog: Catalog) -> list[str]:
    """Return the keys of the tensors that the shards do not fill."""
    return [
        key
        for key, tensor in catalog.tensors.items()
        if sum(box.n_elements for box in {fragment.box for fragment in catalog.fragments(key)})
        < tensor.n_elements
    ]


def _files_by_iteration(store: ReadStore) -> dict[int, dict[int, str]]:
    """Return iteration → rank → file, in the directory itself and in rank directories."""
    files: dict[int, dict[int, str]] = {}
    for folder in ("", *rank_folders(store)):
        for name in store.files(folder):
            match = _FILE.match(name)
            if match is None:
                continue
            of_ranks = files.setdefault(int(match["iteration"]), {})
            # The rank's own file takes precedence over its replicas in directories of other ranks.
            if folder == match["rank"] or int(match["rank"]) not in of_ranks:
                of_ranks[int(match["rank"])] = f"{folder}/{name}" if folder else name
    return files


def rank_folders(store: ReadStore) -> list[str]:
    """Return the subdirectories with rank files; each is named by a rank's number."""
    return [
        name
        for name in store.folders()
        if name.isascii() and name.isdigit() and any(map(_FILE.match, store.files(name)))
    ]


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard in a rank's file.

    Args:
        key, meta: the tensor that it is a part of.
        box: its position in the tensor.
        array: its elements; it may lack leading axes of the box, which have extent 1.
    """

    key: str
    meta: Tensor
    box: Box
    array: StoredArray


@dataclass(frozen=True, slots=True)
class _RankContent:
    """The content of a rank's file.

    Args:
        shards: the shards that the rank keeps.
        objects: the ShardedObjects.
        common: the common state, inert.
        arrays: the tensors inside objects and common state, by the keys of their leaves.
    """

    shards: Sequence[_Shard]
    objects: Sequence[StoredObject]
    common: object
    arrays: Mapping[str, StoredArray]


def _read_rank(store: ReadStore, file: str, prefix: str) -> _RankContent:
    """Read one file; ``prefix`` distinguishes its arrays from those of other files."""
    tree = parse(store, file, prefix=prefix)
    roots = list(tree.objects.values())
    fields = attributes(roots[0].value) if len(roots) == 1 else None
    if fields is None or not _is_a(roots[0].value, _STATE_DICT):
        raise UnsupportedError(f"the file does not contain an {_STATE_DICT}", file=file)
    all_arrays = {**tree.arrays, **tree.hidden}
    shards: list[_Shard] = []
    objects: list[StoredObject] = []
    with gc_paused():
        for leaf in _leaves(fields.get("sharded_state_dict")):
            if _is_a(leaf, "ShardedObject"):
                objects.append(_object_of(leaf, file))
            elif _is_a(leaf, "ShardedTensor"):
                if (attributes(leaf) or {}).get("data") is not None:
                    shards.append(_shard_of(leaf, all_arrays, file))
            else:
                raise CorruptError(
                    f"expected ShardedTensors and ShardedObjects, got {type(leaf).__name__}",
                    file=file,
                )
    common = fields.get("common")
    kept_leaves = (
        node.key
        for value in (common, *(item.value for item in objects))
        for node in walk(value)
        if isinstance(node, TensorLeaf)
    )
    return _RankContent(shards, objects, common, {key: all_arrays[key] for key in kept_leaves})


def _is_a(value: object, class_name: str) -> bool:
    return isinstance(value, Inert) and value.class_name.rpartition(".")[2] == class_name


def _leaves(tree: object) -> Iterator[object]:
    """Yield the leaves of nested dicts and lists, in order."""
    stack = [tree]
    while stack:
        node = stack.pop()
        parts = node if isinstance(node, list) else as_mapping(node)
        if parts is None:
            yield node
        else:
            stack += reversed(list(parts.values() if isinstance(parts, dict) else parts))


def _shard_of(leaf: object, arrays: Mapping[str, StoredArray], file: str) -> _Shard:
    """Return the shard that a ShardedTensor describes.

    Raises:
        UnsupportedError: the shard is not a plain tensor or box.
        CorruptError: its shape or position is malformed, or differs from that of its data.
    """
    fields = attributes(leaf) or {}
    key = FieldReader(file).read_text(fields.get("key"), "the key of a shard")
    if fields.get("flattened_range") is not None:
        raise UnsupportedError(
            "the shard is part of a flattened tensor, which is not supported",
            file=file,
            key=key,
            hint="save the checkpoint with dist_checkpointing.save, or with a newer Megatron-Core",
        )
    data = fields["data"]
    if not isinstance(data, TensorLeaf):
        raise UnsupportedError("the shard is not a plain tensor", file=file, key=key)
    array = arrays[data.key]
    reader = FieldReader(file, key)
    global_shape, offset, local_shape = (
        reader.read_shape(fields.get(name), name)
        for name in ("global_shape", "global_offset", "local_shape")
    )
    # Leading axes of the global tensor that the shard has not, such as that of the layers.
    shape = (1,) * (len(global_shape) - len(local_shape)) + local_shape
    if (
        not len(global_shape) == len(offset) == len(shape)
        or array.shape != local_shape
        or any(o + n > end for o, n, end in zip(offset, shape, global_shape, strict=True))
    ):
        raise CorruptError(
            f"the shard of shape {array.shape} (declared: {local_shape}) at {offset} does not fit "
            f"the tensor of shape {global_shape}",
            file=file,
            key=key,
        )
    box = Box(offset, shape)
    tensor = Tensor(array.dtype, global_shape)
    return _Shard(key, tensor, box, replace(array, name=f"{file}:{array_name(key, box)}"))


def _object_of(leaf: object, file: str) -> StoredObject:
    """Return the object that a ShardedObject contains."""
    fields = attributes(leaf) or {}
    key = FieldReader(file).read_text(fields.get("key"), "the key of a shard")
    reader = FieldReader(file, key)
    offset, shape = (
        ".".join(map(str, reader.read_shape(fields.get(name), name)))
        for name in ("global_offset", "global_shape")
    )
    return StoredObject(f"{key}/shard_{offset}_{shape}", value=[fields.get("data")])


def _catalog(contents: Sequence[_RankContent], *, label: str, is_single: bool = False) -> Catalog:
    """Build the catalog of some ranks.

    Args:
        contents: the ranks' files; not empty.
        label: name of the checkpoint, for errors.
        is_single: the tensors are the shards of one file.

    Raises:
        CorruptError: ranks disagree about a tensor.
    """
    tensors: dict[str, Tensor] = {}
    fragments: dict[str, list[Fragment]] = {}
    for content in contents:
        for shard in content.shards:
            key, tensor, box = shard.key, shard.meta, shard.box
            if is_single and box.shape != tensor.shape:
                key, tensor = array_name(key, box), replace(tensor, shape=box.shape)
                box = replace(box, offset=(0,) * box.rank)
            parts = fragments.setdefault(key, [])
            first = tensors.setdefault(key, replace(tensor, tiling=bind_argument(tuple, parts)))
            if first != tensor:
                raise CorruptError(
                    f"the tensor is {first.dtype} of shape {first.shape} in one file, and "
                    f"{tensor.dtype} of shape {tensor.shape} in {shard.array.extent.file}",
                    file=label,
                    key=key,
                )
            at = (0,) * len(shard.array.shape)
            parts.append(Fragment(box, shard.array, at))

    # Replicas of an object are those of its key; the first rank's are used.
    objects: dict[str, StoredObject] = {}
    arrays = dict(contents[0].arrays)
    for content in contents:
        for item in content.objects:
            if item.key not in objects:
                objects[item.key] = item
                arrays |= {
                    node.key: content.arrays[node.key]
                    for node in walk(item.value)
                    if isinstance(node, TensorLeaf)
                }
    catalog: Catalog = Catalog(
        format="mcore_local",
        version=None,
        tensors=tensors,
        objects=objects,
    )
    return with_common_state(catalog.with_hidden(arrays), contents[0].common, file=label)


FORMAT = Format(
    name="mcore_local",
    title="Megatron-Core local checkpoint",
    sniff=sniff,
    read=read,
    lay_out=None,
    has_common_state=True,
    own_folders=rank_folders,
)
