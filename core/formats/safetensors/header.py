"""The header of a safetensors file: parsing it against its file, and making one.

Byte by byte::

    0        8              8 + N                                         end
    ├────────┼──────────────┼──────────────┬──────────────┬───────────────┤
    │ N, u64 │ N bytes JSON │ tensor       │ tensor       │ …             │
    └────────┴──────────────┴──────────────┴──────────────┴───────────────┘
    {"__metadata__": {"format": "pt"},
     "w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, …}   (then spaces)

All little endian. ``data_offsets`` count from byte 8 + N; in their order the tensors follow each other without a gap
and end where the file ends. N is at most 100,000,000; the JSON begins with ``{``. Every rule is checked here, so that
an array whose extent comes out of a header lies in its file.

``F4`` holds two elements a byte. Its JSON shape counts elements; the catalog has torch's ``float4_e2m1fn_x2``, whose
last axis counts bytes, so the last axis is halved on reading and doubled on writing.

Source: the format's description in safetensors' README, and safetensors 0.8 itself (order of the tensors, escapes,
padding), compared byte by byte in tests.

Not supported, refused by name: ``F6_E2M3`` and ``F6_E3M2``, and ``F4`` whose last axis is odd or that has none.
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
from core.errors import CheckpointingException, CorruptError, Report, TruncatedError, UnsupportedError, raising
from core.files.substitute import substitute_in
from core.formats.safetensors.json_text import METADATA, Fields, scanned

if TYPE_CHECKING:
    from collections.abc import Iterable

    from core.files.store import ReadStore

MAX_HEADER_BYTES = 100_000_000

ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E5M2FNUZ", "F8_E4M3FNUZ"),
    *("F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "BOOL"),
)
"""Dtypes in the order in which safetensors 0.8 writes them: wide ones first, so that every tensor is aligned."""

_BY_NAME = {dtype.safetensors: dtype for dtype in DTYPES.values() if dtype.safetensors is not None}
_RANK = {name: rank for rank, name in enumerate(ORDER)}
_SIX_BITS = ("F6_E2M3", "F6_E3M2")
_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_EXTENT = 1 << 63


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file says of itself, checked.

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
        """Bytes of all tensors."""
        return sum(array.n_bytes for array in self.arrays.values())


def looks_like_header(store: ReadStore, file: str, *, begin: int = 0) -> bool:
    """Whether a file, or what of it begins at byte ``begin``, begins as a safetensors file does; reads 9 bytes."""
    size = store.size(file) - begin
    if size < 10:
        return False
    head = store.read(file, begin, 9)
    n = int.from_bytes(head[:8], "little")
    return 2 <= n <= min(size - 8, MAX_HEADER_BYTES) and head[8:] == b"{"


def read_header(store: ReadStore, file: str, *, begin: int = 0, report: Report = raising) -> Header:
    """The header of a file, checked against the file's size.

    Args:
        begin: byte of the file at which the header begins, where something else comes before it.
        report: told of what is wrong with single entries.

    Raises:
        CorruptError: it breaks a rule of the format.
        TruncatedError: the file ends before the header or the last tensor does.
        UnsupportedError: a dtype that is not known or not handled.
        MissingShardError, StorageError: the file cannot be read.
    """
    size = store.size(file)
    if size < begin + 8:
        raise TruncatedError(f"the file has {size} bytes, too few for the length of its header (8 bytes)", file=file)
    n = int.from_bytes(store.read(file, begin, 8), "little")
    start = begin + 8 + n
    if n > MAX_HEADER_BYTES:
        substitute = substitute_in(store, file)
        if substitute is not None:
            raise CorruptError(substitute.title, file=file, hint=substitute.hint)
        raise CorruptError(
            f"the header is said to have {n} bytes, but at most {MAX_HEADER_BYTES} are allowed",
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
    metadata: dict[str, str] = {}
    found = scanned(store.read(file, begin + 8, n), file=file, metadata=metadata, report=report)
    entries = []
    n_refused = 0
    for name, fields in found:
        try:
            entries.append(_entry(name, fields, file))
        except CheckpointingException as err:
            err.rule = err.rule or "safetensors.entry"
            report(err)
            n_refused += 1
    return Header(file, _placed(entries, start=start, size=size, file=file, report=report, lacks=n_refused), metadata)


@value(frozen=True, slots=True)
class _Entry:
    """A tensor as the header has it, its dtype and shape already torch's; begin and end in bytes of the data."""

    name: str
    dtype: DType
    shape: Shape
    begin: int
    end: int


def _entry(name: str, fields: Fields, file: str) -> _Entry:
    if fields.keys() != _FIELDS:
        odd = sorted(fields.keys() ^ _FIELDS)[0]
        what = f"lacks the field {odd!r}" if odd in _FIELDS else f"has the unknown field {odd[:40]!r}"
        raise CorruptError(f"the entry {what}", file=file, key=name)
    shape = _numbers(fields["shape"], "shape", file, name)
    offsets = _numbers(fields["data_offsets"], "data_offsets", file, name)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CorruptError(f"data_offsets {list(offsets[:4])} are no begin and end", file=file, key=name)
    dtype = _dtype(fields["dtype"], file, name)
    if dtype.kind == "packed":
        shape = _packed(shape, dtype, file, name)
    n_bytes = prod(shape) * dtype.itemsize
    if n_bytes != offsets[1] - offsets[0]:
        raise CorruptError(
            f"dtype {dtype.safetensors} and shape {_shown(shape)} make {n_bytes} bytes, "
            f"data_offsets {list(offsets)} are {offsets[1] - offsets[0]}",
            file=file,
            key=name,
        )
    return _Entry(name, dtype, shape, *offsets)


