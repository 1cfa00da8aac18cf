"""The header of a safetensors file: parsing it against its file, and making one.

Byte by byte::

    0        8              8 + N                                         end
    ├────────┼──────────────┼──────────────┬──────────────┬───────────────┤
    │ N, u64 │ N bytes JSON │ tensor       │ tensor       │ …             │
    └────────┴──────────────┴──────────────┴──────────────┴───────────────┘
    {"__metadata__": {"format": "pt"},
     "w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, …}   (then spaces)

All little endian. ``data_offsets`` count from byte 8 + N; in their order the tensors follow each
other without a gap and end where the file ends. N is at most 100,000,000; the JSON begins with
``{``. Every rule is checked here, so that the extent of an array from a header lies in its file.

``F4`` holds two elements a byte. Its JSON shape counts elements; the catalog has torch's
``float4_e2m1fn_x2``, whose last axis counts bytes, so the last axis is halved on reading and
doubled on writing.

Source: the format's description in safetensors' README, and safetensors 0.8 itself (order of the
tensors, escapes, padding), compared byte by byte in tests.

Not supported, refused by name: ``F6_E2M3`` and ``F6_E3M2``, and ``F4`` whose last axis is odd or
that has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from core.arrays.box import Shape
from core.arrays.dtypes import DTYPES, DType
from core.arrays.fast_value import value
from core.catalog.file_image import CrcOf, FileImage, Literal, PlacedArray
from core.catalog.key_patterns import rename_hint
from core.catalog.stored import Extent, PlannedArray, StoredArray
from core.errors import (
    CheckpointingException,
    CorruptError,
    Report,
    TruncatedError,
    UnsupportedError,
    raising,
)
from core.files.substitute import substitute_in
from core.formats.safetensors.json_text import METADATA, Fields, scanned

if TYPE_CHECKING:
    from collections.abc import Iterable

    from core.files.store import ReadStore

MAX_HEADER_BYTES = 100_000_000

ORDER = (
    *(
        "U64",
        "I64",
        "F64",
        "C64",
        "F32",
        "U32",
        "I32",
        "BF16",
        "F16",
        "U16",
        "I16",
        "F8_E5M2FNUZ",
        "F8_E4M3FNUZ",
    ),
    *("F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "BOOL"),
)
"""Dtypes in the order in which safetensors 0.8 writes them: wide ones first, so that every tensor
is aligned.
"""

_BY_NAME = {dtype.safetensors: dtype for dtype in DTYPES.values() if dtype.safetensors is not None}
_RANK = {name: rank for rank, name in enumerate(ORDER)}
_SIX_BITS = ("F6_E2M3", "F6_E3M2")
_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_EXTENT = 1 << 63


@dataclass(frozen=True, slots=True)
class Header:
    """The content of a safetensors header, checked.

    Args:
        file: name in the store.
        arrays: the tensors by name, in the order of their bytes; each is its array.
        metadata: ``__metadata__``, in the order of the file.
    """

    file: str
    arrays: dict[str, StoredArray]
    metadata: dict[str, str]

    @property
    def n_bytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return sum(array.n_bytes for array in self.arrays.values())


def looks_like_header(store: ReadStore, file: str, *, begin: int = 0) -> bool:
    """Return whether a file has the beginning of a safetensors file at byte ``begin``.

    Reads 9 bytes.
    """
    size = store.size(file) - begin
    if size < 10:
        return False
    head = store.read(file, begin, 9)
    n = int.from_bytes(head[:8], "little")
    return 2 <= n <= min(size - 8, MAX_HEADER_BYTES) and head[8:] == b"{"


def read_header(store: ReadStore, file: str, *, begin: int = 0, report: Report = raising) -> Header:
    """Read the header of a file and check it against the file's size.

    Args:
        begin: byte of the file at which the header begins.
        report: receives the problems of single entries.

    Raises:
        CorruptError: the header breaks a rule of the format.
        TruncatedError: the file ends before the header or the last tensor does.
        UnsupportedError: a dtype is unknown or not supported.
        MissingShardError, StorageError: the file cannot be read.
    """
    # Check the length of the header before reading it.
    size = store.size(file)
    if size < begin + 8:
        raise TruncatedError(
            f"the file has {size} bytes, too few for the length of its header (8 bytes)", file=file
        )
    n = int.from_bytes(store.read(file, begin, 8), "little")
    start = begin + 8 + n
    if n > MAX_HEADER_BYTES:
        substitute = substitute_in(store, file)
        if substitute is not None:
            raise CorruptError(substitute.title, file=file, hint=substitute.hint)
        raise CorruptError(
            f"the header length is {n:,} bytes, but at most {MAX_HEADER_BYTES:,} are allowed",
            file=file,
            hint="this may not be a safetensors file",
        )
    if start > size:
        raise TruncatedError(
            f"the file has {size} bytes, but its header alone ends at byte {start}",
            file=file,
            span=(size, start),
            hint="copy the file again",
        )
    # Read the entries; one that is refused does not hide the others.
    metadata: dict[str, str] = {}
    scanned_entries = scanned(
        store.read(file, begin + 8, n), file=file, metadata=metadata, report=report
    )
    entries = []
    n_refused = 0
    for name, fields in scanned_entries:
        try:
            entries.append(_parse_entry(name, fields, file))
        except CheckpointingException as err:
            err.rule = err.rule or "safetensors.entry"
            report(err)
            n_refused += 1
    return Header(
        file,
        _arrays_in_order(
            entries, start=start, size=size, file=file, report=report, n_refused=n_refused
        ),
        metadata,
    )


@value(frozen=True, slots=True)
class _HeaderEntry:
    """A tensor of the header with torch's dtype and shape; begin and end in bytes of the data."""

    name: str
    dtype: DType
    shape: Shape
    begin: int
    end: int


