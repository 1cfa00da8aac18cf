"""The content of a ``torch.save`` file: an inert tree, and the stored arrays of its tensors.

The file is a zip (``torch.zip``) or a stream from before torch 1.6 (``torch.legacy``). Both consist
of a pickle and named records, so that they are treated alike here. Also for such files inside other
ones: Megatron's rank files, and the objects of a DCP checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import StoredObject
from core.engine.catalog.dropped import Dropped, dropped_together
from core.engine.catalog.stored import Extent, StoredArray
from core.errors import (
    UNLIKE_ANY_WRITER,
    CorruptError,
    Report,
    UnsafeError,
    UnsupportedError,
    list_some,
    placing_errors,
    raising,
    suggesting,
)
from core.files.substitute import substitute_in
from core.formats.torch.object_tensors import with_state_dicts
from core.formats.torch.stream import stream_kind as stream_kind
from core.formats.torch.tensors import Hook, Location, TensorHooks, unsupported_kind
from core.formats.torch.weights_only import restore_set_aside
from core.formats.torch.zip.container import Record, check_kind, read_archive
from core.formats.torch.zip.records import (
    encoded,
    is_big_endian,
    pickle_limits,
    read_pickle,
    read_record,
)
from core.pickle.inert import PLAIN, ObjectLeaf, TensorLeaf, as_mapping, is_flat, walk
from core.pickle.key_text import describe_key
from core.pickle.nesting import (
    ENDLESS,
    MAX_DEPTH,
    LeafEntry,
    containers,
    cut_cycles,
    entries,
    join_path,
    map_leaves,
)
from core.pickle.noted import gc_paused
from core.pickle.reader import load
from core.pickle.reduce import Name
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.stored import Coords
    from core.files.store import ReadStore
    from core.pickle.nesting import Path


@dataclass(frozen=True, slots=True)
class TorchTree:
    """The content of a torch file.

    Args:
        value: the unpickled root, inert, with a ``TensorLeaf`` for every supported tensor. An
            object whose key is not its path is an ``ObjectLeaf`` in it; so is a root that is
            neither tensor nor container.
        arrays: the tensors reached through mappings and lists, by key, in order; those that consist
            of the same bytes of the file are one array, which has the first one's key as its name.
        objects: everything else reached through mappings and lists, with its value, by key.
        hidden: the tensors inside those objects, by the keys of their leaves.
        notes: notes to the user.
        dropped: the record of Python attributes of tensors, which are not kept.
        version: the zip's version record, or ``legacy 1001``.
        shared: path of a container → earlier path of the same object. In ``value``, each path has
            its own copy.
        is_set_aside: whether objects were stored below the reserved key of ``weights_only``; in
            ``value``, they are in their own places again.
    """

    value: object
    arrays: dict[str, StoredArray]
    objects: dict[str, StoredObject] = field(default_factory=dict)
    hidden: dict[str, StoredArray] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    version: str | None = None
    shared: dict[str, str] = field(default_factory=dict)
    is_set_aside: bool = False

    def inline_objects(self) -> object:
        """Return the root with every object in its place."""
        return map_leaves(
            self.value,
            lambda entry: (
                self.objects[entry.leaf.key].value
                if isinstance(entry.leaf, ObjectLeaf)
                else entry.leaf
            ),
        )


def parse(
    store: ReadStore,
    file: str,
    *,
    start: int = 0,
    n_bytes: int | None = None,
    prefix: str = "",
    coords: Coords = (),
    keeps_modules: bool = False,
    report: Report = raising,
) -> TorchTree:
    """Read a file of ``torch.save``; metadata only.

    Args:
        start, n_bytes: the bytes of the file to read; ``n_bytes`` None: up to its end.
        prefix: prefix of every key.
        coords: rank coordinates of the arrays and objects.
        keeps_modules: leave pickled modules the objects that they are, as parts of an object; by
            default they are read as their state dicts.
        report: receives the error of a zip that was cut, or whose directory is damaged; the tree
            then has the tensors whose records are complete. Raises it by default.

    Raises:
        CorruptError, TruncatedError: the file is damaged, or a tensor is outside its storage.
        UnsupportedError: neither a zip nor a stream that ``torch.save`` writes.
        UnsafeError: a hostile pickle.
    """
    n_bytes = store.size(file) - start if n_bytes is None else n_bytes
    # Refuse other pickles, and files that stand for another one (a Git LFS pointer).
    kind = refuse_other_streams(store, file, start, n_bytes)
    substitute = substitute_in(store, file) if kind is None and start == 0 else None
    if substitute is not None:
        raise CorruptError(substitute.title, file=file, hint=substitute.hint)
    reader = TensorHooks(f"{prefix}#", takes_apart=True)
    with placing_errors(file=file), gc_paused():
        if kind == "legacy":
            content = _read_legacy_stream(store, file, start, n_bytes, reader)
        else:
            content = _read_zip(store, file, start, n_bytes, reader, report=report)
        builder = _TreeBuilder(content, reader, prefix, coords)
        return builder.tree(restore_set_aside(content.value), keeps_modules=keeps_modules)


@dataclass(frozen=True, slots=True)
class _Content:
    """The unpickled object of a torch file, and the positions of the storages.

    Args:
        file: the file with the records.
        value: the inert object, with a leaf of ``TensorHooks`` for each tensor.
        records: record name → position; storages are called ``data/<key>``.
        is_big: whether the numbers in the storages are big-endian.
        version: as in ``TorchTree``.
        is_partial: tensors without a record are left out.
        notes: notes to the user.
    """

    file: str
    value: object
    records: Mapping[str, Record]
    is_big: bool
    version: str | None
    is_partial: bool = False
    notes: tuple[str, ...] = ()


def _read_zip(
    store: ReadStore,
    file: str,
    start: int,
    n_bytes: int,
    reader: TensorHooks,
    *,
    report: Report = raising,
) -> _Content:
    """Read the pickle of a torch zip, but not the data of its tensors."""
    try:
        archive = read_archive(store, file, start=start, n_bytes=n_bytes)
    except CorruptError as err:
        if report is raising:
            raise
        return _read_damaged_zip(store, file, start, n_bytes, reader, err, report)
    check_kind(archive)
    pickle = archive.record("data.pkl")
    data = read_pickle(store, file, pickle)
    value = load(data, label=file, hooks=reader.hooks, limits=pickle_limits(pickle))
    # The version is informative only, so a record of an unlikely size is ignored.
    record = archive.records.get("version")
    version = b""
    if record is not None and record.n_bytes <= 16:
        version = read_record(store, file, record)
    text = version.decode("ascii", "replace").strip()
    content = _Content(file, value, archive.records, is_big_endian(store, archive), text or None)
    if archive.n_trailing:
        note = (
            f"the file has {archive.n_trailing:,} bytes after the end of the zip, which ckpt "
            "ignores, as torch does"
        )
        content = replace(content, notes=(note,))
    return content


def _read_damaged_zip(
    store: ReadStore,
    file: str,
    start: int,
    n_bytes: int,
    reader: TensorHooks,
    err: CorruptError,
    report: Report,
) -> _Content:
    """Read the pickle of a torch zip without its directory.

    Args:
        err: the error of reading the directory; it is reported with the number of tensors that can
            be read, or raised if the pickle cannot be read.
    """
    from core.formats.torch.zip.local_headers import read_local_headers

    records: dict[str, Record] = {}
    value: object = None
    lengths: dict[str, int] = {}
    for name, record in read_local_headers(
        store, file, start=start, stop=start + n_bytes, length_of=lengths.get
    ):
        records[name] = record
        if name == "data.pkl":
            data = read_pickle(store, file, record)
            value = load(data, label=file, hooks=reader.hooks, limits=pickle_limits(record))
            lengths |= {item.record: item.storage_bytes for item in reader.locations.values()}
    if "data.pkl" not in records:
        raise err
    n_readable = sum(item.record in records for item in reader.locations.values())
    err.message += f"; {n_readable} of its {len(reader.locations)} tensors can be read"
    report(err)
    order = records.get("byteorder")
    is_big = order is not None and read_record(store, file, order) == b"big"
    return _Content(file, value, records, is_big, None, is_partial=True)


def _read_legacy_stream(
    store: ReadStore, file: str, start: int, n_bytes: int, reader: TensorHooks
) -> _Content:
    """Read the object of a stream from before torch 1.6, but not the data of its tensors."""
    from core.formats.torch.legacy import VERSION, read_legacy

    value, records = read_legacy(store, file, start=start, n_bytes=n_bytes, hooks=reader.hooks)
    return _Content(file, value, records, False, f"legacy {VERSION}")


def load_object(
    store: ReadStore, array: StoredArray, *, key: str
) -> tuple[object, dict[str, StoredArray]]:
    """Read an object that is stored as a stream of its own.

    Args:
        array: the stream, uint8: a file of ``torch.save`` or a bare pickle.
        key: the object's key; the keys of the tensors inside begin with it.

    Returns:
        The inert value, and the arrays of its tensors by the keys of their leaves.

    Raises:
        CorruptError, UnsupportedError, UnsafeError: as ``parse``, or a container in the object
            contains itself; the error names the object.
    """
    extent = array.extent
    assert extent.encoding is None and len(array.shape) == 1
    file, start, n_bytes = extent.file, extent.offset, array.shape[0]
    prefix = f"{key}:"
    with placing_errors(key=key, span=(start, start + n_bytes)):
        # A bare pickle has no tensors.
        if stream_kind(store, file, start, n_bytes) == "pickle":
            return load(store.read(file, start, n_bytes), label=file), {}
        tree = parse(
            store,
            file,
            start=start,
            n_bytes=n_bytes,
            prefix=prefix,
            coords=array.coords,
            keeps_modules=True,
        )
        # The parser cuts containers that contain themselves; here nothing could put them together.
        endless = [name for name, item in tree.objects.items() if item.refused == ENDLESS]
        if endless:
            paths = list_some([name.removeprefix(prefix) for name in endless])
            raise UnsupportedError(
                f"the object has a container that contains itself, at {paths}",
                hint="save the object again without these entries",
            )
        return tree.inline_objects(), {**tree.arrays, **tree.hidden}


def load_shared(
    store: ReadStore, array: StoredArray, *, key: str, hooks: Mapping[Name, Hook] | None = None
) -> tuple[object, dict[str, StoredArray]]:
    """Read an object that is stored as a stream of its own; shared and cyclic parts are kept.

    ``load_object`` copies a container for each path that leads to it, and gives a tensor a key for
    each path. Here each tensor has one leaf with one key.

    Args:
        array, key: as for ``load_object``.
        hooks: additional hooks, see ``core.pickle.reader.load``.

    Returns:
        The inert value, and the arrays of its tensors by the keys of their leaves.

    Raises:
        CorruptError, UnsupportedError, UnsafeError: as ``load_object``.
    """
    extent = array.extent
    assert extent.encoding is None and len(array.shape) == 1
    file, start, n_bytes = extent.file, extent.offset, array.shape[0]
    reader = TensorHooks(f"{key}:#", hooks)
    with placing_errors(key=key, span=(start, start + n_bytes)):
        # A bare pickle has no tensors.
        kind = stream_kind(store, file, start, n_bytes)
        if kind == "pickle":
            return load(store.read(file, start, n_bytes), label=file, hooks=hooks), {}
        # A torch file: every tensor that the hooks located becomes an array.
        refuse_other_streams(store, file, start, n_bytes)
        with placing_errors(file=file), gc_paused():
            read_content = _read_legacy_stream if kind == "legacy" else _read_zip
            content = read_content(store, file, start, n_bytes, reader)
            builder = _TreeBuilder(content, reader, "", array.coords)
            value = restore_set_aside(content.value)
            arrays = {
                name: builder.array(name, location) for name, location in reader.locations.items()
            }
    return value, arrays


def refuse_other_streams(store: ReadStore, file: str, start: int, n_bytes: int) -> str | None:
    """Return ``legacy`` for a stream from before torch 1.6, None for anything that may be a zip.

    Raises:
        UnsupportedError: a tar file of torch 0.1, or a bare pickle.
    """
    kind = stream_kind(store, file, start, n_bytes)
    if kind == "legacy":
        return kind
    if kind not in ("tar", "pickle"):
        return None
    if kind == "tar":
        raise UnsupportedError(
            "the file is in the tar format of torch 0.1, which can only be loaded by running its "
            "pickles",
            file=file,
            hint="if you trust the file's author, load it with torch 1 in a sandbox and save its "
            "state dict again",
        )
    raise UnsupportedError(
        "the file is a bare pickle, not a torch.save file",
        file=file,
        hint="load it with the program that wrote it, and save it with torch.save",
    )


class _TreeBuilder:
    """Builds the ``TorchTree`` of one file, in which tensors have their final keys.

    Args:
        content: the pickle and the records.
        reader: the hooks with which the pickle was read; they know the tensors' locations.
        prefix: prefix of every key.
        coords: rank coordinates of the arrays and objects.
    """

    def __init__(self, content: _Content, reader: TensorHooks, prefix: str, coords: Coords) -> None:
        self._content = content
        self._reader = reader
        self._prefix = prefix
        self._coords = coords

    def tree(self, root: object, *, keeps_modules: bool) -> TorchTree:
        """Build the tree of the file.

        Args:
            root: the pickle's value, with all objects that were set aside back in their places.
            keeps_modules: as for ``parse``.

        Raises:
            CorruptError: a tensor's record is missing or too short, or the nesting is too deep.
            UnsafeError: containers are shared so often that there are too many paths.
        """
        is_set_aside = root is not self._content.value
        # Cut containers that contain themselves, so that every path ends.
        if _check_unfolded_size(root):
            root = cut_cycles(root)
            _check_unfolded_size(root)
        classes: tuple[str, ...] = ()
        if not keeps_modules:
            root, classes = with_state_dicts(root)
        # Compute the key of every tensor and object, and rebuild the tree with them.
        tree_entries = list(entries(root))
        keys = iter(keys_of(tree_entries, reserved=self._reader.locations))
        arrays: dict[str, StoredArray] = {}
        objects: dict[str, StoredObject] = {}
        attributes: dict[str, tuple[str, ...]] = {}

        def leaf_with_key(entry: LeafEntry) -> object:
            path_key, plain_key = next(keys)
            key = self._prefix + path_key
            leaf = entry.leaf
            if isinstance(leaf, TensorLeaf):
                if self._is_lost(leaf.key):
                    return None
                arrays[key] = self.array(key, self._reader.locations[leaf.key])
                if leaf.key in self._reader.attributes:
                    attributes[key] = self._reader.attributes[leaf.key]
                return TensorLeaf(key, leaf.wrapper, leaf.requires_grad)
            # The only object leaves at this point are those of cut containers.
            if isinstance(leaf, ObjectLeaf):
                objects[key] = StoredObject(key, coords=self._coords, refused=ENDLESS)
                return ObjectLeaf(key)
            kind = unsupported_kind(leaf)
            objects[key] = StoredObject(key, value=leaf, coords=self._coords, refused=kind)
            # An object stays in the tree if its path leads to its key.
            return leaf if path_key == plain_key and entry.path else ObjectLeaf(key)

        value = map_leaves(root, leaf_with_key, copies=True)
        # Tensors inside objects keep the keys that the hooks gave them.
        hidden = {
            node.key: self.array(node.key, self._reader.locations[node.key])
            for node in walk([value, [item.value for item in objects.values()]])
            if isinstance(node, TensorLeaf)
            and node.key in self._reader.locations
            and not self._is_lost(node.key)
        }
        return TorchTree(
            value=value,
            arrays=_shared(arrays),
            objects=objects,
            hidden=hidden,
            notes=(
                *self._content.notes,
                *_part_notes(self._reader.taken_apart),
                *_module_notes(classes),
            ),
            dropped=dropped_together(
                (f"{key}.{name}" for key, names in attributes.items() for name in names),
                "Python attributes of tensors",
            ),
            version=self._content.version,
            shared=_find_shared_containers(root),
            is_set_aside=is_set_aside,
        )

    def _is_lost(self, key: str) -> bool:
        """Return whether a tensor of a damaged file has no complete record."""
        content = self._content
        return content.is_partial and self._reader.locations[key].record not in content.records

    @suggesting(UNLIKE_ANY_WRITER)
    def array(self, key: str, location: Location) -> StoredArray:
        """Return the stored array of a tensor, after checking that its record contains it.

        Raises:
            CorruptError: the record is missing or too short.
        """
        # The pickle records the length of the storage, the zip that of the record.
        content = self._content
        record = content.records.get(location.record)
        if record is None:
            raise CorruptError(
                f"the tensor's record {location.record!r} is missing",
                key=key,
                rule="torch.storage",
            )
        if location.storage_bytes > record.n_bytes:
            raise CorruptError(
                f"the tensor's storage should be {location.storage_bytes} bytes long, but its "
                f"record {location.record!r} has only {record.n_bytes} bytes",
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
        # The record's CRC is that of the tensor if the record contains nothing else.
        if extent is None:
            is_entire = (
                location.offset == 0
                and location.strides is None
                and location.n_bytes == record.n_bytes
            )
            crc = record.crc if is_entire and record.crc else None
            extent = Extent(
                content.file, record.offset + location.offset, location.strides, crc=crc
            )
        return StoredArray(key, location.dtype, location.shape, extent, self._coords)


def keys_of(
    tree_entries: list[LeafEntry], *, reserved: Container[str] = ()
) -> list[tuple[str, str]]:
    """Return a unique key and the plain key of every entry.

    The plain key is the path, dot-joined. Where several entries have the same plain key, dots
    inside names are escaped (``a\\.b``); keys that are still equal are numbered (``a~2``).

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
        if count[key] > 1 and "." in "".join(map(describe_key, entry.path)):
            chosen = ".".join(
                describe_key(part).replace("\\", "\\\\").replace(".", "\\.") for part in entry.path
            )
        # Number the keys that are still taken; an altered key must not be another's plain key.
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


