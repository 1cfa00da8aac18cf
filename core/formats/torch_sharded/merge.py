"""Join the files of the ranks: global tensors, and one tree.

* The parts of a distributed tensor are fragments of the global tensor; where several ranks hold the
  same box (HSDP), the fragments are replicas, which conversions and ``validate`` compare.
* Those of tensors of torchao's classes are joined part by part (``local_part``).
* A plain tensor next to distributed ones (a buffer, a ``step``) is a replica on every rank.
* A value that is not a tensor is that of the first rank that has it. Values of other ranks that
  differ from it are listed as dropped.

A rank may have top-level entries of its own: random states, counters, a data loader. An entry
without distributed tensors may be the same on every rank, or of each rank alone. If it differs, the
entry becomes a mapping from ``rank_3`` to that rank's. Tensors in it are compared by dtype, shape
and the CRC-32 of their records; the data are not read.

FSDP1's local state dicts have flat parameters, and parameters that are views of them. A flat
parameter is a ShardedTensor with one axis, called ``_flat_param``: the parameters of a
module, one after the other, cut into equal shards. With ``use_orig_params``, the rank's file also
has the parts of the parameters that lie in its shard, as plain tensors with one axis, which are
views of the shard: they lie in its record of the file::

    rank 0   _flat_param [0:73] of 142   fc1.weight 60  fc1.bias 10  fc2.weight 1   norm.weight 0
    rank 1   _flat_param [73:142]        fc1.weight 0   fc1.bias 0   fc2.weight 59  norm.weight 6

Where a view lies in the shard tells its place in the flat parameter, so the parts of a parameter
can be joined. No file records its shape.

Source: torch 2.13 ``torch/distributed/fsdp/_state_dict_utils.py``
(``_local_post_state_dict_hook``); files that it wrote, in tests/golden/dtensor.tar.xz.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from core.arrays.box import Box, full_box
from core.arrays.dtypes import itemsize
from core.engine.catalog.catalog import StoredObject
from core.engine.catalog.dropped import Dropped
from core.engine.catalog.key_patterns import some_of
from core.engine.catalog.stored import StoredArray, array_name
from core.engine.catalog.tensor import Fragment, Tensor, bind_argument
from core.errors import CorruptError
from core.formats.torch.joined_parts import JoinedParts
from core.formats.torch_sharded.local_part import QuantizedPart, join_quantized
from core.formats.torch_sharded.rank_file import TensorFile, rekey_by_skeleton
from core.pickle.equality import are_same
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping, rebuild, walk
from core.pickle.nesting import LeafEntry, entries, map_leaves
from core.values import dataclass

FLAT_PARAMETER = "_flat_param"
"""Last part of the key of a flat parameter."""


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Elements of a flat parameter.

    Args:
        flat_key: key of the flat parameter.
        start, stop: the first element, and the one after the last.
    """

    flat_key: str
    start: int
    stop: int


def parameters_in_flat(
    files: Sequence[TensorFile],
) -> tuple[dict[str, FlatRange], dict[str, str]]:
    """Find the parameters that are views of flat parameters.

    Args:
        files: the files of all ranks.

    Returns:
        Key of a parameter → its range; and key → kind, for parameters whose flat parameter is not
        complete.
    """
    ranges: dict[str, FlatRange] = {}
    boxes_of: dict[str, set[Box]] = defaultdict(set)
    n_elements: dict[str, int] = {}
    for file in files:
        for key, view in flat_views(file).items():
            earlier = ranges.get(key, view)
            start, stop = min(earlier.start, view.start), max(earlier.stop, view.stop)
            ranges[key] = FlatRange(view.flat_key, start, stop)
        for flat_key, part in file.parts.items():
            n_elements[flat_key] = part.shape[0] if part.shape else 1
            boxes_of[flat_key] |= {placed.box for array in part.arrays for placed in array.boxes}
    # Where the file of a rank is missing, the end of a parameter is not known.
    incomplete = {
        key: "part of a flat parameter whose other parts are missing"
        for key, in_flat in ranges.items()
        if sum(box.n_elements for box in boxes_of[in_flat.flat_key]) < n_elements[in_flat.flat_key]
    }
    return ranges, incomplete


