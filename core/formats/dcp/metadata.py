"""``.metadata`` of a PyTorch distributed checkpoint (DCP): one pickle that says where every chunk of every tensor lies.

::

    Metadata
      state_dict_metadata  {fqn: TensorStorageMetadata{properties, size, chunks: [ChunkStorageMetadata{offsets, sizes}]}
                                 | BytesStorageMetadata}
      planner_data         {fqn: path of the entry in the nested state dict} | None
      storage_data         {MetadataIndex{fqn, offset, index}: _StorageInfo{relative_path, offset, length}}
      storage_meta, version, and what others add: mcore_data, all_local_plans (Megatron)

It is read into columns, because 10⁶ chunks are real. ``core.pickle.reader`` reads it; large ones are first tried with
the C unpickler in a contained child process (``_parsed_by_c`` says why that is safe), whose failure, for whatever
reason, means that the slow way decides.

Versions: torch 1.13 to 2.13 (class names moved between modules; ``storage_meta``, ``version`` and ``index`` may be
absent; ``TensorProperties`` is a tuple of at least 5), Megatron core 0.12 to 0.20 (``MCoreMetadata``,
``MCoreSavePlan``).

Source: torch 2.13 ``torch/distributed/checkpoint/{metadata,filesystem}.py``; written by the software listed in
tests/golden/README.md.

Not supported, refused by name: Hugging Face storage (``_HFStorageInfo``), ``transform_descriptors`` other than
``stream.zstd/1``, sparse layouts.
"""

from __future__ import annotations

import hashlib
import marshal
import re
import reprlib
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from core.arrays.dtypes import DTYPES, dtype_of
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    Report,
    UnsafeError,
    UnsupportedError,
    raising,
)
from core.files.sandbox import run_sandboxed
from core.files.store import check_name
from core.formats.dcp.columns import DcpChunk, DcpItem, DcpMetadata, DcpTensor
from core.formats.dcp.metadata_writer import ChunkRow, ObjectRow, TensorRow, write_metadata
from core.formats.dcp.records import (
    Bytes,
    Chunk,
    HfStorage,
    Index,
    Properties,
    Record,
    Root,
    Storage,
    Tensor,
    read_by_c,
    read_by_machine,
)
from core.pickle.inert import Global
from core.pickle.names import dangerous_uses
from core.pickle.reader import gc_paused, judge, note_uses, noting_uses
from core.pickle.uses import Use, uses_in_tree

__all__ = [
    "ChunkRow",
    "DcpChunk",
    "DcpItem",
    "DcpMetadata",
    "DcpTensor",
    "ObjectRow",
    "TensorRow",
    "read_metadata",
    "read_once",
    "write_metadata",
]

FAST_FROM_BYTES = 1 << 20
"""Smaller files are not worth a child process."""

_MAX_EXTENT = 1 << 62


def read_metadata(data: bytes, *, label: str) -> DcpMetadata:
    """The content of a ``.metadata`` file.

    Args:
        data: the whole file.
        label: its name, for errors.

    Raises:
        CorruptError: not such a pickle, or geometry that cannot be (MissingShardError: a chunk without an item).
        UnsafeError: it asks for more than the limits of safe_pickle, or names a file outside the checkpoint.
        UnsupportedError: a storage, codec, layout or dtype that is not handled.
    """
    return _parsed(data, label).checked(label)


def salvaged_metadata(data: bytes, *, label: str, report: Report) -> DcpMetadata:
    """What of a ``.metadata`` makes sense, the rest left out.

    Args:
        report: takes what does not; rules: ``dcp.items``, ``dcp.out_of_bounds``, ``dcp.no_item``, ``dcp.entries``.

    Raises:
        CorruptError, UnsafeError, UnsupportedError: no entry of it can be read.
    """
    parsed = _parsed(data, label)
    for problem in parsed.problems:
        report(problem.as_error(label))
    return parsed.metadata


