"""``.metadata`` of a PyTorch distributed checkpoint (DCP): positions of all chunks in one pickle.

::

    Metadata
      state_dict_metadata  {fqn: TensorStorageMetadata{properties, size,
                                   chunks: [ChunkStorageMetadata{offsets, sizes}]}
                                 | BytesStorageMetadata}
      planner_data         {fqn: path of the entry in the nested state dict} | None
      storage_data         {MetadataIndex{fqn, offset, index}:
                               _StorageInfo{relative_path, offset, length}}
      storage_meta, version, and attributes of others: mcore_data, all_local_plans (Megatron)

It is read into columns, because real checkpoints have 10⁶ chunks. A large file is first read with
the C unpickler in a sandboxed child process (``_parse_by_c`` explains why that is safe). If that
fails, for any reason, and for all other files, ``core.pickle.reader`` decides.

Versions: torch 1.13 to 2.13 (class names moved between modules; ``storage_meta``, ``version`` and
``index`` may be absent; ``TensorProperties`` is a tuple of at least 5), Megatron core 0.12 to 0.20
(``MCoreMetadata``, ``MCoreSavePlan``).

Source: torch 2.13 ``torch/distributed/checkpoint/{metadata,filesystem}.py``; written by the
software listed in tests/golden/README.md.

Not supported, refused by name: Hugging Face storage (``_HFStorageInfo``), ``transform_descriptors``
other than ``stream.zstd/1``, sparse layouts.
"""

from __future__ import annotations

import hashlib
import marshal
import re
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

from core.arrays.dtypes import dtype_of
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    Report,
    UnsafeError,
    UnsupportedError,
    list_some,
    placing_errors,
    raising,
)
from core.files.store import check_name
from core.formats.dcp.columns import DcpChunk, DcpItem, DcpMetadata, DcpTensor
from core.formats.dcp.records import (
    FAST_FROM_BYTES,
    BytesRecord,
    ChunkRecord,
    DcpRecord,
    HfStorageRecord,
    IndexRecord,
    PropertiesRecord,
    RootRecord,
    StorageRecord,
    TensorRecord,
    parse_by_c,
    parse_by_machine,
)
from core.formats.missing_entries import report_missing
from core.pickle.fields import describe_value, text_or_none
from core.pickle.inert import Global
from core.pickle.names import judge
from core.pickle.noted import gc_paused, note_uses, noting_uses
from core.pickle.uses import Use

__all__ = [
    "DcpChunk",
    "DcpItem",
    "DcpMetadata",
    "DcpTensor",
    "parse_metadata",
    "read_once",
]

_MAX_EXTENT = 1 << 62


_OTHER_SOFTWARE = {
    "bytecheckpoint": "merge the checkpoint with ByteCheckpoint's scripts/merge_bcp.py",
    "olmo_core": "convert the checkpoint with OLMo-core's "
    "src/examples/huggingface/convert_checkpoint_to_hf.py",
}
"""Package whose classes replace DCP's in ``.metadata`` → what can be done with its checkpoints."""


def _hint_of(class_name: str) -> str | None:
    """Return what can be done with metadata of a class of other software; None if it is unknown."""
    return _OTHER_SOFTWARE.get(class_name.partition(".")[0])


def parse_metadata(data: bytes, *, label: str) -> DcpMetadata:
    """Parse the content of a ``.metadata`` file.

    Args:
        data: content of the file.
        label: name of the file, for errors.

    Raises:
        CorruptError: the pickle is not DCP metadata, or has impossible geometry.
        MissingShardError: a chunk has no item.
        UnsafeError: the pickle exceeds the limits of the pickle reader, or names a file outside the
            checkpoint.
        UnsupportedError: a storage, codec, layout or dtype is not supported.
    """
    return _parse(data, label).checked(label)


def salvaged_metadata(data: bytes, *, label: str, report: Report) -> DcpMetadata:
    """Read the intact entries of a ``.metadata`` file; report and skip the others.

    Args:
        data: content of the file.
        label: name of the file, for errors.
        report: receives the problems; rules: ``dcp.items``, ``dcp.out_of_bounds``, ``dcp.no_item``,
            ``dcp.entries``.

    Raises:
        CorruptError, UnsafeError, UnsupportedError: no entry can be read.
    """
    parsed = _parse(data, label)
    for problem in parsed.problems:
        report(problem.as_error(label))
    return parsed.metadata


