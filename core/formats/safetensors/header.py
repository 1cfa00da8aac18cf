"""The header of a safetensors file: reading it and checking it against the file, and writing one.

Byte by byte::

    0        8              8 + N                                         end
    ├────────┼──────────────┼──────────────┬──────────────┬───────────────┤
    │ N, u64 │ N bytes JSON │ tensor       │ tensor       │ …             │
    └────────┴──────────────┴──────────────┴──────────────┴───────────────┘
    {"__metadata__": {"format": "pt"},
     "w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, …}   (then spaces)

All little endian. ``data_offsets`` are relative to byte 8 + N. In the order of these offsets the
tensors follow each other without gaps and end with the file. N is at most 100,000,000; the JSON
begins with ``{``. Every rule is checked here, so that the extent of an array is always within its
file.

``F4`` stores two elements per byte. Its JSON shape counts elements; the catalog has torch's
``float4_e2m1fn_x2``, whose last axis counts bytes, so the last axis is halved on reading and
doubled on writing.

Source: the format's description in safetensors' README, and safetensors 0.8 itself (order of the
tensors, escapes, padding), compared byte by byte in tests.

Not supported, refused by name: ``F6_E2M3`` and ``F6_E3M2``, and ``F4`` without axes or with an odd
last axis.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from shlex import quote
from typing import TYPE_CHECKING

from core.arrays.box import Shape
from core.arrays.dtypes import DTYPES, DType
from core.engine.catalog.file_image import CrcOf, FileImage, Literal, PlacedArray
from core.engine.catalog.key_patterns import rename_hint
from core.engine.catalog.stored import Extent, PlannedArray, StoredArray
from core.errors import (
    UNLIKE_ANY_WRITER,
    CheckpointingException,
    CorruptError,
    MissingShardError,
    Report,
    TruncatedError,
    UnsupportedError,
    raising,
    suggesting,
)
from core.files.substitute import substitute_in
from core.formats.missing_entries import report_missing
from core.values import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable

    from core.files.store import ReadStore
    from core.formats.safetensors.json_text import Fields

MAX_HEADER_BYTES = 100_000_000

ORDER = tuple(
    """
    U64 I64 F64 C64 F32 U32 I32 BF16 F16 U16 I16 F8_E5M2FNUZ F8_E4M3FNUZ F8_E8M0 F8_E4M3
    F8_E5M2 I8 U8 F4 BOOL
    """.split()
)
"""Dtypes in the order in which safetensors 0.8 writes them: wide ones first, for alignment."""

_BY_NAME = {dtype.safetensors: dtype for dtype in DTYPES.values() if dtype.safetensors is not None}
_RANK = {name: rank for rank, name in enumerate(ORDER)}
_SIX_BITS = ("F6_E2M3", "F6_E3M2")
_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_EXTENT = 1 << 63


@dataclass(frozen=True, slots=True)
class Header:
    """The checked content of a safetensors header.

    Args:
        file: name in the store.
        arrays: the tensors by name, in the order of their bytes.
        metadata: ``__metadata__``, in the order of the file.
    """

    file: str
    arrays: dict[str, StoredArray]
    metadata: dict[str, str]

    @property
    def n_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(array.n_bytes for array in self.arrays.values())


def looks_like_header(store: ReadStore, file: str, *, begin: int = 0) -> bool:
    """Return whether a safetensors header seems to begin at byte ``begin``; reads 9 bytes."""
    size = store.size(file) - begin
    if size < 10:
        return False
    head = store.read(file, begin, 9)
    header_bytes = int.from_bytes(head[:8], "little")
    return 2 <= header_bytes <= min(size - 8, MAX_HEADER_BYTES) and head[8:] == b"{"


@suggesting(UNLIKE_ANY_WRITER)
def read_header(store: ReadStore, file: str, *, begin: int = 0, report: Report = raising) -> Header:
    """Read the header of a file and check it against the file's size.

    Args:
        store, file: the checkpoint and the file in it.
        begin: byte of the file at which the header begins.
        report: receives the problems of single entries.

    Raises:
        CorruptError: the header breaks a rule of the format.
        TruncatedError: the file ends before the header or the last tensor does.
        UnsupportedError: a dtype is unknown or not supported.
        MissingShardError, StorageError: the file cannot be read.
    """
    from core.formats.safetensors.json_text import scanned

    # Check the length of the header before reading it. The first bytes of a web page or a Git LFS
    # pointer are a huge length.
    size = store.size(file)
    if size < begin + 8:
        raise TruncatedError(
            f"the file is only {size} bytes long, but its header length alone takes 8 bytes",
            file=file,
            hint="copy the file again",
        )
    header_bytes = int.from_bytes(store.read(file, begin, 8), "little")
    start = begin + 8 + header_bytes
    if header_bytes > MAX_HEADER_BYTES:
        substitute = substitute_in(store, file)
        if substitute is not None:
            raise CorruptError(substitute.title, file=file, hint=substitute.hint)
        raise CorruptError(
            f"the header is {header_bytes:,} bytes long; the limit is {MAX_HEADER_BYTES:,}",
            file=file,
            hint="check that this is a safetensors file",
        )
    if start > size:
        raise TruncatedError(
            f"the file is {size} bytes long, but its header ends at byte {start}",
            file=file,
            span=(size, start),
            hint="copy the file again",
        )

    # Read the entries. With a report that collects, a refused entry does not hide the others.
    metadata: dict[str, str] = {}
    scanned_entries = scanned(
        store.read(file, begin + 8, header_bytes), file=file, metadata=metadata, report=report
    )
    entries = []
    n_refused = 0
    for name, fields in scanned_entries:
        try:
            entries.append(_parse_entry(name, fields, file))
        except CheckpointingException as err:
            n_refused += 1
            err.rule = err.rule or "safetensors.entry"
            # torch's consolidation writes such an entry for a tensor of which no rank has a piece.
            if fields == {"dtype": "", "shape": [], "data_offsets": [0, 0]}:
                message = "the header lists the tensor without a dtype or data"
                missing = MissingShardError(message, file=file, key=name, rule=err.rule)
                report_missing(missing, report)
            else:
                report(err)
    arrays = _arrays_in_order(
        entries, start=start, size=size, file=file, report=report, n_refused=n_refused
    )
    return Header(file, arrays, metadata)


@dataclass(frozen=True, slots=True)
class _HeaderEntry:
    """A tensor of the header, with torch's dtype and shape; begin and end in bytes of the data."""

    name: str
    dtype: DType
    shape: Shape
    begin: int
    end: int


