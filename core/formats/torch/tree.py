"""The content of a file of ``torch.save``: an inert tree, and the stored arrays of the tensors in
it.

A zip (``torch.zip``) or a stream of before torch 1.6 (``torch.legacy``): both are a pickle and
named records, and from there on the same. Also where they lie inside other files: Megatron's rank
files, and the objects of a DCP checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.catalog.catalog import StoredObject
from core.catalog.key_patterns import listed_keys
from core.catalog.stored import Extent, StoredArray
from core.errors import CheckpointingException, CorruptError, UnsafeError, UnsupportedError
from core.files.substitute import substitute_in
from core.formats.torch.legacy import VERSION, read_legacy
from core.formats.torch.nested_names import uses_of_stream
from core.formats.torch.stream import stream_kind as stream_kind
from core.formats.torch.tensors import Hook, Location, TensorHooks, unsupported_kind
from core.formats.torch.weights_only import put_back
from core.formats.torch.zip.container import Record, check_kind, read_archive
from core.formats.torch.zip.records import (
    encoded,
    is_big_endian,
    pickle_limits,
    read_pickle,
    read_record,
)
from core.pickle.cycles import ENDLESS, cut_cycles
from core.pickle.inert import PLAIN, ObjectLeaf, TensorLeaf, as_mapping, is_flat, walk
from core.pickle.key_text import text_of
from core.pickle.names import dangerous_uses
from core.pickle.nesting import MAX_DEPTH, LeafEntry, containers, entries, join_path, map_leaves
from core.pickle.reader import gc_paused, load
from core.pickle.reduce import Name

if TYPE_CHECKING:
    from core.catalog.stored import Coords
    from core.files.store import ReadStore
    from core.pickle.nesting import Path


@dataclass(frozen=True, slots=True)
class TorchTree:
    """The content of a torch file.

    Args:
        value: the unpickled root, inert, with a ``TensorLeaf`` for every supported tensor. An
            object whose key is not its path is an ``ObjectLeaf`` in it; so is a root that is
            neither tensor nor container.
        arrays: the tensors reached through mappings and lists, by key, in order.
        aliases: key → the first key whose bytes are the same.
        objects: everything else reached in this way, with its value, by key.
        hidden: the tensors inside those objects, by the keys of their leaves.
        unsupported: key → kind, for objects that stand for tensors of an unsupported kind.
        notes: what the user should know.
        version: the zip's version record, or ``legacy 1001``.
        shared: path of a container → earlier path of the same one; they are separate in ``value``.
        is_set_aside: objects were below the reserved key of ``weights_only``; they are back in
            place.
    """

    value: object
    arrays: dict[str, StoredArray]
    aliases: dict[str, str] = field(default_factory=dict)
    objects: dict[str, StoredObject] = field(default_factory=dict)
    hidden: dict[str, StoredArray] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    version: str | None = None
    shared: dict[str, str] = field(default_factory=dict)
    is_set_aside: bool = False


def parse(
    store: ReadStore,
    file: str,
    *,
    start: int = 0,
    n_bytes: int | None = None,
    prefix: str = "",
    coords: Coords = (),
) -> TorchTree:
    """Read a file of ``torch.save``; metadata only.

    Args:
        start, n_bytes: the bytes of the file to read; None for the rest.
        prefix: prefix of every key.
        coords: rank coordinates of the arrays and objects.

    Raises:
        CorruptError, TruncatedError: the file is damaged, or a tensor lies outside its storage.
        UnsupportedError: neither a zip nor a stream that ``torch.save`` writes.
        UnsafeError: a hostile pickle.
    """
    n_bytes = store.size(file) - start if n_bytes is None else n_bytes
    # Refuse what is not a torch file, and files that stand for another one (a Git LFS pointer).
    kind = refuse_other_streams(store, file, start, n_bytes)
    substitute = substitute_in(store, file) if kind is None and start == 0 else None
    if substitute is not None:
        raise CorruptError(substitute.title, file=file, hint=substitute.hint)
    reader = TensorHooks(f"{prefix}#")
    with _file_in_errors(file), gc_paused():
        read_content = _read_legacy_stream if kind == "legacy" else _read_zip
        content = read_content(store, file, start, n_bytes, reader)
        return _TreeBuilder(content, reader, prefix, coords).tree(put_back(content.value))


@dataclass(frozen=True, slots=True)
class _Content:
    """A pickle and the records beside it.

    Args:
        file: the file with the records.
        value: the inert object, with a leaf of the hooks for each tensor.
        records: by name; ``data/<key>`` are those of storages.
        is_big: whether the numbers in them are big-endian.
        version: as in ``TorchTree``.
    """

    file: str
    value: object
    records: Mapping[str, Record]
    is_big: bool
    version: str | None


def _read_zip(
    store: ReadStore, file: str, start: int, n_bytes: int, reader: TensorHooks
) -> _Content:
    """Read the pickle of a torch zip; none of its tensors' data."""
    archive = read_archive(store, file, start=start, n_bytes=n_bytes)
    check_kind(archive)
    pickle = archive.record("data.pkl")
    data = read_pickle(store, file, pickle)
    value = load(data, label=file, hooks=reader.hooks, limits=pickle_limits(pickle))
    stated = archive.records.get("version")
    version = (
        read_record(store, file, stated) if stated is not None and stated.n_bytes <= 16 else b""
    )
    text = version.decode("ascii", "replace").strip()
    return _Content(file, value, archive.records, is_big_endian(store, archive), text or None)