class _Problem(NamedTuple):
    """A problem with an entry.

    Unlike a raised error, it keeps no frames alive.

    Attributes:
        kind: name of the error's class.
        message, key, hint, rule: fields of the error.
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


_KINDS = {
    kind.__name__: kind for kind in (CorruptError, MissingShardError, UnsafeError, UnsupportedError)
}


def _problem_of(err: CheckpointingException) -> _Problem:
    """Return the fields of an error."""
    return _Problem(type(err).__name__, err.message, err.key, err.hint, err.rule)


class _Parsed(NamedTuple):
    """The content of a ``.metadata`` file, without its damaged entries.

    Attributes:
        metadata: the intact entries.
        problems: the problems of the others.
        uses: names in the pickle and how it uses them.
    """

    metadata: DcpMetadata
    problems: tuple[_Problem, ...]
    uses: frozenset[Use]

    def checked(self, label: str) -> DcpMetadata:
        """Return the metadata, or raise the first problem."""
        tensors = dict(self.metadata.tensors)
        for problem in self.problems:
            err = problem.as_error(label)
            # An entry with some of its chunks is damaged, not one without data.
            tensor = None if err.key is None else tensors.get(err.key)
            if err.rule != "dcp.no_item" or (tensor is not None and tensor.n_chunks):
                raise err
            report_missing(err)
            tensors.pop(problem.key or "", None)
        return replace(self.metadata, tensors=tensors) if self.problems else self.metadata


_parsed_files: ContextVar[dict[bytes, _Parsed] | None] = ContextVar(
    "digest of a file → its content", default=None
)


@contextmanager
def read_once() -> Iterator[None]:
    """Cache the content of ``.metadata`` files within the block, as checks read them repeatedly."""
    token = _parsed_files.set({})
    try:
        yield
    finally:
        _parsed_files.reset(token)


def _parse(data: bytes, label: str) -> _Parsed:
    """Parse a file, or return the cached result within ``read_once``.

    Raises:
        CorruptError, UnsafeError, UnsupportedError: no entry can be read.
    """
    cache = _parsed_files.get()
    digest = b"" if cache is None else hashlib.blake2b(data).digest()
    parsed = None if cache is None else cache.get(digest)
    # Large files are worth a child process with the C unpickler. Collecting garbage would only
    # visit millions of records that are all in use.
    if parsed is None:
        with gc_paused():
            parsed = _parse_by_c(data) if len(data) >= FAST_FROM_BYTES else None
            parsed = parsed or _parse_by_machine(data, label)
        if cache is not None:
            cache[digest] = parsed
    note_uses(parsed.uses)
    return parsed


def _parse_by_machine(data: bytes, label: str) -> _Parsed:
    """Read the metadata with the hardened reader, whose errors also describe the damage.

    Raises:
        CorruptError, UnsafeError, UnsupportedError: no entry can be read.
    """
    problems: list[_Problem] = []
    with placing_errors(file=label):
        with noting_uses() as uses:
            root = parse_by_machine(data, label=label)
        metadata = _ColumnBuilder(root, report=lambda err: problems.append(_problem_of(err))).read()
    return _Parsed(metadata, tuple(problems), frozenset(uses))


def _parse_by_c(data: bytes) -> _Parsed | None:
    """Read the metadata with the C unpickler in a sandboxed child process.

    Why this executes nothing from the file and harms nothing:

    - ``find_class`` never imports or looks up a name: it returns the record classes of
      ``dcp.records``, ``tuple`` (for torch.Size), ``str`` (for the name of a layout) or a
      ``Global``. These are the only callables that an opcode can reach: none reads an attribute,
      the extension registry is emptied, persistent ids and buffers have no handler. Calling them
      creates lists, tuples and strings. BUILD sets attributes to such values.
    - A pickle can still make the C code misbehave: allocate by a memo index, hash nested tuples for
      ever, overflow its stack (docs/facts/safety.md 2.3). That happens in a process with limited
      address space and CPU time, without open files except the pipe, that cannot open any.
    - The answer is the columns that ``_ColumnBuilder`` computes in the child, the same code that
      checks every number for the other reader.

    Returns:
        None if the child failed or died, or if a name in the pickle has to be examined further.
    """
    from core.files.sandbox import run_sandboxed

    memory_bytes = (256 << 20) + 32 * len(data)
    cpu_s = 2 + (len(data) >> 20)  # usual files take 0.05 s per megabyte
    packed = run_sandboxed(
        "core.formats.dcp.metadata:pack_metadata", data, memory_bytes=memory_bytes, cpu_s=cpu_s
    )
    return None if packed is None else _unpack(packed)


_COLUMNS = ("offsets", "sizes", "file_index", "item_offset", "item_bytes")
_PLAIN = (
    "files",
    "planner_data",
    "mcore_data",
    "version",
    "extras",
    "orphans",
    "descriptors",
    "object_descriptors",
)


def pack_metadata(data: bytes) -> bytes:
    """Read the metadata in the child process, and serialize it for ``_unpack``.

    The result also contains the problems, and all names in the pickle that are not DCP's classes.

    Raises:
        ValueError: marshal cannot serialize a value.
    """
    problems: list[_Problem] = []
    root, other_names = parse_by_c(data)
    metadata = _ColumnBuilder(root, report=lambda err: problems.append(_problem_of(err))).read()
    return marshal.dumps(
        (
            sorted(other_names),
            [tuple(problem) for problem in problems],
            [tuple(tensor) for tensor in metadata.tensors.values()],
            [(key, *item) for key, item in metadata.objects.items()],
            [getattr(metadata, name).tobytes() for name in _COLUMNS],
            [getattr(metadata, name) for name in _PLAIN],
        )
    )


def _unpack(packed: bytes) -> _Parsed | None:
    """Rebuild the child's result; None if a name in the pickle has to be examined further."""
    names, problems, tensors, objects, columns, plain = marshal.loads(packed)
    # The pickle might call a name that is not one of the records: the hardened reader decides.
    uses = frozenset(Use(Global(module, name), "called") for module, name in names)
    if any(judge(use) != "known" for use in uses):
        return None
    # marshal preserves built-in types only, so named tuples and columns are rebuilt.
    fields: dict[str, Any] = dict(zip(_PLAIN, plain, strict=True))
    fields.update((name, array("q", raw)) for name, raw in zip(_COLUMNS, columns, strict=True))
    metadata = DcpMetadata(
        tensors={row[0]: DcpTensor._make(row) for row in tensors},
        objects={key: DcpItem(file, offset, n_bytes) for key, file, offset, n_bytes in objects},
        **fields,
    )
    return _Parsed(metadata, tuple(map(_Problem._make, problems)), uses)