def flat_views(file: TensorFile) -> dict[str, FlatRange]:
    """Return key → range, for the plain tensors of a file that are views of its flat parameters.

    Views without elements are left out.
    """
    views: dict[str, FlatRange] = {}
    for flat_key, part in file.parts.items():
        is_flat = flat_key.rpartition(".")[2] == FLAT_PARAMETER and len(part.shape) == 1
        if not is_flat or len(part.arrays) != 1:
            continue
        shard, first = part.arrays[0].array, part.arrays[0].boxes[0].box.offset[0]
        begin = shard.extent.offset
        for key, array in file.tensors.items():
            extent = array.extent
            is_plain_vector = (
                array.dtype == shard.dtype
                and len(array.shape) == 1
                and extent.encoding is None
                and extent.strides is None
            )
            if (
                is_plain_vector
                and array.shape[0]
                and begin <= extent.offset
                and extent.offset + array.n_bytes <= begin + shard.n_bytes
            ):
                start = first + (extent.offset - begin) // itemsize(shard.dtype)
                views[key] = FlatRange(flat_key, start, start + array.shape[0])
    return views


_MIXED = (
    "files from two saves may be mixed; copy the files of all ranks from one save into an empty "
    "directory"
)


@dataclass(frozen=True, slots=True)
class MergedFiles:
    """The joined content of one family of files.

    Args:
        tensors: global tensors by key; those whose parts are the same bytes on every rank are tied.
        objects: everything else by key.
        hidden: the tensors inside objects.
        skeleton: the tree of the first rank, completed by the entries that only others have.
        notes, dropped: as in the catalog.
    """

    tensors: Mapping[str, Tensor]
    objects: Mapping[str, StoredObject]
    hidden: Mapping[str, StoredArray]
    skeleton: object
    notes: tuple[str, ...]
    dropped: tuple[Dropped, ...]


def merge_files(files: Sequence[TensorFile], *, label: str | None = None) -> MergedFiles:
    """Join the files of one family.

    Args:
        files: the files of the ranks, in the order of the ranks; at least one.
        label: name of the entry to put the content into; None for the top level.

    Raises:
        CorruptError: the files contradict each other.
    """
    own_entries = entries_of_ranks(files)
    top = f"{label}." if label else ""
    notes = [
        f"{top}{name} differs between ranks, so every rank's value is kept" for name in own_entries
    ]
    files = [nested_by_rank(file, own_entries) if own_entries else file for file in files]
    if label is not None:
        files = [rekey_by_skeleton(file, {label: file.skeleton}) for file in files]
    ranges, incomplete = parameters_in_flat(files)

    # Collect the entries of the files.
    merger = _Merger(ranges, incomplete)
    for file in files:
        merger.add_parts(file)
        merger.add_plain_tensors(file)
        merger.add_values(file)
    joined = merger.join_quantized()
    tensors, objects = merger.entries()
    for parts in joined.values():
        tensors |= parts.tensors
        objects |= parts.objects

    # Complete the first rank's tree, and list the entries in its order.
    skeleton = files[0].skeleton
    paths = set(files[0].paths)
    for file in files[1:]:
        if not paths.issuperset(file.paths):
            skeleton = _completed(skeleton, file.skeleton)
            paths.update(file.paths)

    def leaf_of(entry: LeafEntry) -> object:
        if entry.key in joined:
            return joined[entry.key].skeleton
        return ObjectLeaf(entry.key) if entry.key in objects else entry.leaf

    skeleton = map_leaves(skeleton, leaf_of)
    order = [entry.key for entry in entries(skeleton)]
    tensors = {key: tensors[key] for key in order if key in tensors}

    notes += dict.fromkeys(note for file in files for note in file.notes)
    flat = [key for key in tensors if key.rpartition(".")[2] == FLAT_PARAMETER]
    if flat:
        notes.append(
            "flat FSDP parameters have one axis, because a local state dict does not record the "
            f"original parameters' shapes: {some_of(flat)}"
        )
    return MergedFiles(
        tensors=_tied(tensors),
        objects={key: objects[key] for key in order if key in objects},
        hidden=merger.hidden,
        skeleton=skeleton,
        notes=tuple(notes),
        dropped=(
            *merger.dropped(),
            *dict.fromkeys(entry for file in files for entry in file.dropped),
        ),
    )