class _Problem(NamedTuple):
    """What is wrong with an entry; an error, without the frames that a raised one keeps alive.

    Attributes:
        kind: name of the error's class.
        message, key, hint, rule: as of errors.
    """

    kind: str
    message: str
    key: str | None
    hint: str | None
    rule: str | None

    def as_error(self, label: str) -> CheckpointingException:
        """Return the error, about the file called ``label``."""
        kind = _KINDS[self.kind]
        return kind(self.message, file=label, key=self.key, hint=self.hint, rule=self.rule)


_KINDS = {kind.__name__: kind for kind in (CorruptError, MissingShardError, UnsafeError, UnsupportedError)}


def _problem_of(err: CheckpointingException) -> _Problem:
    return _Problem(type(err).__name__, err.message, err.key, err.hint, err.rule)


class _Parsed(NamedTuple):
    """A ``.metadata``, without the entries that make no sense.

    Attributes:
        metadata: what makes sense.
        problems: what is wrong with the rest.
        uses: what the pickle does with names.
    """

    metadata: DcpMetadata
    problems: tuple[_Problem, ...]
    uses: frozenset[Use]

    def checked(self, label: str) -> DcpMetadata:
        """Return the metadata, or raise the first problem."""
        if self.problems:
            raise self.problems[0].as_error(label)
        return self.metadata


_kept: ContextVar[dict[bytes, _Parsed] | None] = ContextVar("digest of a file → its content", default=None)