def _shared(arrays: dict[str, StoredArray]) -> dict[str, StoredArray]:
    """Return arrays of which those with the same address, strides, shape and dtype are one.

    Empty tensors have no bytes, so they share none.
    """
    first: dict[tuple[object, ...], StoredArray] = {}
    shared = {}
    for key, array in arrays.items():
        extent = array.extent
        address = (extent.offset, extent.strides, extent.encoding, array.shape, array.dtype)
        shared[key] = first.setdefault(address, array) if array.n_bytes else array
    return shared


def _find_shared_containers(root: object) -> dict[str, str]:
    """Return path of a repeated container → path of its first occurrence.

    Containers inside a repeated one are not listed. For an object that holds a repeated container,
    the path is that of the object.
    """
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    # Mappings and lists with entries of the checkpoint are listed by their own paths. Tuples are
    # immutable, so that sharing them makes no difference.
    for path, node in containers(root, once=True):
        name = _dotted(path)
        earlier = first.setdefault(id(node), name)
        if earlier != name and not isinstance(node, tuple):
            shared[name] = earlier
    # Objects are listed if they hold one of these; the set is shared, so that a container in
    # several objects is reported for the first of them.
    visited: set[int] = set()
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


def _part_notes(taken_apart: Mapping[str, int]) -> tuple[str, ...]:
    """Return a note that tensors of torchao's classes became mappings of their parts, if so."""
    if not taken_apart:
        return ()
    counts = ", ".join(f"{n} × {name}" for name, n in sorted(taken_apart.items()))
    note = (
        f"torchao tensors ({counts}) are split into separate entries for their values, scales and "
        "settings"
    )
    return (note,)