class _ColumnBuilder:
    """Turns the record tree into columns and checks every number on the way.

    Args:
        report: receives the problems; the entries concerned are skipped.

    Raises:
        CorruptError: the pickle is not a Metadata.
    """

    def __init__(self, root: object, *, report: Report = raising) -> None:
        self._report = report
        if type(root) is not RootRecord:
            class_name = getattr(root, "class_name", type(root).__name__)
            hint = _hint_of(class_name)
            kind = CorruptError if hint is None else UnsupportedError
            hint = hint or (
                "this is not the checkpoint's .metadata; copy the .metadata that was saved with "
                "these .distcp files"
            )
            raise kind(f"the pickle is a {class_name}, not DCP's Metadata", hint=hint)
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
        """Read all items and entries into columns.

        Raises:
            CorruptError: there is no dict of entries.
        """
        self._add_items()
        entries = self.state.get("state_dict_metadata")
        if type(entries) is not dict:
            raise CorruptError("DCP's Metadata has no state_dict_metadata")
        # Release each record as soon as the columns have its content: both would not fit in memory.
        n_used = 0
        for key in list(entries):
            try:
                n_used += self._add_entry(key, entries.pop(key))
            except CheckpointingException as err:
                self._report_problem(key, err)

        # Read the attributes of the root.
        planner_data, is_known = self._planner_data()
        extras = [name for name in self.state if name not in _ATTRIBUTES]
        mcore_data = self.state.get("mcore_data")
        # Any mcore_data shows that this is Megatron's dialect, even one without facts.
        if mcore_data is not None and not isinstance(mcore_data, dict):
            mcore_data = {}
        has_orphans = n_used != len(self.chunk_items) + len(self.object_items)
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
            version=text_or_none(self.state.get("version")),
            extras=tuple(extras if is_known else ["planner_data", *extras]),
            orphans=self._orphans() if has_orphans else (),
            descriptors=self.descriptors,
            object_descriptors=self.object_descriptors,
        )

    def _add_entry(self, key: object, entry: object) -> int:
        """Add a tensor or an object; return the number of distinct items that it uses."""
        if type(key) is not str:
            raise CorruptError(
                f"a key of state_dict_metadata has the type {type(key).__name__}, not str"
            )
        if type(entry) is TensorRecord:
            return self._add_tensor(key, _state(entry, key))
        if type(entry) is BytesRecord:
            item = self.object_items.get(key)
            if item is None:
                raise MissingShardError("storage_data has no item for the object", key=key)
            if item[2] == 0:
                raise CorruptError("the object's item is 0 bytes long", key=key)
            self.objects[key] = DcpItem(self.names[item[0]], item[1], item[2])
            return 1
        class_name = getattr(entry, "class_name", type(entry).__name__)
        raise UnsupportedError(f"the entry is a {class_name}, not a tensor or bytes", key=key)

    def _add_items(self) -> None:
        """Add the positions of all items."""
        storage = self.state.get("storage_data")
        if type(storage) is not dict:
            # Not raised, so that the fast reader reports it too. The entries then lack items.
            self._report(CorruptError("DCP's Metadata has no storage_data").breaking("dcp.items"))
            return
        for index in list(storage):
            try:
                self._add_item(index, storage.pop(index))
            except CheckpointingException as err:
                self._report(err.breaking("dcp.items"))

    def _add_item(self, index: object, info: object) -> None:
        """Add the position of one item."""
        key, chunk_offset, name, offset, n_bytes, descriptors = _item_fields(index, info)
        # Check every value: a name could lead outside the checkpoint, and a sum overflow a column.
        file = self.files.get(name)
        if file is None:
            file = self.files[check_name(name)] = len(self.files)
            self.names.append(name)
        if not (
            type(offset) is type(n_bytes) is int
            and offset >= 0
            and n_bytes >= 0
            and offset + n_bytes < _MAX_EXTENT
        ):
            raise CorruptError(
                f"an item has an impossible position: {describe_value(n_bytes)} bytes at byte "
                f"{describe_value(offset)}",
                key=key,
            )
        transforms = _transforms(descriptors, key)

        # Items of objects have no chunk offset.
        if chunk_offset is None:
            self.object_items[key] = (file, offset, n_bytes)
            if transforms:
                self.object_descriptors[key] = transforms
            return
        # Only integers are hashed: hashing nested tuples could take for ever.
        if type(chunk_offset) is not tuple or {*map(type, chunk_offset)} - {int}:
            offset_text = describe_value(chunk_offset)
            raise CorruptError(f"an item has an invalid offset: {offset_text}", key=key)
        self.chunk_items[(key, *chunk_offset)] = (file, offset, n_bytes)
        if transforms:
            self.transforms[(key, *chunk_offset)] = transforms

    def _add_tensor(self, key: str, state: dict[str, Any]) -> int:
        """Add a tensor and its chunks; return the number of distinct items that it uses."""
        dtype, requires_grad = _properties(key, state.get("properties"))
        shape, chunks = state.get("size"), state.get("chunks")
        if type(shape) is not tuple or type(chunks) is not list:
            raise CorruptError("the tensor's size or chunks are missing or malformed", key=key)
        # The shape must be valid, and not too large for any file.
        n_elements = 1
        for extent in shape:
            if type(extent) is not int or extent < 0:
                raise CorruptError(f"the shape {describe_value(shape)} is invalid", key=key)
            n_elements *= max(extent, 1)
            if n_elements >= _MAX_EXTENT:
                raise CorruptError(
                    "the shape has more elements than any file could contain", key=key
                )
        first, start = len(self.item_offset), len(self.offsets)
        used_offsets = set()
        for chunk in chunks:
            # Checking all types first would be slow, so a malformed chunk may fail anywhere.
            # It is reported, and its numbers are removed from the columns.
            n_numbers = len(self.offsets)
            try:
                placed_chunk = self._check_chunk(key, shape, chunk)
                if placed_chunk is None:
                    continue
                offset, size, item = placed_chunk
                self.offsets.extend(offset)
                self.sizes.extend(size)
            except (KeyError, IndexError, TypeError, OverflowError, CheckpointingException) as err:
                del self.offsets[n_numbers:], self.sizes[n_numbers:]
                self._report_problem(key, err)
                continue
            if self.transforms and (key, *offset) in self.transforms:
                self.descriptors[len(self.item_offset)] = self.transforms[(key, *offset)]
            self.file_index.append(item[0])
            self.item_offset.append(item[1])
            self.item_bytes.append(item[2])
            used_offsets.add(offset)
        self.tensors[key] = DcpTensor(
            key, dtype, shape, requires_grad, first, len(self.item_offset) - first, start
        )
        return len(used_offsets)

    def _check_chunk(
        self, key: str, shape: tuple[int, ...], chunk: object
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, int, int]] | None:
        """Return offset, size and item of a chunk; None for an empty chunk without an item.

        Raises:
            CorruptError: the chunk exceeds the tensor's shape, or its item is empty.
            MissingShardError: the chunk has no item.
            KeyError, IndexError, TypeError: the chunk is malformed.
        """
        if type(chunk) is not ChunkRecord:
            raise CorruptError(
                f"one of the tensor's chunks has the type {type(chunk).__name__}, not "
                "ChunkStorageMetadata",
                key=key,
            )
        offset, size = chunk[0]["offsets"], chunk[0]["sizes"]
        # A plain loop: this runs 10⁶ times, and all() with a generator is slower.
        fits = len(offset) == len(shape) == len(size)
        for start, extent, axis_size in zip(offset, size, shape, strict=False):
            if start < 0 or extent < 0 or start + extent > axis_size:
                fits = False
        if not fits or type(offset) is not tuple:
            raise CorruptError(
                f"the chunk of size {describe_value(size)} at {describe_value(offset)} exceeds the "
                f"tensor's shape {describe_value(shape)}",
                key=key,
                rule="dcp.out_of_bounds",
            )
        # torch writes no item for an empty chunk.
        item = self.chunk_items.get((key, *offset))
        if item is None:
            if 0 in size:
                return None
            raise MissingShardError(
                f"storage_data has no item for the chunk of size {describe_value(size)} at "
                f"{describe_value(offset)}",
                key=key,
            )
        if item[2] == 0 and 0 not in size:
            size_text = describe_value(size)
            raise CorruptError(f"the item for a chunk of size {size_text} is 0 bytes long", key=key)
        return offset, size, item

    def _report_problem(self, key: str, err: Exception) -> None:
        """Report the problem of an entry or of one of its chunks."""
        if not isinstance(err, CheckpointingException):
            err = CorruptError(f"a chunk is malformed ({type(err).__name__}: {err})", key=key)
        rule = "dcp.no_item" if isinstance(err, MissingShardError) else "dcp.entries"
        self._report(err.breaking(rule))

    def _planner_data(self) -> tuple[dict[str, tuple[str | int, ...]] | None, bool]:
        """Return the paths in planner_data, and whether its structure is known.

        Only torch's default planner stores paths; another planner may store any object.
        """
        paths = self.state.get("planner_data")
        if paths is None:
            return None, True
        if type(paths) is not dict:
            return None, False
        for key, path in paths.items():
            if (
                type(key) is not str
                or type(path) is not tuple
                or any(type(part) not in (str, int) for part in path)
            ):
                return None, False
        return paths, True

    def _orphans(self) -> tuple[str, ...]:
        """Return the names of items that no entry refers to."""
        used: set[tuple[object, ...]] = set()
        for tensor in self.tensors.values():
            rank = len(tensor.shape)
            for number in range(tensor.n_chunks):
                start = tensor.start + number * rank
                used.add((tensor.key, *self.offsets[start : start + rank]))
        unused = {str(item[0]) for item in self.chunk_items if item not in used}
        return tuple(
            sorted(unused.union(key for key in self.object_items if key not in self.objects))
        )