def _read_legacy_stream(
    store: ReadStore, file: str, start: int, n_bytes: int, reader: TensorHooks
) -> _Content:
    """Read the object of a stream of before torch 1.6; none of its tensors' data."""
    stream = read_legacy(store, file, start=start, n_bytes=n_bytes, hooks=reader.hooks)
    return _Content(file, stream.value, stream.records, False, f"legacy {VERSION}")


def load_object(
    store: ReadStore, array: StoredArray, *, key: str
) -> tuple[object, dict[str, StoredArray]]:
    """Read an object that is stored as a stream of its own.

    Args:
        array: the stream, uint8: a file of ``torch.save`` or a bare pickle.
        key: the object's key; the keys of the tensors inside begin with it.

    Returns:
        The inert value, and the arrays of the tensors in it by the keys of their leaves.

    Raises:
        CorruptError, UnsupportedError, UnsafeError: as ``parse``; they name the object.
    """
    extent = array.extent
    assert extent.encoding is None and len(array.shape) == 1
    start, n_bytes = extent.offset, array.shape[0]
    try:
        if stream_kind(store, extent.file, start, n_bytes) == "pickle":
            return load(store.read(extent.file, start, n_bytes), label=extent.file), {}
        tree = parse(
            store, extent.file, start=start, n_bytes=n_bytes, prefix=f"{key}:", coords=array.coords
        )
        _refuse_endless(tree, prefix=f"{key}:")
        value = map_leaves(
            tree.value,
            lambda entry: (
                tree.objects[entry.leaf.key].value
                if isinstance(entry.leaf, ObjectLeaf)
                else entry.leaf
            ),
        )
    except CheckpointingException as err:
        err.key = err.key or key
        err.span = err.span or (start, start + n_bytes)
        raise
    return value, {**tree.arrays, **tree.hidden}


