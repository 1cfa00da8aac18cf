"""Catalog entries as JSON values, for the plan that several workers read (``core.convert.stored_plan.file``).

Only values of known classes are written and made: those of the table ``CLASSES``, and functions of ``BINDERS``. So a
plan file, whoever wrote it, makes nothing but entries. A fragment that is all of its tensor and all of its array, as
most are, is the number of the array.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from core.arrays.box import Box, full_box
from core.catalog.catalog import AnyFragment, Fragment, TargetFragment, TensorMeta, bind_nothing
from core.catalog.stored import AnyArray, ArrayT, Extent, PlannedArray, StoredArray
from core.errors import UnsupportedError
from core.formats.dcp.zstd_streams import StreamItem
from core.formats.deepspeed.widened import Widened
from core.formats.ocdbt.database import InlineValue
from core.formats.torch.item import item_location
from core.formats.torch.zip.container import Record
from core.formats.torch.zip.records import RecordEncoding
from core.formats.zarr.decode import ChunkCoding, EncodedChunk
from core.formats.zarr.fill import FillValue
from core.quantize.from_float8 import Dequantized
from core.quantize.source import SourceTensor
from core.quantize.to_float8 import Quantized, Scales, Weight

CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(Box, Fragment, StoredArray, Extent, SourceTensor, Weight, Record, ChunkCoding),
        *(Quantized, Scales, Dequantized, EncodedChunk, FillValue, RecordEncoding, StreamItem, InlineValue, Widened),
    )
}
"""What an encoding may consist of. ``tests/convert/stored_plan/test_file.py`` finds encodings that are missing."""

BINDERS: dict[str, Callable[..., StoredArray]] = {"nothing": bind_nothing, "torch item": item_location}
"""How arrays are bound, by name (``Catalog.bind``)."""


def refused(value: object) -> object:
    """What becomes of a value that the tables do not have, where it is to be read again.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"several workers cannot share a plan with a value of {type(value)}",
        hint="convert it in one process, without ckpt launch",
    )