_ATTRIBUTES = {
    "state_dict_metadata",
    "planner_data",
    "storage_data",
    "storage_meta",
    "version",
    "mcore_data",
}


def _state(record: DcpRecord, key: str | None = None) -> dict[str, Any]:
    """Return the attributes of a record.

    Raises:
        CorruptError: the record has no attributes.
    """
    if len(record) != 1 or type(record[0]) is not dict:
        raise CorruptError("a record in DCP's Metadata has no attributes", key=key)
    return record[0]


def _item_fields(index: object, info: object) -> tuple[str, Any, str, Any, Any, Any]:
    """Return the fields of an entry of storage_data.

    Args:
        index, info: key and value of the entry.

    Returns:
        fqn, chunk offset, file name, byte offset, length, transforms; names are strings, all other
        values unchecked.

    Raises:
        CorruptError: the entry is malformed.
        UnsupportedError: another kind of storage wrote the entry.
    """
    if type(info) is HfStorageRecord:
        raise UnsupportedError(
            "the checkpoint is in DCP's Hugging Face storage (safetensors files), which is not "
            "supported",
            hint="consolidate the files with torch, and convert the result",
        )
    if type(index) is not IndexRecord or type(info) is not StorageRecord:
        kinds = [getattr(part, "class_name", type(part).__name__) for part in (index, info)]
        raise UnsupportedError(
            f"storage_data maps a {kinds[0]} to a {kinds[1]}, which no supported storage "
            "backend writes",
            hint=_hint_of(str(kinds[1])),
        )
    try:
        (index_state,) = index
        (item_state,) = info
        key, name = index_state["fqn"], item_state["relative_path"]
        offset, n_bytes = item_state["offset"], item_state["length"]
        chunk_offset = index_state.get("offset")
        descriptors = item_state.get("transform_descriptors")
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise CorruptError(
            f"an entry of storage_data is malformed ({type(err).__name__}: {err})"
        ) from err
    if type(key) is not str or type(name) is not str:
        raise CorruptError("an entry of storage_data has a name that is not a string")
    return key, chunk_offset, name, offset, n_bytes, descriptors