def load_shared(
    store: ReadStore, array: StoredArray, *, key: str, hooks: Mapping[Name, Hook] | None = None
) -> tuple[object, dict[str, StoredArray]]:
    """Read an object that is stored as a stream of its own, with its shared and cyclic parts as
    they are.

    ``load_object`` copies a container for each of its places, and gives each place of a tensor a
    key of its own. Here one leaf object with one key stands for each tensor.

    Args:
        array, key: as for ``load_object``.
        hooks: additional hooks, see ``core.pickle.reader.load``.

    Returns:
        The inert value, and the arrays of the tensors in it by the keys of their leaves.

    Raises:
        CorruptError, UnsupportedError, UnsafeError: as ``load_object``.
    """
    extent = array.extent
    assert extent.encoding is None and len(array.shape) == 1
    file, start, n_bytes = extent.file, extent.offset, array.shape[0]
    reader = TensorHooks(f"{key}:#", hooks)
    try:
        # A bare pickle has no tensors.
        kind = stream_kind(store, file, start, n_bytes)
        if kind == "pickle":
            return load(store.read(file, start, n_bytes), label=file, hooks=hooks), {}
        # A torch file: every location of the hooks becomes an array.
        refuse_other_streams(store, file, start, n_bytes)
        with _file_in_errors(file), gc_paused():
            content = (_read_legacy_stream if kind == "legacy" else _read_zip)(
                store, file, start, n_bytes, reader
            )
            reading = _TreeBuilder(content, reader, "", array.coords)
            value = put_back(content.value)
            arrays = {
                name: reading.array(name, location) for name, location in reader.locations.items()
            }
    except CheckpointingException as err:
        err.key = err.key or key
        err.span = err.span or (start, start + n_bytes)
        raise
    return value, arrays


def _refuse_endless(tree: TorchTree, *, prefix: str) -> None:
    """Raise if a container in a tree contains itself.

    Raises:
        UnsupportedError: a container contains itself; names the entries.
    """
    keys = [key.removeprefix(prefix) for key, kind in tree.unsupported.items() if kind == ENDLESS]
    if keys:
        raise UnsupportedError(
            f"a container in the object contains itself, at {listed_keys(keys)}",
            hint="save it again without these",
        )


def refuse_other_streams(store: ReadStore, file: str, start: int, n_bytes: int) -> str | None:
    """Return ``legacy`` for a stream of before torch 1.6, None for what may be a zip.

    Raises:
        UnsupportedError: a tar file of torch 0.1, or a bare pickle.
        UnsafeError: such a file, which would run code when it is loaded.
    """
    kind = stream_kind(store, file, start, n_bytes)
    if kind == "legacy":
        return kind
    if kind not in ("tar", "pickle"):
        return None
    dangerous = sorted(
        str(use.name) for use in dangerous_uses(uses_of_stream(store, file, start, n_bytes))
    )
    if dangerous:
        raise UnsafeError(
            f"the pickle names {dangerous[0]}, which would run code when it is loaded",
            file=file,
            hint="do not load it with anything else, and find out who wrote it",
        )
    if kind == "tar":
        raise UnsupportedError(
            "written in the tar format of torch 0.1, which no version of torch loads without running its pickles",
            file=file,
            hint="if you trust who wrote it, save its state dict anew with torch 1, where nothing else can be harmed",
        )
    raise UnsupportedError(
        "a bare pickle, not a file of torch.save",
        file=file,
        hint="save it with torch.save where it came from",
    )


@contextmanager
def _file_in_errors(file: str) -> Iterator[None]:
    """Add the name of the file to errors that lack it."""
    try:
        yield
    except CheckpointingException as err:
        err.file = err.file or file
        raise