class _Merger:
    """Collects the entries of the ranks' files.

    Args:
        ranges: key → elements of a flat parameter, for parameters that are views of it.
        incomplete: key → kind, for tensors that cannot be read.
    """

    def __init__(self, ranges: Mapping[str, FlatRange], incomplete: Mapping[str, str]) -> None:
        self._fragments: dict[str, list[Fragment]] = {}
        self.hidden: dict[str, StoredArray] = {}
        self._unsupported = dict(incomplete)
        self._ranges = ranges
        self._tensors: dict[str, Tensor] = {}
        self._objects: dict[str, StoredObject] = {}
        self._first: dict[str, tuple[str, TensorFile]] = {}
        """Key → kind of the entry, and the first file that has it."""
        self._quantized: dict[str, list[QuantizedPart]] = defaultdict(list)
        self._differing: dict[str, list[int]] = defaultdict(list)

    def add_parts(self, file: TensorFile) -> None:
        """Add the parts of distributed tensors; raises CorruptError if files disagree."""
        self._unsupported.update(file.unsupported)
        for key, part in file.parts.items():
            self._check_kind(key, part.kind, file)
            self._add_meta(key, Tensor(part.dtype, part.shape), file)
            if part.quantized is not None:
                of_rank = {
                    name: _named(item, file, name) if isinstance(item, StoredArray) else item
                    for name, item in part.quantized.parts.items()
                }
                self._quantized[key].append(replace(part.quantized, parts=of_rank))
            for stored in part.arrays:
                # Of several shards, each array needs a name of its own.
                is_one = len(part.arrays) == 1
                name = key if is_one else array_name(key, stored.boxes[0].box)
                array = _named(stored.array, file, name)
                self._fragments[key] += [Fragment(box.box, array, box.at) for box in stored.boxes]

    def add_plain_tensors(self, file: TensorFile) -> None:
        """Add plain tensors and views of flat parameters; raises CorruptError if files disagree."""
        views = flat_views(file) if self._ranges else {}
        for key, array in file.tensors.items():
            self._check_kind(key, "plain tensor", file)
            in_flat = self._ranges.get(key)
            if in_flat is not None:
                self._add_meta(key, Tensor(array.dtype, (in_flat.stop - in_flat.start,)), file)
                # On a rank that holds nothing of the parameter, the view is empty.
                if key in views:
                    box = Box((views[key].start - in_flat.start,), array.shape)
                    self._fragments[key].append(Fragment(box, _named(array, file, key), (0,)))
                continue
            tensor = Tensor(array.dtype, array.shape)
            if self._tensors.get(key, tensor) != tensor:
                self._unsupported[key] = "plain tensor whose shape or dtype differs between ranks"
                continue
            self._add_meta(key, tensor, file)
            at = (0,) * len(array.shape)
            fragment = Fragment(full_box(array.shape), _named(array, file, key), at)
            self._fragments[key].append(fragment)

    def add_values(self, file: TensorFile) -> None:
        """Add the entries that are not tensors; raises CorruptError if one was a tensor before."""
        for key, value in file.values.items():
            self._check_kind(key, "value", file)
            if key in self._objects:
                if not are_same(self._objects[key].value, value):
                    self._differing[key].append(file.rank)
                continue
            self._objects[key] = StoredObject(key, value=value)
            for leaf in walk(value):
                if isinstance(leaf, TensorLeaf):
                    self.hidden[leaf.key] = file.hidden[leaf.key]

    def join_quantized(self) -> dict[str, JoinedParts]:
        """Replace tensors of torchao's classes by their parts, and return these by key.

        A tensor whose parts cannot be joined becomes one that cannot be read.
        """
        joined: dict[str, JoinedParts] = {}
        for key, parts in self._quantized.items():
            result: JoinedParts | str = "tensor that is a torchao tensor on only some ranks"
            if not self._fragments[key]:
                result = join_quantized(key, self._tensors[key].shape, parts)
            if isinstance(result, str):
                self._unsupported.setdefault(key, result)
            elif key not in self._unsupported:
                joined[key] = result
                del self._tensors[key], self._fragments[key]
        return joined

    def entries(self) -> tuple[dict[str, Tensor], dict[str, StoredObject]]:
        """Return tensors and objects; a tensor that cannot be read is an object that is refused."""
        unread = {
            key: replace(self._objects.get(key) or StoredObject(key), refused=kind)
            for key, kind in self._unsupported.items()
        }
        tensors = {key: tensor for key, tensor in self._tensors.items() if key not in unread}
        return tensors, {**self._objects, **unread}

    def dropped(self) -> tuple[Dropped, ...]:
        """Return a record for each value that ranks other than the first have differently."""
        return tuple(
            Dropped(
                (f"{key} of {_ranks_text(ranks)}",),
                f"differs from the value on rank {self._first[key][1].rank}",
            )
            for key, ranks in self._differing.items()
            if key not in self._unsupported
        )

    def _check_kind(self, key: str, kind: str, file: TensorFile) -> None:
        """Raise CorruptError if an entry is of another kind than in the files before."""
        first_kind, first_file = self._first.setdefault(key, (kind, file))
        if first_kind != kind and key not in self._unsupported:
            raise CorruptError(
                f"the entry is a {first_kind} in {first_file.file}, but a {kind} in this file",
                file=file.file,
                key=key,
                hint=_MIXED,
            )

    def _add_meta(self, key: str, tensor: Tensor, file: TensorFile) -> None:
        """Record dtype and shape of a tensor; raise CorruptError if the files disagree."""
        parts = self._fragments.setdefault(key, [])
        first = self._tensors.setdefault(key, replace(tensor, tiling=bind_argument(tuple, parts)))
        if first != tensor:
            raise CorruptError(
                f"the tensor is {first.dtype} of shape {first.shape} in "
                f"{self._first[key][1].file}, but {tensor.dtype} of shape {tensor.shape} in this "
                "file",
                file=file.file,
                key=key,
                hint=_MIXED,
            )