_ZSTD = re.compile(r"stream\.zstd/1(\.\d+)*")
_MAX_TRANSFORMS = 8


def _transforms(names: object, key: str) -> tuple[str, ...]:
    """Return the stream transforms of an item, if all of them are known.

    Raises:
        UnsupportedError: a transform is unknown.
        CorruptError: the transforms are not a list of names.
    """
    if names is None:
        return ()
    if not isinstance(names, (list, tuple)) or {*map(type, names)} - {str}:
        raise CorruptError(f"an item has invalid transforms: {describe_value(names)}", key=key)
    unknown = [name for name in names if not _ZSTD.fullmatch(name)]
    if unknown or len(names) > _MAX_TRANSFORMS:
        raise UnsupportedError(
            f"items with the transforms {list_some(map(describe_value, unknown or names))} are not "
            "supported",
            key=key,
            hint="load the checkpoint with torch, and save it again with no extension other "
            "than zstd",
        )
    # The same few names occur 10⁶ times.
    return tuple(map(sys.intern, names))


def _properties(key: str, record: object) -> tuple[str, bool]:
    """Return dtype and requires_grad of a tensor.

    Raises:
        CorruptError: the record is malformed.
        UnsupportedError: the tensor is sparse, or its dtype is not supported.
    """
    state = record[0] if type(record) is PropertiesRecord and len(record) == 1 else None
    if type(state) is dict:
        state = tuple(state.get(name) for name in ("dtype", "layout", "requires_grad"))
    if type(state) is not tuple or len(state) < 3:
        raise CorruptError("the tensor's properties are missing or malformed", key=key)
    dtype, layout, requires_grad = state[:3]
    if type(dtype) is not Global or dtype.module != "torch":
        raise CorruptError(
            f"the tensor's dtype has the type {type(dtype).__name__}, not torch.dtype", key=key
        )
    if layout not in ("torch.strided", None):
        raise UnsupportedError(
            f"the tensor layout {describe_value(layout)} is not supported",
            key=key,
            hint="save the tensor as a dense tensor",
        )
    try:
        dtype_of(dtype.name)
    except UnsupportedError as err:
        err.key = key
        raise
    return dtype.name, requires_grad is True
