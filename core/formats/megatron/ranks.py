"""The content of Megatron's rank files, rank by rank; of files with equal structure, one is parsed.

The content is derived from the parsed file (``core.formats.torch.shared_structure``), and copied
for every rank with its keys, file and coordinates. Containers without tensors are not copied, so
that comparing ranks takes no time: they share one object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import StoredObject
from core.engine.catalog.stored import Coords, Extent, StoredArray
from core.errors import CorruptError
from core.formats.torch.shared_structure import FilePattern, PatternedFile, PatternedFiles
from core.formats.torch.tree import TorchTree
from core.megatron.extras.common_state import OPTIMIZER, is_chunk
from core.megatron.model.args import replaced
from core.pickle.inert import Inert, TensorLeaf, as_mapping, walk
from core.pickle.nesting import entries
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore


@dataclass(frozen=True, slots=True)
class RankContent:
    """The content of one rank's file.

    Args:
        skeleton: nested containers with leaves for tensors and with all other values.
        arrays: the tensors of model and optimizer, by key.
        hidden: the tensors of other entries, by key.
        objects: the entries that are not tensors.
    """

    skeleton: object
    arrays: dict[str, StoredArray]
    hidden: dict[str, StoredArray]
    objects: list[StoredObject]


@dataclass(frozen=True, slots=True)
class _RankForm:
    """The content of a parsed file, from which that of files with equal structure is derived.

    Keys have no prefix.

    Args:
        skeleton: as in ``RankContent``.
        arrays, hidden: key, array, and name of the record with the array's CRC, of each tensor.
        objects: key, top-level entry that is the object (or None), and value, of each object.
        tree: the content as it was parsed.
        with_leaves: ids of the containers in the skeleton that contain tensors.
        file: the parsed file.
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
        samples: open one file of each pipeline stage and length, and assume that the others equal
            it.
    """

    def __init__(self, store: ReadStore, *, samples: bool = False) -> None:
        self._patterned_files = PatternedFiles(store)
        self._store = store
        self.samples = samples
        self._forms: dict[int, tuple[FilePattern, _RankForm]] = {}
        """id of a pattern → the pattern, kept so that its id stays unique, and its form."""

    @property
    def n_unopened(self) -> int:
        """Number of files that were not opened, but assumed to equal others."""
        return self._patterned_files.n_unopened

    def expect(self, files: Iterable[str]) -> None:
        """Announce the files that will be read; of a sample, one of each role.

        The arguments are not known yet, so the stage is the number after that of the tensor rank.
        """

        def names() -> Iterator[str]:
            roles = set()
            for file in files:
                folder, _, name = file.rpartition("/")
                stage = "".join(folder.removeprefix("mp_rank_").split("_")[1:2])
                role = (stage, name, self._store.sizes(folder)[name]) if self.samples else file
                if role not in roles:
                    roles.add(role)
                    yield file

        # A generator: only a remote store asks for the sizes.
        self._store.expect_headers(names())

    def read_root(self, file: str) -> Mapping[object, object]:
        """Return the top-level entries of a file by name; {} if it is not a dict.

        The keys of the tensors are not those of the checkpoint.

        Raises:
            CorruptError, TruncatedError, UnsupportedError, UnsafeError: as
                ``core.formats.torch.tree.parse``.
        """
        content = self._patterned_files.read(file)
        return as_mapping(_with_arguments(content.pattern.tree.value, content.arguments)) or {}

    def read_model(self, file: str, folder: str, coords: Coords) -> RankContent:
        """Read a rank's model_optim_rng.pt.

        Args:
            file: path in the store.
            folder: the rank's directory, with which keys begin.

        Raises:
            CorruptError, TruncatedError, UnsupportedError, UnsafeError: as
                ``core.formats.torch.tree.parse``; or the file's content is not a dict.
        """
        return self._read(file, f"{folder}:", coords, _build_model_form)

    def read_other(self, file: str, folder: str, coords: Coords, *, name: str) -> RankContent:
        """Read another file of a rank, whose keys begin with the directory and ``name``.

        Raises:
            CorruptError, TruncatedError, UnsupportedError, UnsafeError: as
                ``core.formats.torch.tree.parse``.
        """
        return self._read(file, f"{folder}:{name}.", coords, _build_plain_form)

    def _read(
        self, file: str, prefix: str, coords: Coords, form_of: Callable[[FilePattern], _RankForm]
    ) -> RankContent:
        # For a sample, files with equal pipeline stage, name and length are assumed to be equal.
        if self.samples:
            folder, _, name = file.rpartition("/")
            role = f"{dict(coords).get('pp', 0)}/{name}", self._store.sizes(folder)[name]
            content = self._patterned_files.assume(file, role)
        else:
            content = self._patterned_files.read(file)
        # The form is derived from a pattern once, and the content of each file from the form.
        entry = self._forms.get(id(content.pattern))
        if entry is None:
            entry = self._forms[id(content.pattern)] = (content.pattern, form_of(content.pattern))
        return _derive_content(entry[1], content, prefix, coords)


def _build_model_form(pattern: FilePattern) -> _RankForm:
    """Build the form of a model_optim_rng.pt.

    Raises:
        CorruptError: the content of the file is not a dict.
    """
    tree = pattern.tree
    skeleton = tree.inline_objects()
    root = as_mapping(skeleton)
    if root is None:
        raise CorruptError(
            f"the file contains a {type(skeleton).__name__}, not a dict", file=pattern.file
        )
    # The tensors of entries other than model and optimizer are hidden.
    other_entries = {
        name: value for name, value in root.items() if not is_chunk(name) and name != OPTIMIZER
    }
    hidden_keys = {
        entry.leaf.key for entry in entries(other_entries) if isinstance(entry.leaf, TensorLeaf)
    }
    arrays = {key: array for key, array in tree.arrays.items() if key not in hidden_keys}
    hidden = {key: array for key, array in tree.arrays.items() if key in hidden_keys} | tree.hidden
    return _build_form(pattern, skeleton, arrays, hidden, list(_list_objects(root)))


def _build_plain_form(pattern: FilePattern) -> _RankForm:
    """Build the form of any other file of a rank."""
    tree = pattern.tree
    objects = [(key, None, item.value) for key, item in tree.objects.items()]
    return _build_form(pattern, tree.inline_objects(), tree.arrays, tree.hidden, objects)


def _build_form(
    pattern: FilePattern,
    skeleton: object,
    arrays: Mapping[str, StoredArray],
    hidden: Mapping[str, StoredArray],
    objects: Sequence[tuple[str, str | None, object]],
) -> _RankForm:
    """Build a form; arguments are as in ``_RankForm``."""
    records = pattern.records
    name_at = {record.offset: name for name, record in records.items()}

    # An array has its record's CRC if it consists of all its bytes, in their order.
    def with_records(
        tensors: Mapping[str, StoredArray],
    ) -> list[tuple[str, StoredArray, str | None]]:
        triples = []
        for key, array in tensors.items():
            extent = array.extent
            name = name_at.get(extent.offset)
            is_plain = extent.encoding is None and extent.strides is None
            if name is None or not is_plain or records[name].n_bytes != array.n_bytes:
                name = None
            triples.append((key, array, name))
        return triples

    return _RankForm(
        skeleton,
        with_records(arrays),
        with_records(hidden),
        objects,
        pattern.tree,
        _containers_with_leaves(skeleton),
        pattern.file,
    )


def _containers_with_leaves(skeleton: object) -> frozenset[int]:
    """Return the ids of the containers that contain a tensor at any depth."""
    # One pass from the innermost containers outwards finds all but some shared containers and
    # cycles, so passes are repeated until one finds nothing new.
    nodes = [node for node in walk(skeleton) if isinstance(node, (dict, list, tuple, Inert))]
    ids: set[int] = set()
    n_before = -1
    while n_before < len(ids):
        n_before = len(ids)
        for node in reversed(nodes):
            if id(node) not in ids and any(
                isinstance(part, TensorLeaf) or id(part) in ids for part in _direct_parts(node)
            ):
                ids.add(id(node))
    return frozenset(ids)


def _direct_parts(node: object) -> Iterator[object]:
    """Yield the direct children of a container."""
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


def _list_objects(root: Mapping[object, object]) -> Iterator[tuple[str, str | None, object]]:
    """Yield the non-tensor entries of a rank, as in ``_RankForm.objects``.

    Those inside model and optimizer are separate objects; every other top-level entry is one.
    """
    for name, value in root.items():
        if not is_chunk(name) and name != OPTIMIZER:
            if not isinstance(value, TensorLeaf):
                yield str(name), str(name), value
            continue
        for entry in entries({name: value}):
            if not isinstance(entry.leaf, TensorLeaf):
                yield entry.key, None, entry.leaf


def _derive_content(
    form: _RankForm, patterned: PatternedFile, prefix: str, coords: Coords
) -> RankContent:
    """Derive the content of one rank's file from its form.

    Args:
        patterned: the file's CRCs and training arguments.
        prefix: prefix of every key.
    """
    tree, file, crcs = form.tree, patterned.file, patterned.crcs
    names = {key: prefix + key for key in (*tree.arrays, *tree.hidden)}

    # Arrays are at the same addresses as in the parsed file, but have other CRCs.
    def placed(tensors: Sequence[tuple[str, StoredArray, str | None]]) -> dict[str, StoredArray]:
        arrays: dict[str, StoredArray] = {}
        array_of: dict[int, StoredArray] = {}
        for key, array, record in tensors:
            name = names[key]
            if id(array) in array_of:
                arrays[name] = array_of[id(array)]
                continue
            extent = array.extent
            if file != form.file:
                crc = None if record is None else crcs.get(record) or None
                extent = Extent(file, extent.offset, extent.strides, None, extent.encoding, crc)
            array_of[id(array)] = StoredArray(name, array.dtype, array.shape, extent, coords)
            arrays[name] = array_of[id(array)]
        return arrays

    # Set this rank's arguments and keys; top-level entries that are objects come from the result.
    skeleton = _KeyRenamer(names, form.with_leaves).renamed(
        _with_arguments(form.skeleton, patterned.arguments)
    )
    by_name = {str(name): value for name, value in (as_mapping(skeleton) or {}).items()}
    return RankContent(
        skeleton,
        placed(form.arrays),
        placed(form.hidden),
        [
            StoredObject(
                prefix + key,
                value=value if entry is None else by_name[entry],
                coords=coords,
                refused=tree.objects[key].refused if key in tree.objects else None,
            )
            for key, entry, value in form.objects
        ],
    )


def _with_arguments(skeleton: object, arguments: Mapping[str, int]) -> object:
    """Return the content of a file with other values of some training arguments."""
    if not arguments:
        return skeleton
    root = as_mapping(skeleton) or {}
    return {**root, "args": replaced(root["args"], arguments)}


class _KeyRenamer:
    """Copies containers and gives the leaves in them new keys.

    Containers without leaves are not copied, and a container that occurs twice is copied once.

    Args:
        names: key → new key.
        with_leaves: ids of the containers that contain leaves.
    """

    def __init__(self, names: Mapping[str, str], with_leaves: frozenset[int]) -> None:
        self._names = names
        self._containers_with_leaves = with_leaves
        self._copies: dict[int, object] = {}

    def renamed(self, root: object) -> object:
        """Return a copy of a file's content with other keys; the root becomes a dict."""
        mapping = as_mapping(root)
        if mapping is None:
            return self._node(root)
        return {name: self._node(value) for name, value in mapping.items()}

    def _node(self, node: object) -> object:
        if type(node) is TensorLeaf:
            return TensorLeaf(self._names.get(node.key, node.key), node.wrapper, node.requires_grad)
        if id(node) not in self._containers_with_leaves:
            return node
        copied = self._copies.get(id(node))
        if copied is None:
            copied = self._copies[id(node)] = self._copy(node)
        return copied

    def _copy(self, node: object) -> object:
        visit = self._node
        if isinstance(node, dict):
            return {name: visit(item) for name, item in node.items()}
        if isinstance(node, list):
            return list(map(visit, node))
        if isinstance(node, tuple):
            return tuple(map(visit, node))
        assert isinstance(node, Inert)
        copy = Inert(node.how, node.fn, tuple(map(visit, node.args)), kwargs=node.kwargs)
        copy.state = visit(node.state)
        copy.items = list(map(visit, node.items))
        copy.entries = [(name, visit(item)) for name, item in node.entries]
        return copy