def _parse_entry(name: str, fields: Fields, file: str) -> _HeaderEntry:
    """Check the fields of an entry, and return the tensor."""
    if fields.keys() != _FIELDS:
        field = sorted(fields.keys() ^ _FIELDS)[0]
        problem = (
            f"lacks the field {field!r}"
            if field in _FIELDS
            else f"has the unknown field {field[:40]!r}"
        )
        raise CorruptError(f"the entry {problem}", file=file, key=name)
    shape = _parse_numbers(fields["shape"], "shape", file, name)
    offsets = _parse_numbers(fields["data_offsets"], "data_offsets", file, name)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CorruptError(
            f"data_offsets {list(offsets[:4])} are not a begin and an end", file=file, key=name
        )
    dtype = _parse_dtype(fields["dtype"], file, name)
    if dtype.kind == "packed":
        shape = _shape_in_bytes(shape, dtype, file, name)
    n_bytes = prod(shape) * dtype.itemsize
    if n_bytes != offsets[1] - offsets[0]:
        raise CorruptError(
            f"dtype {dtype.safetensors} and shape {_short_shape(shape)} make {n_bytes} bytes, "
            f"data_offsets {list(offsets)} are {offsets[1] - offsets[0]}",
            file=file,
            key=name,
        )
    return _HeaderEntry(name, dtype, shape, *offsets)


def _parse_numbers(value: object, field: str, file: str, name: str) -> Shape:
    if not isinstance(value, list) or not all(
        type(n) is int and 0 <= n < _MAX_EXTENT for n in value
    ):
        raise CorruptError(
            f"{field} is {str(value)[:60]}, not a list of numbers from 0 to {_MAX_EXTENT - 1}",
            file=file,
            key=name,
        )
    return tuple(value)


def _parse_dtype(value: object, file: str, name: str) -> DType:
    dtype = _BY_NAME.get(value) if isinstance(value, str) else None
    if dtype is not None:
        return dtype
    if value in _SIX_BITS:
        raise UnsupportedError(
            f"dtype {value} (six bits an element) is not supported",
            file=file,
            key=name,
            hint="leave it out, or recast it",
        )
    raise UnsupportedError(
        f"dtype {str(value)[:40]!r} is unknown",
        file=file,
        key=name,
        hint="update ckpt-toolkit, or ask where the file came from",
    )


