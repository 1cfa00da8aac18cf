"""What the files of Megatron's ranks hold, rank by rank; files that say the same are read once.

The content of a file is worked out for its pattern (``core.formats.torch.shared_structure``), and every rank gets a
copy with its own keys, file and coordinates. What holds no tensor is shared by the ranks that have it, so that
comparing it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.catalog.catalog import StoredObject
from core.catalog.stored import Coords, Extent, StoredArray
from core.errors import CorruptError
from core.formats.torch.shared_structure import FilePattern, PatternedFile, PatternedFiles
from core.formats.torch.tree import TorchTree
from core.formats.torch.zip.container import Record
from core.megatron.extras.common_state import OPTIMIZER, is_chunk
from core.megatron.model.args import replaced
from core.pickle.inert import Inert, ObjectLeaf, TensorLeaf, as_mapping, walk
from core.pickle.nesting import entries, mapped

if TYPE_CHECKING:
    from core.files.store import ReadStore


@dataclass(frozen=True, slots=True)
class RankContent:
    """A file of one rank.

    Args:
        skeleton: its content, with every object in its place.
        arrays: the tensors of model and optimizer, by key.
        hidden: those of other entries.
        objects: everything that is no tensor.
        aliases, unsupported: as in ``core.formats.torch.format``.
    """

    skeleton: object
    arrays: dict[str, StoredArray]
    hidden: dict[str, StoredArray]
    objects: list[StoredObject]
    aliases: dict[str, str]
    unsupported: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Form:
    """The content of a pattern: keys without prefix.

    Args:
        arrays, hidden: (key, array, name of the record whose CRC is the array's) of each tensor.
        objects: (key, top-level entry that is the object, or None; the value).
        with_leaves: ids of the containers that hold tensors.
    """

    skeleton: object
    arrays: Sequence[tuple[str, StoredArray, str | None]]
    hidden: Sequence[tuple[str, StoredArray, str | None]]
    objects: Sequence[tuple[str, str | None, object]]
    tree: TorchTree
    with_leaves: frozenset[int]
    file: str


class RankFiles:
    """Reads the files of all ranks.

    Args:
        store: where they are.
        samples: open one file of each pipeline stage and length, and take the others to be like it.
    """

    def __init__(self, store: ReadStore, *, samples: bool = False) -> None:
        self._alike = PatternedFiles(store)
        self._store = store
        self.samples = samples
        self._forms: dict[int, tuple[FilePattern, _Form]] = {}

    @property
    def n_unopened(self) -> int:
        """Files that were taken to be like others."""
        return self._alike.n_unopened

    def root(self, file: str) -> Mapping[object, object]:
        """The top-level entries of a file, by name; tensors in it have no keys of the checkpoint. {} for no dict."""
        alike = self._alike.read(file)
        return as_mapping(_with_arguments(alike.pattern.tree.value, alike.arguments)) or {}

    def model(self, file: str, folder: str, coords: Coords) -> RankContent:
        """The content of a rank's model_optim_rng.pt.

        Raises:
            CorruptError, TruncatedError, UnsupportedError, UnsafeError: as ``core.formats.torch.tree.parse``.
        """
        return self._read(file, f"{folder}:", coords, _model_form)

    def beside(self, file: str, folder: str, coords: Coords, *, name: str) -> RankContent:
        """The content of another file of a rank, whose keys begin with ``name``."""
        return self._read(file, f"{folder}:{name}.", coords, _plain_form)

    def _read(self, file: str, prefix: str, coords: Coords, form_of: Callable[[FilePattern], _Form]) -> RankContent:
        alike = self._alike.assumed(file, self._role(file, coords)) if self.samples else self._alike.read(file)
        known = self._forms.get(id(alike.pattern))
        if known is None:
            known = self._forms[id(alike.pattern)] = (alike.pattern, form_of(alike.pattern))
        return _content(known[1], alike, prefix, coords)

    def _role(self, file: str, coords: Coords) -> tuple[str, int]:
        """What a file is for: its name and its stage; and its length, which no file is opened for."""
        folder, _, name = file.rpartition("/")
        return f"{dict(coords).get('pp', 0)}/{name}", self._store.sizes(folder)[name]


def _model_form(pattern: FilePattern) -> _Form:
    tree = pattern.tree
    skeleton = _inlined(tree)
    root = as_mapping(skeleton)
    if root is None:
        raise CorruptError(f"the file holds a {type(skeleton).__name__}, not a dict", file=pattern.file)
    aside = _hidden_keys(root)
    arrays = {key: array for key, array in tree.arrays.items() if key not in aside}
    hidden = {key: array for key, array in tree.arrays.items() if key in aside} | tree.hidden
    return _form(pattern, skeleton, arrays, hidden, list(_objects(root)))


def _plain_form(pattern: FilePattern) -> _Form:
    tree = pattern.tree
    objects = [(key, None, item.value) for key, item in tree.objects.items()]
    return _form(pattern, _inlined(tree), tree.arrays, tree.hidden, objects)


def _form(
    pattern: FilePattern,
    skeleton: object,
    arrays: Mapping[str, StoredArray],
    hidden: Mapping[str, StoredArray],
    objects: Sequence[tuple[str, str | None, object]],
) -> _Form:
    record_at = {record.offset: name for name, record in pattern.records.items()}

    def listed(found: Mapping[str, StoredArray]) -> list[tuple[str, StoredArray, str | None]]:
        return [(key, array, _record_of(array, record_at, pattern.records)) for key, array in found.items()]

    return _Form(
        skeleton, listed(arrays), listed(hidden), objects, pattern.tree, frozenset(_with_leaves(skeleton)), pattern.file
    )


def _record_of(array: StoredArray, record_at: Mapping[int, str], records: Mapping[str, Record]) -> str | None:
    """The record that is all of an array, as it lies in the file."""
    extent = array.extent
    name = record_at.get(extent.offset)
    if name is None or extent.encoding is not None or extent.strides is not None:
        return None
    return name if records[name].n_bytes == array.n_bytes else None


def _with_leaves(skeleton: object) -> Iterator[int]:
    """Ids of the containers below which there is a tensor."""
    nodes = [node for node in walk(skeleton) if isinstance(node, (dict, list, tuple, Inert))]
    found: set[int] = set()
    n_before = -1
    while n_before < len(found):  # cycles and shared parts need another pass, usual files two
        n_before = len(found)
        for node in reversed(nodes):
            if id(node) not in found and any(
                isinstance(part, TensorLeaf) or id(part) in found for part in _parts(node)
            ):
                found.add(id(node))
    yield from found


def _parts(node: object) -> Iterator[object]:
    if isinstance(node, dict):
        yield from node.values()
    elif isinstance(node, (list, tuple)):
        yield from node
    elif isinstance(node, Inert):
        yield from node.args
        yield from node.items
        yield node.state
        for key, item in node.entries:
            yield key
            yield item


def _inlined(tree: TorchTree) -> object:
    """The content of a file with every object in its place."""
    objects = tree.objects
    return mapped(
        tree.value, lambda entry: objects[entry.leaf.key].value if isinstance(entry.leaf, ObjectLeaf) else entry.leaf
    )


def _hidden_keys(root: Mapping[object, object]) -> set[str]:
    """Keys of the tensors that belong to neither model nor optimizer."""
    beside = {name: value for name, value in root.items() if not is_chunk(name) and name != OPTIMIZER}
    return {entry.leaf.key for entry in entries(beside) if isinstance(entry.leaf, TensorLeaf)}


def _objects(root: Mapping[object, object]) -> Iterator[tuple[str, str | None, object]]:
    """The non-tensor entries of a rank: those of model and optimizer one by one, every other top-level one whole."""
    for name, value in root.items():
        if not is_chunk(name) and name != OPTIMIZER:
            if not isinstance(value, TensorLeaf):
                yield str(name), str(name), value
            continue
        for entry in entries({name: value}):
            if not isinstance(entry.leaf, TensorLeaf):
                yield entry.key, None, entry.leaf


def _content(form: _Form, alike: PatternedFile, prefix: str, coords: Coords) -> RankContent:
    """The content of one rank's file by its form."""
    tree, file, crcs = form.tree, alike.file, alike.crcs
    names = {key: prefix + key for key in (*tree.arrays, *tree.hidden)}

    def placed(found: Sequence[tuple[str, StoredArray, str | None]]) -> dict[str, StoredArray]:
        made = {}
        for key, array, record in found:
            extent = array.extent
            if file != form.file:
                crc = None if record is None else crcs.get(record) or None
                extent = Extent(file, extent.offset, extent.strides, None, extent.encoding, crc)
            name = names[key]
            made[name] = StoredArray(name, array.dtype, array.shape, extent, coords)
        return made

    skeleton = _Renaming(names, form.with_leaves).renamed(_with_arguments(form.skeleton, alike.arguments))
    by_name = {str(name): value for name, value in (as_mapping(skeleton) or {}).items()}
    return RankContent(
        skeleton,
        placed(form.arrays),
        placed(form.hidden),
        [
            StoredObject(prefix + key, value=value if entry is None else by_name[entry], coords=coords)
            for key, entry, value in form.objects
        ],
        {prefix + key: prefix + other for key, other in tree.aliases.items()},
        {prefix + key: kind for key, kind in tree.unsupported.items()},
    )


def _with_arguments(skeleton: object, arguments: Mapping[str, int]) -> object:
    """The content with other numbers in its training arguments."""
    if not arguments:
        return skeleton
    root = as_mapping(skeleton) or {}
    return {**root, "args": replaced(root["args"], arguments)}


class _Renaming:
    """Copies of containers in which the leaves have other keys; what holds no leaf is not copied.

    Args:
        names: key → new key.
        with_leaves: ids of the containers that hold leaves.
    """

    def __init__(self, names: Mapping[str, str], with_leaves: frozenset[int]) -> None:
        self._names = names
        self._with_leaves = with_leaves
        self._made: dict[int, object] = {}

    def renamed(self, root: object) -> object:
        """A copy of a file's content."""
        mapping = as_mapping(root)
        return self._node(root) if mapping is None else {name: self._node(value) for name, value in mapping.items()}

    def _node(self, node: object) -> object:
        if type(node) is TensorLeaf:
            return TensorLeaf(self._names.get(node.key, node.key), node.wrapper, node.requires_grad)
        if id(node) not in self._with_leaves:
            return node
        made = self._made.get(id(node))
        if made is None:
            made = self._made[id(node)] = self._copy(node)
        return made

    def _copy(self, node: object) -> object:
        below = self._node
        if isinstance(node, dict):
            return {name: below(item) for name, item in node.items()}
        if isinstance(node, list):
            return [below(item) for item in node]
        if isinstance(node, tuple):
            return tuple(below(item) for item in node)
        assert isinstance(node, Inert)
        copy = Inert(node.how, node.fn, tuple(below(item) for item in node.args), kwargs=node.kwargs)
        copy.state = below(node.state)
        copy.items = [below(item) for item in node.items]
        copy.entries = [(name, below(item)) for name, item in node.entries]
        return copy