class _TreeBuilder:
    """Builds one tree, in which keys take the place of placeholders."""

    def __init__(self, content: _Content, reader: TensorHooks, prefix: str, coords: Coords) -> None:
        self._content = content
        self._reader = reader
        self._prefix = prefix
        self._coords = coords

    def tree(self, root: object) -> TorchTree:
        """Build the content of the file.

        Args:
            root: the pickle's value, with everything that was set aside back in its place.
        """
        is_set_aside = root is not self._content.value
        # Containers that contain themselves are cut, so that every path ends.
        if _check_unfolded_size(root):
            root = cut_cycles(root)
            _check_unfolded_size(root)
        # Give every tensor and object its key, and rebuild the tree with them.
        tree_entries = list(entries(root))
        keys = iter(keys_of(tree_entries, reserved=self._reader.locations))
        arrays: dict[str, StoredArray] = {}
        objects: dict[str, StoredObject] = {}
        unsupported: dict[str, str] = {}
        attributes: dict[str, tuple[str, ...]] = {}

        def leaf_with_key(entry: LeafEntry) -> object:
            path_key, plain_key = next(keys)
            key = self._prefix + path_key
            leaf = entry.leaf
            if isinstance(leaf, TensorLeaf):
                arrays[key] = self.array(key, self._reader.locations[leaf.key])
                if leaf.key in self._reader.attributes:
                    attributes[key] = self._reader.attributes[leaf.key]
                return TensorLeaf(key, leaf.wrapper, leaf.requires_grad)
            if isinstance(leaf, ObjectLeaf):
                objects[key] = StoredObject(key, coords=self._coords)
                unsupported[key] = ENDLESS
                return ObjectLeaf(key)
            objects[key] = StoredObject(key, value=leaf, coords=self._coords)
            kind = unsupported_kind(leaf)
            if kind is not None:
                unsupported[key] = kind
            return leaf if path_key == plain_key and entry.path else ObjectLeaf(key)

        value = map_leaves(root, leaf_with_key)
        # Tensors inside objects keep the keys of the hooks.
        hidden = {
            node.key: self.array(node.key, self._reader.locations[node.key])
            for node in walk([value, [item.value for item in objects.values()]])
            if isinstance(node, TensorLeaf) and node.key in self._reader.locations
        }
        return TorchTree(
            value=value,
            arrays=arrays,
            aliases=_same_bytes(arrays),
            objects=objects,
            hidden=hidden,
            unsupported=unsupported,
            notes=_attribute_notes(attributes),
            version=self._content.version,
            shared=_shared_containers(root),
            is_set_aside=is_set_aside,
        )

    def array(self, key: str, location: Location) -> StoredArray:
        """Return the stored array of a tensor, after checking that its record holds it.

        Raises:
            CorruptError: the record is missing or too short.
        """
        content = self._content
        record = content.records.get(location.record)
        if record is None:
            raise CorruptError(
                f"the record {location.record!r} of the tensor is missing",
                key=key,
                rule="torch.storage",
            )
        if location.storage_bytes > record.n_bytes:
            raise CorruptError(
                f"the tensor's storage has {location.storage_bytes} bytes, but its record {location.record!r} has only "
                f"{record.n_bytes}",
                key=key,
                span=record.span,
                rule="torch.storage",
            )
        extent = encoded(
            content.file,
            record,
            dtype=location.dtype,
            shape=location.shape,
            offset=location.offset,
            strides=location.strides,
            is_big=content.is_big,
        )
        if extent is None:
            is_whole = (
                location.offset == 0
                and location.strides is None
                and location.n_bytes == record.n_bytes
            )
            crc = record.crc if is_whole and record.crc else None
            extent = Extent(
                content.file, record.offset + location.offset, location.strides, crc=crc
            )
        return StoredArray(key, location.dtype, location.shape, extent, self._coords)


def keys_of(
    tree_entries: list[LeafEntry], *, reserved: Container[str] = ()
) -> list[tuple[str, str]]:
    """Return a unique key and the plain key of every entry.

    The plain key is the path, dot-joined. Where several entries have the same, those with dots in
    names get them escaped (``a\\.b``); what is still the same is numbered.

    Args:
        tree_entries: entries of one tree.
        reserved: keys that must not be used.
    """
    plain = [_dotted(entry.path) for entry in tree_entries]
    count = Counter(plain)
    used: set[str] = set()
    keys = []
    for entry, key in zip(tree_entries, plain, strict=True):
        # Escape dots in names where two paths join to the same key.
        chosen = key
        if count[key] > 1 and any("." in text_of(part) for part in entry.path):
            chosen = ".".join(
                text_of(part).replace("\\", "\\\\").replace(".", "\\.") for part in entry.path
            )
        # Number what is still the same.
        base, number = chosen, 2
        while chosen in used or chosen in reserved or (chosen != key and chosen in count):
            chosen = f"{base}~{number}"
            number += 1
        used.add(chosen)
        keys.append((chosen, key))
    return keys