def _shape_in_bytes(shape: Shape, dtype: DType, file: str, name: str) -> Shape:
    """Return the shape in bytes of a tensor with two elements a byte."""
    if not shape or shape[-1] % 2:
        raise UnsupportedError(
            f"{dtype.safetensors} of shape {_short_shape(shape)}: with two elements a byte, the last axis must be even",
            file=file,
            key=name,
        )
    return (*shape[:-1], shape[-1] // 2)


def _short_shape(shape: Sequence[int]) -> str:
    return f"{list(shape)}" if len(shape) <= 8 else f"{list(shape[:8])}… of {len(shape)} axes"


def _arrays_in_order(
    entries: Iterable[_HeaderEntry],
    *,
    start: int,
    size: int,
    file: str,
    report: Report,
    n_refused: int,
) -> dict[str, StoredArray]:
    """Return the arrays in the order of their bytes, which must fill the file from ``start`` to
    ``size``.

    Args:
        report: receives each tensor that lies elsewhere.
        n_refused: number of entries that were refused; if there are any, holes are no problem.
    """
    arrays: dict[str, StoredArray] = {}
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        # Each tensor must begin where the one before it ends.
        if start + entry.end > size:
            problem: CheckpointingException = TruncatedError(
                f"the file has {size} bytes, but the tensor ends at byte {start + entry.end}",
                file=file,
                key=entry.name,
                span=(start + entry.begin, start + entry.end),
                hint="copy the file again",
            )
            report(problem)
        elif entry.begin != end and not (n_refused and entry.begin > end):
            problem_text = (
                "overlaps the one before it"
                if entry.begin < end
                else "leaves a gap after the one before it"
            )
            problem = CorruptError(
                f"the tensor {problem_text}: it begins at byte {entry.begin} of the data, that one ends at {end}",
                file=file,
                key=entry.name,
                rule="safetensors.order",
            )
            report(problem)
        arrays[entry.name] = StoredArray(
            entry.name, entry.dtype.name, entry.shape, Extent(file, start + entry.begin)
        )
        end = max(end, entry.end)
    if start + end < size and not n_refused:
        message = f"{size - start - end} bytes at the end belong to no tensor"
        report(CorruptError(message, file=file, span=(start + end, size), rule="safetensors.rest"))
    return arrays


def file_image(
    path: str, arrays: Mapping[str, PlannedArray], metadata: Mapping[str, str]
) -> FileImage:
    """Return the image of a safetensors file.

    Args:
        path: name of the file.
        arrays: tensor name → its whole array.
        metadata: ``__metadata__``.

    Raises:
        UnsupportedError: the format has no such dtype or name, or the header would be too large.
    """
    # List the tensors in safetensors' order.
    order = sorted(arrays, key=lambda name: (_RANK[_dtype_name(name, arrays[name])], name))
    parts = [f'"{METADATA}":{_dumped(dict(sorted(metadata.items())))}'] if metadata else []
    ends = [0]
    for name in order:
        array = arrays[name]
        ends.append(ends[-1] + array.n_bytes)
        shape = ",".join(map(str, _shape_in_elements(name, array)))
        spelling = _dtype_name(name, array)
        parts.append(
            f'{_dumped(name)}:{{"dtype":"{spelling}","shape":[{shape}],"data_offsets":[{ends[-2]},{ends[-1]}]}}'
        )
    # Encode the header, padded to 8 bytes.
    try:
        text = f"{{{','.join(parts)}}}".encode()
    except UnicodeEncodeError as err:
        odd = next(
            (name for name in order if name.encode("utf-8", "replace").decode() != name), None
        )
        raise UnsupportedError(
            f"a name cannot be written as UTF-8: {err.reason}",
            file=path,
            key=odd,
            hint="rename it with --rename",
        ) from err
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UnsupportedError(
            f"the header would have {len(text):,} bytes, but at most {MAX_HEADER_BYTES:,} are allowed",
            file=path,
            hint="write several files: --max-shard-size",
        )
    head = len(text).to_bytes(8, "little") + text

    def literals(crc_of: CrcOf) -> Sequence[Literal]:
        return ((0, head),)

    placed = [
        PlacedArray(len(head) + begin, arrays[name])
        for name, begin in zip(order, ends, strict=False)
    ]
    return FileImage(path, len(head) + ends[-1], placed, literals)


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _dtype_name(name: str, array: PlannedArray) -> str:
    """Return the dtype as the format spells it."""
    dtype_name = DTYPES[array.dtype].safetensors
    if dtype_name is None:
        raise UnsupportedError(
            f"safetensors has no dtype {array.dtype}",
            key=name,
            hint=f"leave the tensor out: --exclude {name!r}",
        )
    if name == METADATA:
        raise UnsupportedError(
            f"no tensor can be called {METADATA}", key=name, hint=rename_hint([name])
        )
    return dtype_name


def _shape_in_elements(name: str, array: PlannedArray) -> Shape:
    """Return the shape in elements."""
    if DTYPES[array.dtype].kind != "packed":
        return array.shape
    if not array.shape:
        raise UnsupportedError(
            "a tensor with two elements a byte needs at least one axis",
            key=name,
            hint=f"--exclude {name!r}",
        )
    return (*array.shape[:-1], 2 * array.shape[-1])