@contextmanager
def read_once() -> Iterator[None]:
    """Read the same file no more than once in the block; its checks ask for it several times."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def _parsed(data: bytes, label: str) -> _Parsed:
    """Return the content of a file.

    Raises:
        CorruptError, UnsafeError, UnsupportedError: no entry of it can be read.
    """
    kept = _kept.get()
    digest = b"" if kept is None else hashlib.blake2b(data).digest()
    parsed = None if kept is None else kept.get(digest)
    if parsed is None:
        with gc_paused():
            parsed = _parsed_by_c(data) if len(data) >= FAST_FROM_BYTES else None
            parsed = parsed or _parsed_by_machine(data, label)
        if kept is not None:
            kept[digest] = parsed
    note_uses(parsed.uses)
    return parsed


def _parsed_by_machine(data: bytes, label: str) -> _Parsed:
    """Read the metadata the hardened way, which also finds the words for what is wrong."""
    problems: list[_Problem] = []
    try:
        with noting_uses() as uses:
            root = read_by_machine(data, label=label)
        metadata = _Reader(root, report=lambda err: problems.append(_problem_of(err))).read()
    except CheckpointingException as err:
        err.file = err.file or label
        raise
    return _Parsed(metadata, tuple(problems), frozenset(uses))


def _parsed_by_c(data: bytes) -> _Parsed | None:
    """Read the metadata by the C unpickler in a contained child; return None if it did not succeed.

    Why this runs nothing of the file and harms nothing:

    - ``find_class`` never imports or looks up a name: it returns the record classes of ``dcp_records``, ``tuple`` (for
      torch.Size), ``str`` (for the name of a layout) or a ``Global``. These are the only callables that an opcode can
      reach: none reads an attribute, the extension registry is emptied, persistent ids and buffers have no handler.
      Calling them makes lists, tuples and strings. Setting attributes (BUILD) sets them to such values.
    - What the C code can be made to do all the same (allocate by a memo index, hash nested tuples for ever, overflow
      its stack; docs/facts/safety.md 2.3) happens in a process with limited address space and processor time that holds
      no open file but the pipe and can open none. Its death is a None.
    - The answer is the columns that ``_Reader`` computes in the child, the same code that checks every number for the
      other way.
    """
    memory_bytes = (256 << 20) + 32 * len(data)
    cpu_s = 2 + (len(data) >> 20)  # usual files take 0.05 s a megabyte
    packed = run_sandboxed("core.formats.dcp.metadata:pack", data, memory_bytes=memory_bytes, cpu_s=cpu_s)
    return None if packed is None else _unpack(packed)


_COLUMNS = ("offsets", "sizes", "file_index", "item_offset", "item_bytes")
_PLAIN = (
    *("files", "planner_data", "mcore_data", "version", "extras", "orphans"),
    *("descriptors", "object_descriptors"),
)


def pack(data: bytes) -> bytes:
    """Do the work of the child: return the metadata, what is wrong with it, and the names that it is no part of.

    Raises:
        ValueError: a part is not plain.
    """
    problems: list[_Problem] = []
    root, others = read_by_c(data)
    found = _Reader(root, report=lambda err: problems.append(_problem_of(err))).read()
    return marshal.dumps(
        (
            sorted(others),
            [tuple(problem) for problem in problems],
            [tuple(tensor) for tensor in found.tensors.values()],
            [(key, *item) for key, item in found.objects.items()],
            [getattr(found, name).tobytes() for name in _COLUMNS],
            [getattr(found, name) for name in _PLAIN],
        )
    )


def _unpack(packed: bytes) -> _Parsed | None:
    """Return what the parent makes of it; None if a name must be looked at more closely, as it may be called."""
    names, problems, tensors, objects, columns, plain = marshal.loads(packed)
    uses = frozenset(Use(Global(module, name), "called") for module, name in names)
    if any(judge(use) != "known" for use in uses):
        return None
    fields: dict[str, Any] = dict(zip(_PLAIN, plain, strict=True))
    fields.update((name, array("q", raw)) for name, raw in zip(_COLUMNS, columns, strict=True))
    metadata = DcpMetadata(
        tensors={row[0]: DcpTensor._make(row) for row in tensors},
        objects={key: DcpItem(file, offset, n_bytes) for key, file, offset, n_bytes in objects},
        **fields,
    )
    return _Parsed(metadata, tuple(map(_Problem._make, problems)), uses)


class _Reader:
    """Turns the record tree into columns and checks every number on the way.

    Args:
        report: takes what is wrong, which is then left out.
    """

    def __init__(self, root: object, *, report: Report = raising) -> None:
        self._report = report
        if type(root) is not Root:
            what = getattr(root, "class_name", type(root).__name__)
            if dangerous_uses(uses_in_tree(root)):
                raise UnsafeError(
                    f"the pickle is no checkpoint metadata: it would run {what} when it is loaded",
                    hint="do not load it with anything else, and find out who wrote it",
                )
            raise CorruptError(f"the pickle is a {what}, not DCP's Metadata")
        self.state = _state(root)
        self.tensors: dict[str, DcpTensor] = {}
        self.objects: dict[str, DcpItem] = {}
        self.offsets = array("q")
        self.sizes = array("q")
        self.file_index = array("q")
        self.item_offset = array("q")
        self.item_bytes = array("q")
        self.files: dict[str, int] = {}
        self.names: list[str] = []
        self.chunk_items: dict[tuple[object, ...], tuple[int, int, int]] = {}
        self.object_items: dict[str, tuple[int, int, int]] = {}
        self.transforms: dict[tuple[object, ...], tuple[str, ...]] = {}
        self.descriptors: dict[int, tuple[str, ...]] = {}
        self.object_descriptors: dict[str, tuple[str, ...]] = {}

    def read(self) -> DcpMetadata:
        """The columns."""
        self._read_items()
        entries = self.state.get("state_dict_metadata")
        if type(entries) is not dict:
            raise CorruptError("Metadata has no state_dict_metadata")
        used = 0
        for key in list(entries):
            try:
                used += self._read_entry(key, entries.pop(key))  # columns take the place of what is read
            except CheckpointingException as err:
                self._report(err.breaking("dcp.no_item" if isinstance(err, MissingShardError) else "dcp.entries"))
        version = self.state.get("version")
        planner_data, is_known = self._planner_data()
        extras = [name for name in self.state if name not in _ATTRIBUTES]
        mcore_data = self.state.get("mcore_data")
        if mcore_data is not None and not isinstance(mcore_data, dict):
            mcore_data = {}  # it is there, which tells the dialect, but says nothing of any tensor
        return DcpMetadata(
            tensors=self.tensors,
            offsets=self.offsets,
            sizes=self.sizes,
            files=self.names,
            file_index=self.file_index,
            item_offset=self.item_offset,
            item_bytes=self.item_bytes,
            objects=self.objects,
            planner_data=planner_data,
            mcore_data=mcore_data,
            version=version if type(version) is str else None,
            extras=tuple(extras if is_known else ["planner_data", *extras]),
            orphans=self._orphans() if used != len(self.chunk_items) + len(self.object_items) else (),
            descriptors=self.descriptors,
            object_descriptors=self.object_descriptors,
        )

    def _read_entry(self, key: object, entry: object) -> int:
        """Adds a tensor or an object; returns how many distinct items it uses."""
        if type(key) is not str:
            raise CorruptError(f"a key of state_dict_metadata is a {type(key).__name__}")
        if type(entry) is Tensor:
            return self._read_tensor(key, _state(entry, key))
        if type(entry) is Bytes:
            return self._read_object(key)
        what = getattr(entry, "class_name", type(entry).__name__)
        raise UnsupportedError(f"the entry is a {what}, neither tensor nor bytes", key=key)

    def _read_items(self) -> None:
        storage = self.state.get("storage_data")
        if type(storage) is not dict:
            # A problem like others, so that the fast reader tells it: its entries are then found to have no items.
            self._report(CorruptError("Metadata has no storage_data").breaking("dcp.items"))
            return
        for index in list(storage):
            try:
                self._read_item(index, storage.pop(index))
            except CheckpointingException as err:
                self._report(err.breaking("dcp.items"))

    def _read_item(self, index: object, info: object) -> None:
        """Adds the place of one item."""
        files = self.files
        if type(index) is not Index or type(info) is not Storage:
            _refuse_storage(index, info)
        assert isinstance(index, Index) and isinstance(info, Storage)
        try:
            (where,) = index
            (item,) = info
            key, at = where["fqn"], where.get("offset")
            name, offset, n_bytes = item["relative_path"], item["offset"], item["length"]
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise CorruptError(f"malformed entry of storage_data: {type(err).__name__} {err}") from err
        if type(key) is not str or type(name) is not str:
            raise CorruptError("malformed entry of storage_data: a name is not text")
        file = files.get(name)
        if file is None:
            file = files[check_name(name)] = len(files)
            self.names.append(name)
        if not (
            type(offset) is type(n_bytes) is int and offset >= 0 and n_bytes >= 0 and offset + n_bytes < _MAX_EXTENT
        ):
            raise CorruptError(f"an item of {_short(n_bytes)} bytes at byte {_short(offset)} cannot be", key=key)
        transforms = _transforms(item["transform_descriptors"], key) if "transform_descriptors" in item else ()
        if at is None:
            self.object_items[key] = (file, offset, n_bytes)
            if transforms:
                self.object_descriptors[key] = transforms
        elif type(at) is tuple:
            for number in at:
                if type(number) is not int:  # hashing other things might take for ever
                    raise CorruptError(f"the offset of an item is {_short(at)}", key=key)
            self.chunk_items[(key, *at)] = (file, offset, n_bytes)
            if transforms:
                self.transforms[(key, *at)] = transforms
        else:
            raise CorruptError(f"the offset of an item is {_short(at)}", key=key)

    def _read_tensor(self, key: str, state: dict[str, Any]) -> int:
        """Adds a tensor and its chunks; returns how many distinct items it uses."""
        dtype, requires_grad = _properties(key, state.get("properties"))
        shape, chunks = state.get("size"), state.get("chunks")
        if type(shape) is not tuple or type(chunks) is not list:
            raise CorruptError("malformed tensor: size or chunks are missing", key=key)
        _check_shape(key, shape)
        first, start = len(self.item_offset), len(self.offsets)
        used = set()
        for chunk in chunks:
            n_numbers = len(self.offsets)
            try:
                found = self._chunk(key, shape, chunk)
                if found is None:
                    continue
                at, size, item = found
                self.offsets.extend(at)
                self.sizes.extend(size)
            except (KeyError, IndexError, TypeError, OverflowError, CheckpointingException) as err:
                del self.offsets[n_numbers:], self.sizes[n_numbers:]
                self._refuse_chunk(key, err)
                continue
            if self.transforms and (key, *at) in self.transforms:
                self.descriptors[len(self.item_offset)] = self.transforms[(key, *at)]
            self.file_index.append(item[0])
            self.item_offset.append(item[1])
            self.item_bytes.append(item[2])
            used.add(at)
        self.tensors[key] = DcpTensor(key, dtype, shape, requires_grad, first, len(self.item_offset) - first, start)
        return len(used)

    def _chunk(
        self, key: str, shape: tuple[int, ...], chunk: object
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, int, int]] | None:
        """Where a chunk is, its extents, and its item; None for an empty one without."""
        if type(chunk) is not Chunk:
            raise CorruptError(f"malformed tensor: a {type(chunk).__name__} among its chunks", key=key)
        at, size = chunk[0]["offsets"], chunk[0]["sizes"]
        fits = len(at) == len(shape) == len(size)
        for offset, extent, whole in zip(at, size, shape, strict=False):
            if offset < 0 or extent < 0 or offset + extent > whole:
                fits = False
        if not fits or type(at) is not tuple:
            raise CorruptError(
                f"a chunk of size {_short(size)} at {_short(at)} does not lie in shape {_short(shape)}",
                key=key,
                rule="dcp.out_of_bounds",
            )
        item = self.chunk_items.get((key, *at))
        if item is None:
            if 0 in size:
                return None
            raise MissingShardError(f"no file holds the chunk of size {_short(size)} at {_short(at)}", key=key)
        if item[2] == 0 and 0 not in size:
            raise CorruptError(f"an item of 0 bytes cannot be a chunk of size {_short(size)}", key=key)
        return at, size, item

    def _refuse_chunk(self, key: str, err: Exception) -> None:
        """Reports what is wrong with a chunk."""
        if isinstance(err, CheckpointingException):
            self._report(err.breaking("dcp.no_item" if isinstance(err, MissingShardError) else "dcp.entries"))
            return
        self._report(CorruptError(f"malformed chunk: {type(err).__name__} {err}", key=key, rule="dcp.entries"))

    def _read_object(self, key: str) -> int:
        item = self.object_items.get(key)
        if item is None:
            raise MissingShardError("no file holds the object", key=key)
        if item[2] == 0:
            raise CorruptError("an item of 0 bytes cannot be an object", key=key)
        self.objects[key] = DcpItem(self.names[item[0]], item[1], item[2])
        return 1

    def _planner_data(self) -> tuple[dict[str, tuple[str | int, ...]] | None, bool]:
        """The paths of a default planner, and False if there is something else instead."""
        found = self.state.get("planner_data")
        if found is None:
            return None, True
        if type(found) is not dict:
            return None, False
        for key, path in found.items():
            if type(key) is not str or type(path) is not tuple or any(type(part) not in (str, int) for part in path):
                return None, False
        return found, True

    def _orphans(self) -> tuple[str, ...]:
        """Names of items that nothing refers to."""
        used: set[tuple[object, ...]] = set()
        for tensor in self.tensors.values():
            rank = len(tensor.shape)
            for number in range(tensor.n_chunks):
                begin = tensor.start + number * rank
                used.add((tensor.key, *self.offsets[begin : begin + rank]))
        found = {str(item[0]) for item in self.chunk_items if item not in used}
        return tuple(sorted(found.union(key for key in self.object_items if key not in self.objects)))


_ATTRIBUTES = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version", "mcore_data"}


_REPR = reprlib.Repr()
_REPR.maxtuple = _REPR.maxlist = 16
_REPR.maxstring = _REPR.maxother = 200


def _short(value: object) -> str:
    """A value for a message: cut, as printing nested or huge values could take for ever."""
    if type(value) is tuple and len(value) <= _REPR.maxtuple and all(type(n) is int and n < 1 << 63 for n in value):
        return repr(value)
    try:
        return _REPR.repr(value)
    except ValueError:
        return "a huge number"


def _state(record: Record, key: str | None = None) -> dict[str, Any]:
    """The attributes of a record.

    Raises:
        CorruptError: it has none.
    """
    if len(record) != 1 or type(record[0]) is not dict:
        raise CorruptError("malformed Metadata: a record without attributes", key=key)
    return record[0]


def _refuse_storage(index: object, info: object) -> None:
    if type(info) is HfStorage:
        raise UnsupportedError(
            "the checkpoint is in DCP's Hugging Face storage (safetensors files)",
            hint="consolidate it with torch and convert that",
        )
    what = [getattr(part, "class_name", type(part).__name__) for part in (index, info)]
    raise UnsupportedError(f"storage_data maps a {what[0]} to a {what[1]}, which no known storage writes")


_ZSTD = re.compile(r"stream\.zstd/1(\.\d+)*")
_MAX_TRANSFORMS = 8


def _transforms(stated: object, key: str) -> tuple[str, ...]:
    """The stream transforms of an item, if all of them are known.

    Raises:
        UnsupportedError: one is not.
        CorruptError: it is no list of names.
    """
    if stated is None:
        return ()
    if type(stated) not in (list, tuple) or any(type(name) is not str for name in stated):  # type: ignore[attr-defined]
        raise CorruptError(f"the transforms of an item are {_short(stated)}", key=key)
    assert isinstance(stated, (list, tuple))
    unknown = [name for name in stated if not _ZSTD.fullmatch(name)]
    if unknown or len(stated) > _MAX_TRANSFORMS:
        raise UnsupportedError(
            f"the items are transformed by {_short(unknown or stated)}",
            key=key,
            hint="stream.zstd/1 is known; load and save it again without other extensions",
        )
    return tuple(map(sys.intern, stated))


def _properties(key: str, record: object) -> tuple[str, bool]:
    """dtype and requires_grad of a tensor."""
    state = record[0] if type(record) is Properties and len(record) == 1 else None
    if type(state) is dict:
        state = tuple(state.get(name) for name in ("dtype", "layout", "requires_grad"))
    if type(state) is not tuple or len(state) < 3:
        raise CorruptError("malformed tensor: no properties", key=key)
    dtype, layout, requires_grad = state[:3]
    if type(dtype) is not Global or dtype.module != "torch":
        raise CorruptError(f"the dtype is a {type(dtype).__name__}", key=key)
    if layout not in ("torch.strided", None):
        raise UnsupportedError(f"the layout {_short(layout)} is not handled", key=key, hint="save it as a dense tensor")
    if dtype.name not in DTYPES:
        try:
            dtype_of(dtype.name)
        except UnsupportedError as err:
            err.key = key
            raise
    return dtype.name, requires_grad is True


def _check_shape(key: str, shape: tuple[object, ...]) -> None:
    n_elements = 1
    for extent in shape:
        if type(extent) is not int or extent < 0:
            raise CorruptError(f"the shape {_short(shape)} is no shape", key=key)
        n_elements *= max(extent, 1)
        if n_elements >= _MAX_EXTENT:
            raise CorruptError("the shape has more elements than any file could hold", key=key)