def _dotted(path: Path) -> str:
    """Return a path as a key; ``value`` for the root."""
    return join_path(path) if path else "value"


def _same_bytes(arrays: dict[str, StoredArray]) -> dict[str, str]:
    """Return key → first key with the same address, strides, shape and dtype.

    Empty tensors share no bytes.
    """
    first: dict[tuple[object, ...], str] = {}
    aliases = {}
    for key, array in arrays.items():
        if array.n_bytes:
            extent = array.extent
            address = (extent.offset, extent.strides, extent.encoding, array.shape, array.dtype)
            earlier = first.setdefault(address, key)
            if earlier != key:
                aliases[key] = earlier
    return aliases


def _shared_containers(root: object) -> dict[str, str]:
    """Return path of a container of entries → path of the same object before it.

    Those below it are not listed.

    The path of an object that holds such a container is listed as well.

    Of an object that holds a container of entries, its own path.
    """
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    # Containers of entries are listed by their own path.
    for path, node in containers(root, once=True):
        name = _dotted(path)
        earlier = first.setdefault(id(node), name)
        if earlier != name and not isinstance(node, tuple):
            shared[name] = earlier
    # Objects are listed if they hold such a container.
    visited: set[int] = set()  # a container in several objects is reported for the first of them
    for entry in entries(root):
        if isinstance(entry.leaf, TensorLeaf):
            continue
        repeated = [
            node
            for node in walk(entry.leaf, visited)
            if id(node) in first and not isinstance(node, tuple)
        ]
        if repeated:
            shared.setdefault(_dotted(entry.path), first[id(repeated[0])])
    return shared


def _attribute_notes(attributes: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return a note on the Python attributes of tensors, which are not kept."""
    if not attributes:
        return ()
    names = sorted({name for tensor_names in attributes.values() for name in tensor_names})
    listed = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
    n_tensors = len(attributes)
    subject = f"{n_tensors} tensors carry" if n_tensors > 1 else f"{next(iter(attributes))} carries"
    return (f"{subject} Python attributes ({listed}), which are not kept",)


def _check_unfolded_size(root: object) -> bool:
    """Return whether containers contain themselves.

    If not, walking every path through them ends soon.

    A few shared lists or dicts make 2⁶⁰ paths; a checkpoint has not many more than it has
    containers.

    Raises:
        UnsafeError: there are too many paths.
        CorruptError: the containers are nested too deeply.
    """
    sizes: dict[int, int] = {}
    is_endless = False

    def size(node: object, depth: int) -> int:
        nonlocal is_endless
        children: list[object] | tuple[object, ...]
        if type(node) in PLAIN or type(node) is TensorLeaf or not node:
            return 1
        if isinstance(node, (list, tuple)):
            children = node
        else:
            mapping = as_mapping(node)
            if not mapping:
                return 1
            children = list(mapping.values())
        n_paths_below = sizes.get(id(node))
        if n_paths_below is None:
            if depth > MAX_DEPTH:
                raise CorruptError(f"containers are nested deeper than {MAX_DEPTH} levels")
            sizes[id(node)] = _OPEN
            n_paths_below = 1 + (
                len(children)
                if is_flat(children)
                else sum(size(child, depth + 1) for child in children)
            )
            sizes[id(node)] = n_paths_below
        is_endless |= n_paths_below == _OPEN
        return n_paths_below

    n_paths = size(root, 0)
    if is_endless:
        return True
    if n_paths > 1_000_000 and n_paths > 16 * sum(_container_lengths(root)):
        raise UnsafeError(f"containers are shared so often that they unfold to {n_paths:,} entries")
    return False


_OPEN = 0
"""The size of a container whose children are being counted; that of any other is more."""


def _container_lengths(root: object) -> Iterator[int]:
    """Yield the number of elements of every container below ``root``, each container once."""
    for node in walk(root):
        mapping = as_mapping(node)
        if mapping is not None:
            yield len(mapping)
        elif isinstance(node, (list, tuple)):
            yield len(node)