def _parse_entry(name: str, fields: Fields, file: str) -> _HeaderEntry:
    """Check the fields of an entry, and return the tensor.

    Raises:
        CorruptError: a field is missing, unknown or malformed, or the fields do not match.
        UnsupportedError: the dtype is not supported, or an odd number of elements is packed.
    """
    if fields.keys() != _FIELDS:
        field = sorted(fields.keys() ^ _FIELDS)[0]
        problem = "is missing" if field in _FIELDS else "is unknown"
        raise CorruptError(f"the field {field[:40]!r} {problem}", file=file, key=name)
    shape = _parse_numbers(fields["shape"], "shape", file, name)
    offsets = _parse_numbers(fields["data_offsets"], "data_offsets", file, name)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CorruptError(
            f"data_offsets {list(offsets[:4])} are not a valid byte range", file=file, key=name
        )
    dtype = _parse_dtype(fields["dtype"], file, name)
    # The header counts elements, torch counts bytes with two elements each.
    if dtype.kind == "packed":
        if not shape or shape[-1] % 2:
            raise UnsupportedError(
                f"{dtype.safetensors} has two elements per byte, so the last axis must be even, "
                f"but the shape is {_short_shape(shape)}",
                file=file,
                key=name,
            )
        shape = (*shape[:-1], shape[-1] // 2)
    n_bytes = prod(shape) * dtype.itemsize
    if n_bytes != offsets[1] - offsets[0]:
        raise CorruptError(
            f"the {dtype.safetensors} tensor of shape {_short_shape(shape)} needs {n_bytes} "
            f"bytes, but data_offsets {list(offsets)} span {offsets[1] - offsets[0]} bytes",
            file=file,
            key=name,
        )
    return _HeaderEntry(name, dtype, shape, *offsets)


def _parse_numbers(value: object, field: str, file: str, name: str) -> Shape:
    """Return the numbers of a field; raise CorruptError if it is not a list of them."""
    if isinstance(value, list):
        # A loop: a generator would take a fifth of the time of reading 10⁵ entries.
        for n in value:
            if type(n) is not int or not 0 <= n < _MAX_EXTENT:
                break
        else:
            return tuple(value)
    raise CorruptError(
        f"{field} is {str(value)[:60]}, not a list of numbers from 0 to {_MAX_EXTENT - 1}",
        file=file,
        key=name,
    )


def _parse_dtype(value: object, file: str, name: str) -> DType:
    """Return the dtype of an entry; raise UnsupportedError if it is unknown or not supported."""
    dtype = _BY_NAME.get(value) if isinstance(value, str) else None
    if dtype is not None:
        return dtype
    if value in _SIX_BITS:
        raise UnsupportedError(
            f"dtype {value} (6 bits per element) is not supported",
            file=file,
            key=name,
            hint="remove the tensor, or save it with a different dtype",
        )
    raise UnsupportedError(
        f"the dtype {str(value)[:40]!r} is not supported",
        file=file,
        key=name,
        hint="update ckpt-toolkit, or find out which program wrote the file",
    )


def _short_shape(shape: Sequence[int]) -> str:
    """Format a shape, abbreviated if it has many axes."""
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
    """Return the arrays in the order of their bytes, which must fill the data without gaps.

    Args:
        entries: the tensors, in any order.
        start, size: first byte of the data in the file, and size of the file.
        file: name of the file.
        report: receives each tensor at a wrong position.
        n_refused: number of entries that were refused; with any, gaps are expected.
    """
    arrays: dict[str, StoredArray] = {}
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        # Each tensor must begin at the end of the previous one.
        if start + entry.end > size:
            problem: CheckpointingException = TruncatedError(
                f"the file is {size} bytes long, but the tensor ends at byte {start + entry.end}",
                file=file,
                key=entry.name,
                span=(start + entry.begin, start + entry.end),
                hint="copy the file again",
            )
            report(problem)
        elif entry.begin != end and not (n_refused and entry.begin > end):
            relation = "overlaps the previous tensor" if entry.begin < end else "follows a gap"
            problem = CorruptError(
                f"the tensor {relation}: it begins at byte {entry.begin} of the data, but the "
                f"previous tensor ends at byte {end}",
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
        message = f"{size - start - end} bytes after the last tensor do not belong to any tensor"
        report(CorruptError(message, file=file, span=(start + end, size), rule="safetensors.rest"))
    return arrays


def file_image(
    path: str, arrays: Mapping[str, PlannedArray], metadata: Mapping[str, str]
) -> FileImage:
    """Lay out a safetensors file.

    Args:
        path: name of the file.
        arrays: tensor name → array with the complete tensor.
        metadata: ``__metadata__``.

    Raises:
        UnsupportedError: the format cannot store a dtype, shape or name, or the header would be too
            large.
    """
    from core.formats.safetensors.json_text import METADATA

    # List the tensors in safetensors' order, as compact JSON like that of safetensors itself.
    order = sorted(arrays, key=lambda name: (_RANK[_dtype_name(name, arrays[name])], name))
    parts = [f'"{METADATA}":{_dumped(dict(sorted(metadata.items())))}'] if metadata else []
    ends = [0]
    for name in order:
        array = arrays[name]
        shape = array.shape
        # torch counts bytes with two elements each, the header counts elements.
        if DTYPES[array.dtype].kind == "packed":
            if not shape:
                raise UnsupportedError(
                    "a tensor with two elements per byte needs at least one axis",
                    key=name,
                    hint=f"exclude the tensor with --exclude {quote(name)}",
                )
            shape = (*shape[:-1], 2 * shape[-1])
        ends.append(ends[-1] + array.n_bytes)
        parts.append(
            f'{_dumped(name)}:{{"dtype":"{_dtype_name(name, array)}",'
            f'"shape":[{",".join(map(str, shape))}],"data_offsets":[{ends[-2]},{ends[-1]}]}}'
        )

    # Encode the header, padded so that the data is aligned to 8 bytes.
    try:
        text = f"{{{','.join(parts)}}}".encode()
    except UnicodeEncodeError as err:
        odd = next(
            (name for name in order if name.encode("utf-8", "replace").decode() != name), None
        )
        raise UnsupportedError(
            f"the name cannot be encoded as UTF-8: {err.reason}",
            file=path,
            key=odd,
            hint="rename the tensor with --rename",
        ) from err
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UnsupportedError(
            f"the header would be {len(text):,} bytes long; the limit is {MAX_HEADER_BYTES:,}",
            file=path,
            hint="write several files with --max-shard-size",
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
    """Return a value as compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _dtype_name(name: str, array: PlannedArray) -> str:
    """Return safetensors' name of an array's dtype.

    Raises:
        UnsupportedError: the format does not have the dtype, or reserves the tensor's name.
    """
    from core.formats.safetensors.json_text import METADATA

    dtype_name = DTYPES[array.dtype].safetensors
    assert dtype_name is not None, "lay_out has checked all types"
    if name == METADATA:
        raise UnsupportedError(
            f"the name {METADATA} is reserved in safetensors files",
            key=name,
            hint=rename_hint([name]),
        )
    return dtype_name