def _named(array: StoredArray, file: TensorFile, name: str) -> StoredArray:
    """Give an array a name that is unique in the checkpoint, and the rank as coordinate."""
    return replace(array, name=f"{file.file}:{name}", coords=(("rank", file.rank),))


def _ranks_text(ranks: Sequence[int]) -> str:
    """Format numbers of ranks: ``rank 3``, ``ranks 1, 2``, ``ranks 1, 2, 3, 4 and 5 more``."""
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:4]))}{more}"


def _completed(tree: object, other: object) -> object:
    """Add to a tree the entries of mappings that only another tree has."""
    ours, theirs = as_mapping(tree), as_mapping(other)
    if ours is None or theirs is None:
        return tree
    parts = {
        name: _completed(item, theirs[name]) if name in theirs else item
        for name, item in ours.items()
    }
    parts |= {name: item for name, item in theirs.items() if name not in ours}
    return rebuild(tree, parts)


def _tied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of which those that consist of the same bytes on every rank are one."""
    first: dict[object, Tensor] = {}
    tied = {**tensors}
    for key, tensor in tensors.items():
        places = tuple(
            (part.array.extent, part.array.shape, part.box, part.at)
            for part in tensor.fragments()
            if part.array is not None
        )
        # Tensors without elements share no bytes.
        if tensor.n_bytes and places:
            tied[key] = first.setdefault((tensor.dtype, tensor.shape, places), tensor)
    return tied


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
            if not are_same(a, b):
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
    return rekey_by_skeleton(file, rebuild(file.skeleton, parts))