def _numbers(value: object, field: str, file: str, name: str) -> Shape:
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < _MAX_EXTENT for n in value):
        raise CorruptError(
            f"{field} is {str(value)[:60]}, not a list of numbers from 0 to {_MAX_EXTENT - 1}", file=file, key=name
        )
    return tuple(value)


def _dtype(value: object, file: str, name: str) -> DType:
    found = _BY_NAME.get(value) if isinstance(value, str) else None
    if found is not None:
        return found
    if value in _SIX_BITS:
        raise UnsupportedError(
            f"dtype {value} (six bits an element) is not handled",
            file=file,
            key=name,
            hint="leave it out, or recast it",
        )
    raise UnsupportedError(
        f"dtype {str(value)[:40]!r} is not known",
        file=file,
        key=name,
        hint="update ckpt-toolkit, or ask where the file came from",
    )


def _packed(shape: Shape, dtype: DType, file: str, name: str) -> Shape:
    """The shape in bytes of a tensor with two elements a byte."""
    if not shape or shape[-1] % 2:
        raise UnsupportedError(
            f"{dtype.safetensors} of shape {_shown(shape)}: a byte holds two elements, the last axis must be even",
            file=file,
            key=name,
        )
    return (*shape[:-1], shape[-1] // 2)


def _shown(shape: Sequence[int]) -> str:
    return f"{list(shape)}" if len(shape) <= 8 else f"{list(shape[:8])}… of {len(shape)} axes"


def _placed(
    entries: Iterable[_Entry], *, start: int, size: int, file: str, report: Report, lacks: int
) -> dict[str, StoredArray]:
    """The arrays in the order of their bytes, which they must fill from ``start`` to ``size``.

    Args:
        report: told of each tensor that lies elsewhere.
        lacks: entries that are not understood, so that holes tell nothing.
    """
    arrays: dict[str, StoredArray] = {}
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if start + entry.end > size:
            problem: CheckpointingException = TruncatedError(
                f"the file has {size} bytes, but the tensor ends at byte {start + entry.end}",
                file=file,
                key=entry.name,
                span=(start + entry.begin, start + entry.end),
                hint="copy the file again",
            )
            report(problem)
        elif entry.begin != end and not (lacks and entry.begin > end):
            what = "overlaps the one before it" if entry.begin < end else "leaves a hole behind the one before it"
            problem = CorruptError(
                f"the tensor {what}: it begins at byte {entry.begin} of the data, that one ends at {end}",
                file=file,
                key=entry.name,
                rule="safetensors.order",
            )
            report(problem)
        arrays[entry.name] = StoredArray(entry.name, entry.dtype.name, entry.shape, Extent(file, start + entry.begin))
        end = max(end, entry.end)
    if start + end < size and not lacks:
        message = f"{size - start - end} bytes at the end belong to no tensor"
        report(CorruptError(message, file=file, span=(start + end, size), rule="safetensors.rest"))
    return arrays


def file_image(path: str, arrays: Mapping[str, PlannedArray], metadata: Mapping[str, str]) -> FileImage:
    """The image of a safetensors file.

    Args:
        path: name of the file.
        arrays: tensor name → its whole array.
        metadata: ``__metadata__``.

    Raises:
        UnsupportedError: a dtype or a name that the format does not have, or a header that is too large.
    """
    order = sorted(arrays, key=lambda name: (_RANK[_spelling(name, arrays[name])], name))
    parts = [f'"{METADATA}":{_dumped(dict(sorted(metadata.items())))}'] if metadata else []
    ends = [0]
    for name in order:
        array = arrays[name]
        ends.append(ends[-1] + array.n_bytes)
        shape = ",".join(map(str, _logical(name, array)))
        spelling = _spelling(name, array)
        parts.append(
            f'{_dumped(name)}:{{"dtype":"{spelling}","shape":[{shape}],"data_offsets":[{ends[-2]},{ends[-1]}]}}'
        )
    try:
        text = f"{{{','.join(parts)}}}".encode()
    except UnicodeEncodeError as err:
        odd = next((name for name in order if name.encode("utf-8", "replace").decode() != name), None)
        raise UnsupportedError(
            f"a name is no text that can be written: {err.reason}", file=path, key=odd, hint="rename it with --rename"
        ) from err
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UnsupportedError(
            f"the header would have {len(text)} bytes, but at most {MAX_HEADER_BYTES} are allowed",
            file=path,
            hint="write several files: --max-shard-size",
        )
    head = len(text).to_bytes(8, "little") + text

    def literals(crc_of: CrcOf) -> Sequence[Literal]:
        return ((0, head),)

    placed = [PlacedArray(len(head) + begin, arrays[name]) for name, begin in zip(order, ends, strict=False)]
    return FileImage(path, len(head) + ends[-1], placed, literals)


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _spelling(name: str, array: PlannedArray) -> str:
    """The dtype as the format spells it."""
    found = DTYPES[array.dtype].safetensors
    if found is None:
        raise UnsupportedError(
            f"safetensors has no dtype {array.dtype}", key=name, hint=f"leave the tensor out: --exclude {name!r}"
        )
    if name == METADATA:
        raise UnsupportedError(f"no tensor can be called {METADATA}", key=name, hint=rename_hint([name]))
    return found


def _logical(name: str, array: PlannedArray) -> Shape:
    """The shape in elements."""
    if DTYPES[array.dtype].kind != "packed":
        return array.shape
    if not array.shape:
        raise UnsupportedError(
            "two elements in a tensor without axes cannot be written", key=name, hint=f"--exclude {name!r}"
        )
    return (*array.shape[:-1], 2 * array.shape[-1])