def plain(value: object, unknown: Callable[[object], object] = refused) -> object:
    """A value of an encoding, or a function that binds, as JSON has it.

    Args:
        unknown: makes something of what the tables do not have.

    Raises:
        UnsupportedError: from ``refused``.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return [plain(item, unknown) for item in value]
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode("ascii")}
    name = type(value).__name__
    if CLASSES.get(name) is type(value) and is_dataclass(value):
        return {"is": name, "of": [plain(getattr(value, field), unknown) for field in _fields(type(value))]}
    binder = binder_name(value)
    return unknown(value) if binder is None else {"binder": binder}


def binder_name(bind: object, unknown: Callable[[object], object] = lambda value: None) -> object:
    """The name of a function of ``BINDERS``, or what ``unknown`` makes of it."""
    return next((name for name, known in BINDERS.items() if known is bind), None) or unknown(bind)


def made(value: object) -> object:
    """What ``plain`` was given.

    Raises:
        ValueError, KeyError, TypeError: nothing that it gives.
    """
    if isinstance(value, list):
        return tuple(made(item) for item in value)
    if not isinstance(value, dict):
        return value
    if "bytes" in value:
        return base64.b64decode(value["bytes"], validate=True)
    if "binder" in value:
        return BINDERS[value["binder"]]
    kind = CLASSES[value["is"]]
    return kind(**dict(zip(_fields(kind), (made(item) for item in value["of"]), strict=True)))


def _fields(kind: type) -> list[str]:
    """What makes a value of a class; what it only remembers is left out."""
    return [field.name for field in fields(kind) if field.init and field.compare]


_PLAIN = (None, None, -1, None, None, False)


class Encoder:
    """Writes fragments; files are numbered in the order in which they come.

    Args:
        unknown: see ``plain``.

    Attributes:
        files: their numbers.
    """

    def __init__(self, unknown: Callable[[object], object] = refused) -> None:
        self.files: dict[str, int] = {}
        self._unknown = unknown

    def fragments(self, meta: TensorMeta, fragments: Sequence[AnyFragment]) -> list[object]:
        """Fragments of a tensor: arrays, encodings, and (box, place in an array) of each."""
        arrays: list[object] = []
        encodings: list[object] = []
        numbers: dict[int, int] = {}
        known: dict[int, int] = {}
        rows: list[object] = []
        for fragment in fragments:
            array, number = fragment.array, -1
            if array is not None:
                found = numbers.get(id(array))
                number = numbers[id(array)] = len(arrays) if found is None else found
                if found is None:
                    arrays.append(self._array(meta, array, encodings, known))
                box = fragment.box
                if box.shape == meta.shape == array.shape and not any(fragment.at) and not any(box.offset):
                    rows.append(number)
                    continue
            rows.append((number, fragment.box.offset, fragment.box.shape, fragment.at))
        return [arrays, encodings, rows]

    def _array(self, meta: TensorMeta, array: AnyArray, encodings: list[object], known: dict[int, int]) -> list[object]:
        row: list[object] = [
            0 if array.name == meta.key else array.name,
            0 if array.dtype == meta.dtype else array.dtype,
            0 if array.shape == meta.shape else array.shape,
            array.coords,
        ]
        if isinstance(array, PlannedArray):
            return row
        extent = array.extent
        encoding = extent.encoding
        number = -1
        if encoding is not None:
            found = known.get(id(encoding))
            number = known[id(encoding)] = len(encodings) if found is None else found
            if found is None:
                encodings.append(plain(encoding, self._unknown))
        file = self.files.setdefault(extent.file, len(self.files))
        row += (file, extent.offset)
        more = (extent.strides, extent.item_bytes, number, extent.crc, extent.part_of, extent.is_swapped)
        return row if more == _PLAIN else [*row, *more]


class Decoder:
    """Makes what ``Encoder`` wrote.

    Args:
        files: by number.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._files = files

    def fragments(self, meta: TensorMeta, data: Sequence[list[object]]) -> tuple[Fragment, ...]:
        """Return the fragments of a tensor of the source.

        Raises:
            ValueError, KeyError, TypeError, IndexError: nothing that ``Encoder`` writes.
        """
        arrays, encodings, rows = data
        values = [made(encoding) for encoding in encodings]
        return _fragments(meta, [self._stored(meta, row, values) for row in arrays], rows)

    def targets(self, meta: TensorMeta, data: Sequence[list[object]]) -> tuple[TargetFragment, ...]:
        """Return the fragments of a tensor of the target.

        Raises:
            ValueError, KeyError, TypeError, IndexError: nothing that ``Encoder`` writes.
        """
        arrays, _, rows = data
        return _fragments(meta, [_planned(meta, _row(row)) for row in arrays], rows)

    def _stored(self, meta: TensorMeta, row: object, encodings: Sequence[Any]) -> StoredArray:
        *array, file, offset = _row(row)[:6]
        more = _row(row)[6:]
        extent = Extent(self._files[file], offset)
        if more:
            strides, item_bytes, number, crc, part_of, is_swapped = more
            extent = Extent(
                self._files[file],
                offset,
                None if strides is None else tuple(strides),
                item_bytes,
                encodings[number] if number >= 0 else None,
                crc,
                None if part_of is None else (tuple(part_of[0]), part_of[1]),
                is_swapped,
            )
        return _planned(meta, array).at(extent)


def _planned(meta: TensorMeta, row: Sequence[Any]) -> PlannedArray:
    name, dtype, shape, coords = row
    return PlannedArray(
        meta.key if name == 0 else name,
        meta.dtype if dtype == 0 else dtype,
        meta.shape if shape == 0 else tuple(shape),
        tuple((which, rank) for which, rank in coords),
    )


def _fragments(meta: TensorMeta, arrays: Sequence[ArrayT], rows: Sequence[object]) -> tuple[Fragment[ArrayT], ...]:
    found = []
    for row in rows:
        if isinstance(row, int):
            found.append(Fragment(meta.key, full_box(meta.shape), arrays[row], (0,) * len(meta.shape)))
        else:
            number, offset, shape, at = _row(row)
            piece = arrays[number] if number >= 0 else None
            found.append(Fragment(meta.key, Box(tuple(offset), tuple(shape)), piece, tuple(at)))
    return tuple(found)


def _row(row: object) -> list[Any]:
    if not isinstance(row, list):
        raise TypeError("a row is a list")
    return row