def _module_notes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return a note that pickled modules became their state dicts, if there are any."""
    if not classes:
        return ()
    names = list_some(dict.fromkeys(classes))
    if len(classes) == 1:
        note = (
            f"a pickled module ({names}) was read as a state dict of its parameters and buffers, "
            "without its class and its other attributes"
        )
    else:
        note = (
            f"{len(classes)} pickled modules ({names}) were read as state dicts of their "
            "parameters and buffers, without their classes and their other attributes"
        )
    return (note,)


def _count_paths(node: object, depth: int, sizes: dict[int, int]) -> int:
    """Return the number of paths from a node, and add those of each container to ``sizes``.

    Args:
        depth: levels of containers above the node.
        sizes: id of a container → number of paths from it, _OPEN until its children have been
            counted; _ENDLESS is in it if containers contain themselves.

    Raises:
        CorruptError: the containers are nested too deeply.
    """
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
    # Count each container once, and mark it as open meanwhile to detect cycles.
    n_paths_below = sizes.get(id(node))
    if n_paths_below is None:
        if depth > MAX_DEPTH:
            raise CorruptError(f"containers are nested deeper than {MAX_DEPTH} levels")
        sizes[id(node)] = _OPEN
        n_paths_below = 1 + (
            len(children)
            if is_flat(children)
            else sum(_count_paths(child, depth + 1, sizes) for child in children)
        )
        sizes[id(node)] = n_paths_below
    if n_paths_below == _OPEN:
        sizes[_ENDLESS] = 1
    return n_paths_below


def _check_unfolded_size(root: object) -> bool:
    """Return whether containers contain themselves; if not, check that they have few paths.

    A few shared lists or dicts can form 2⁶⁰ paths, and walking them all would not end. A real
    checkpoint has hardly more paths than entries.

    Raises:
        UnsafeError: there are too many paths.
        CorruptError: the containers are nested too deeply.
    """
    sizes: dict[int, int] = {}
    n_paths = _count_paths(root, 0, sizes)
    if _ENDLESS in sizes:
        return True
    # Compare with the number of entries only if there are many paths, as counting them takes long.
    if n_paths > 1_000_000:
        n_entries = sum(
            len(node) if isinstance(node, (list, tuple)) else len(as_mapping(node) or ())
            for node in walk(root)
        )
        if n_paths > 16 * n_entries:
            raise UnsafeError(
                f"shared containers would expand to {n_paths:,} entries, far more than the file "
                "contains"
            )
    return False


_OPEN = 0
"""Number of paths of a container whose children are being counted; any other has at least one."""
_ENDLESS = -1
"""No container's id."""
