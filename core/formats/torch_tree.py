"""What a torch zip holds: an inert tree, and the stored arrays of the tensors in it.

Also for zips inside other files: Megatron's rank files, and the objects of a DCP checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.catalog import Extent, StoredArray, StoredObject
from core.errors import CheckpointingException, CorruptError, UnsafeError, UnsupportedError
from core.formats.torch_aside import put_back
from core.formats.torch_tensor import Location, TensorReader, unsupported_kind
from core.formats.torch_zip import Archive, check_kind, read_archive
from core.inert import ObjectLeaf, TensorLeaf, as_mapping, walk
from core.safe_pickle import gc_paused, load
from core.skeleton import MAX_DEPTH, Entry, entries, mapped

if TYPE_CHECKING:
    from core.catalog import Coords
    from core.skeleton import Path
    from core.store import ReadStore

LEGACY_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"


@dataclass(frozen=True, slots=True)
class TorchTree:
    """A torch file's content.

    Args:
        value: the unpickled root, inert, with a ``TensorLeaf`` for every tensor that is handled. An object whose key is
            not its path stands in it as an ``ObjectLeaf``; so does a root that is neither tensor nor container.
        arrays: the tensors reached through mappings and lists, by key, in order.
        aliases: key → the first key whose bytes are the same.
        objects: everything else that is reached so, with its value, by key.
        hidden: the tensors inside those objects, by the keys of their leaves.
        unsupported: key → kind, for the objects that stand for tensors of a kind that is not handled.
        notes: what the user should know.
        version: the zip's version record.
    """

    value: object
    arrays: dict[str, StoredArray]
    aliases: dict[str, str] = field(default_factory=dict)
    objects: dict[str, StoredObject] = field(default_factory=dict)
    hidden: dict[str, StoredArray] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    version: str | None = None


def parse(
    store: ReadStore, file: str, *, start: int = 0, n_bytes: int | None = None, prefix: str = "", coords: Coords = ()
) -> TorchTree:
    """Reads a torch zip; metadata only.

    Args:
        file: name in the store.
        start, n_bytes: which bytes of the file are the zip; None for the rest.
        prefix: begin of every key.
        coords: rank coordinates that the arrays and objects get.

    Raises:
        CorruptError, TruncatedError: the file is damaged, or a tensor lies outside its storage.
        UnsupportedError: not a zip that ``torch.save`` of torch 1.6 or later writes, or a big-endian one.
        UnsafeError: a hostile pickle.
    """
    n_bytes = store.size(file) - start if n_bytes is None else n_bytes
    refuse_other_streams(store, file, start, n_bytes)
    with _in_file(file), gc_paused():
        archive = read_archive(store, file, start=start, n_bytes=n_bytes)
        check_kind(store, archive)
        reader = TensorReader(f"{prefix}#")
        pickle = archive.record("data.pkl")
        tree = put_back(load(store.read(file, pickle.offset, pickle.n_bytes), label=file, hooks=reader.hooks))
        made = _Reading(archive, reader, prefix, coords).tree(tree)
    stated = archive.records.get("version")
    version = (
        None if stated is None else store.read(file, stated.offset, min(stated.n_bytes, 16)).decode("ascii", "replace")
    )
    return TorchTree(
        value=made.value,
        arrays=made.arrays,
        aliases=made.aliases,
        objects=made.objects,
        hidden=made.hidden,
        unsupported=made.unsupported,
        notes=made.notes,
        version=version.strip() if version else None,
    )


def load_object(store: ReadStore, array: StoredArray, *, key: str) -> tuple[object, dict[str, StoredArray]]:
    """The value of an object that is stored as a stream of its own.

    Args:
        array: the stream, uint8: a torch zip or a bare pickle.
        key: the object's key; the keys of the tensors inside begin with it.

    Returns:
        The inert value, and the arrays of the tensors in it by the keys of their leaves.

    Raises:
        CorruptError, UnsupportedError, UnsafeError: as ``parse``; they name the object.
    """
    extent = array.extent
    assert extent is not None and extent.encoding is None and len(array.shape) == 1
    start, n_bytes = extent.offset, array.shape[0]
    try:
        if stream_kind(store, extent.file, start, n_bytes) == "pickle":
            return load(store.read(extent.file, start, n_bytes), label=extent.file), {}
        tree = parse(store, extent.file, start=start, n_bytes=n_bytes, prefix=f"{key}:", coords=array.coords)
        value = mapped(tree.value, lambda entry: _inlined(tree, entry))
    except CheckpointingException as err:
        err.key = err.key or key
        err.span = err.span or (start, start + n_bytes)
        raise
    return value, {**tree.arrays, **tree.hidden}


def _inlined(tree: TorchTree, entry: Entry) -> object:
    return tree.objects[entry.leaf.key].value if isinstance(entry.leaf, ObjectLeaf) else entry.leaf


def stream_kind(store: ReadStore, file: str, start: int, n_bytes: int) -> str | None:
    """What some bytes look like: ``zip``, ``legacy`` (torch before 1.6), ``tar``, ``pickle``, or None."""
    head = store.read(file, start, min(n_bytes, 512))
    if head.startswith(b"PK\x03\x04"):
        return "zip"
    if head.startswith(LEGACY_MAGIC):
        return "legacy"
    if head[257:262] == b"ustar":
        return "tar"
    if len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return "pickle"
    return None


def refuse_other_streams(store: ReadStore, file: str, start: int, n_bytes: int) -> None:
    """Returns if the bytes may be a zip, else says what they are.

    Raises:
        UnsupportedError: another of torch's formats, or a bare pickle.
    """
    kind = stream_kind(store, file, start, n_bytes)
    if kind in ("legacy", "tar"):
        raise UnsupportedError(
            "written in the format that torch used before 1.6",
            file=file,
            hint="load it with torch and save it again: torch.save(torch.load(FILE), NEW_FILE)",
        )
    if kind == "pickle":
        raise UnsupportedError(
            "a bare pickle, not a file of torch.save", file=file, hint="load it where it came from and use torch.save"
        )


@contextmanager
def _in_file(file: str) -> Iterator[None]:
    """Names the file in errors that do not."""
    try:
        yield
    except CheckpointingException as err:
        err.file = err.file or file
        raise


class _Reading:
    """One tree on its way from placeholders to keys."""

    def __init__(self, archive: Archive, reader: TensorReader, prefix: str, coords: Coords) -> None:
        self._archive = archive
        self._reader = reader
        self._prefix = prefix
        self._coords = coords

    def tree(self, root: object) -> TorchTree:
        """The content, all but its version."""
        _check_unfolded_size(root)
        found = list(entries(root))
        keys = iter(keys_of(found, taken=self._reader.locations))
        arrays: dict[str, StoredArray] = {}
        objects: dict[str, StoredObject] = {}
        unsupported: dict[str, str] = {}
        attributes: dict[str, tuple[str, ...]] = {}

        def named(entry: Entry) -> object:
            path_key, plain_key = next(keys)
            key = self._prefix + path_key
            leaf = entry.leaf
            if isinstance(leaf, TensorLeaf):
                arrays[key] = self._array(key, self._reader.locations[leaf.key])
                if leaf.key in self._reader.attributes:
                    attributes[key] = self._reader.attributes[leaf.key]
                return TensorLeaf(key, leaf.wrapper, leaf.requires_grad)
            objects[key] = StoredObject(key, value=leaf, coords=self._coords)
            kind = unsupported_kind(leaf)
            if kind is not None:
                unsupported[key] = kind
            return leaf if path_key == plain_key and entry.path else ObjectLeaf(key)

        value = mapped(root, named)
        inside = {
            node.key: self._array(node.key, self._reader.locations[node.key])
            for node in walk([value, [item.value for item in objects.values()]])
            if isinstance(node, TensorLeaf) and node.key in self._reader.locations
        }
        return TorchTree(value, arrays, _aliases(arrays), objects, inside, unsupported, _notes(attributes))

    def _array(self, key: str, location: Location) -> StoredArray:
        """The stored array of a tensor, once its record is known to hold it.

        Raises:
            CorruptError: the record is missing or too short.
        """
        record = self._archive.records.get(location.record)
        if record is None:
            raise CorruptError(
                f"the tensor lies in the record {location.record!r}, which the zip does not have", key=key
            )
        if location.storage_bytes > record.n_bytes:
            raise CorruptError(
                f"the tensor's storage has {location.storage_bytes} bytes, its record {location.record!r} only "
                f"{record.n_bytes}",
                key=key,
                span=(record.offset, record.offset + record.n_bytes),
            )
        is_whole = location.offset == 0 and location.strides is None and location.n_bytes == record.n_bytes
        extent = Extent(
            self._archive.file,
            record.offset + location.offset,
            location.strides,
            crc=record.crc if is_whole and record.crc else None,
        )
        return StoredArray(key, location.dtype, location.shape, extent, self._coords)


def keys_of(found: list[Entry], *, taken: Container[str] = ()) -> list[tuple[str, str]]:
    """A unique key for every entry, and the plain one.

    The plain key is the path, dot-joined. Where several entries have the same, those with dots in names get them
    escaped (``a\\.b``); what is still the same is numbered.

    Args:
        found: entries of one tree.
        taken: keys that must not be used.
    """
    plain = [_joined(entry.path) for entry in found]
    count = Counter(plain)
    used: set[str] = set()
    keys = []
    for entry, key in zip(found, plain, strict=True):
        chosen = key
        if count[key] > 1 and any("." in str(part) for part in entry.path):
            chosen = ".".join(str(part).replace("\\", "\\\\").replace(".", "\\.") for part in entry.path)
        base, number = chosen, 2
        while chosen in used or chosen in taken or (chosen != key and chosen in count):
            chosen = f"{base}~{number}"
            number += 1
        used.add(chosen)
        keys.append((chosen, key))
    return keys


def _joined(path: Path) -> str:
    return ".".join(map(str, path)) if path else "value"


def _aliases(arrays: dict[str, StoredArray]) -> dict[str, str]:
    """Key → first key with the same address, strides, shape and dtype; empty tensors have no bytes to share."""
    first: dict[tuple[object, ...], str] = {}
    aliases = {}
    for key, array in arrays.items():
        if array.n_bytes and array.extent is not None:
            extent = array.extent
            same = first.setdefault((extent.offset, extent.strides, array.shape, array.dtype), key)
            if same != key:
                aliases[key] = same
    return aliases


def _notes(attributes: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    if not attributes:
        return ()
    names = sorted({name for found in attributes.values() for name in found})
    listed = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
    n = len(attributes)
    what = f"{n} tensors carry" if n > 1 else f"{next(iter(attributes))} carries"
    return (f"{what} Python attributes ({listed}), which are not kept",)


def _check_unfolded_size(root: object) -> None:
    """Returns if walking every path through the containers of ``root`` ends soon.

    A few shared lists or dicts make 2⁶⁰ paths; a checkpoint has not many more than it has containers.

    Raises:
        UnsafeError: there are too many paths.
        CorruptError: the containers are nested too deeply, or contain themselves.
    """
    sizes: dict[int, int] = {}

    def size(node: object, depth: int) -> int:
        children: list[object] | tuple[object, ...]
        if isinstance(node, (list, tuple)):
            children = node
        else:
            mapping = as_mapping(node)
            if not mapping:
                return 1
            children = list(mapping.values())
        known = sizes.get(id(node))
        if known is None:
            if depth > MAX_DEPTH:
                raise CorruptError(f"containers are nested deeper than {MAX_DEPTH} levels, or contain themselves")
            known = 1 + sum(size(child, depth + 1) for child in children)
            sizes[id(node)] = known
        return known

    n_paths = size(root, 0)
    if n_paths > 1_000_000 and n_paths > 16 * sum(len(n) for n in _containers(root)):
        raise UnsafeError(f"containers are shared so often that they unfold to {n_paths} entries")


def _containers(root: object) -> Iterator[list[object]]:
    """The elements of every container below ``root``, each container once."""
    for node in walk(root):
        mapping = as_mapping(node)
        if mapping is not None:
            yield list(mapping)
        elif isinstance(node, (list, tuple)):
            yield list(node)
