"""Encode catalog entries as JSON values, for the plan that several workers read.

Only values of known classes are encoded and decoded: those of the table ``CLASSES``, and functions
of ``BINDERS``. So a plan file, whoever wrote it, creates nothing but catalog entries. Most
fragments are all of their tensor and all of their array; they are encoded as the array's number.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from core.arrays.box import Box, full_box
from core.engine.catalog.stored import (
    AnyArray,
    ArrayT,
    Extent,
    PlannedArray,
    StoredArray,
    files_read,
)
from core.engine.catalog.tensor import AnyFragment, AnyTensor, Fragment, TargetFragment
from core.engine.quantize.from_blockwise import DequantizedState
from core.engine.quantize.from_float8 import Dequantized
from core.engine.quantize.from_mxfp4 import DequantizedMxfp4
from core.engine.quantize.from_torchao import DequantizedTorchao
from core.engine.quantize.source import SourceTensor
from core.engine.quantize.to_float8 import Quantized, Scales, Weight
from core.errors import UnsupportedError
from core.formats.dcp.zstd_streams import StreamItem
from core.formats.deepspeed.weights import Widened
from core.formats.ocdbt.database import InlineValue
from core.formats.torch.item import torch_item
from core.formats.torch.object_tensors import PickledArray
from core.formats.torch.zip.container import Record
from core.formats.torch.zip.records import RecordEncoding
from core.formats.zarr.decode import ChunkCoding, EncodedChunk
from core.formats.zarr.fill import FillValue
from core.hf.optimizer.steps import StepNumber
from core.hf.tensors.packed import Rearranged
from core.hf.tensors.shifted import Shifted
from core.verbs.merge.combined import Combined
from core.verbs.merge.lora import Folded
from core.verbs.merge.slerp import Slerp

CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Box,
        Fragment,
        StoredArray,
        Extent,
        SourceTensor,
        Weight,
        Record,
        ChunkCoding,
        Quantized,
        Scales,
        Dequantized,
        DequantizedMxfp4,
        DequantizedState,
        DequantizedTorchao,
        StepNumber,
        Rearranged,
        Shifted,
        EncodedChunk,
        FillValue,
        RecordEncoding,
        StreamItem,
        PickledArray,
        InlineValue,
        Widened,
        Combined,
        Slerp,
        Folded,
    )
}
"""Classes that an encoding may consist of; a test finds missing ones."""


def refuse_class(value: object) -> object:
    """Raise because a value of an unknown class cannot be decoded by other workers.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"a plan that contains a {type(value).__name__} cannot be shared by several workers",
        hint="convert in one process, without ckpt launch",
    )


def plain(value: object, unknown: Callable[[object], object] = refuse_class) -> object:
    """Encode a value of an encoding as JSON.

    Args:
        value: the value.
        unknown: encodes values of classes that are not in the tables.

    Raises:
        UnsupportedError: from ``refuse_class``.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return [plain(item, unknown) for item in value]
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode("ascii")}
    name = type(value).__name__
    if CLASSES.get(name) is type(value) and is_dataclass(value):
        return {
            "is": name,
            "of": [plain(getattr(value, field), unknown) for field in _fields(type(value))],
        }
    return unknown(value)


def decode(value: object) -> object:
    """Decode a value that ``plain`` encoded.

    Raises:
        ValueError, KeyError, TypeError: ``plain`` does not produce such JSON.
    """
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    if "bytes" in value:
        return base64.b64decode(value["bytes"], validate=True)
    kind = CLASSES[value["is"]]
    return kind(**dict(zip(_fields(kind), (decode(item) for item in value["of"]), strict=True)))


def _fields(kind: type) -> list[str]:
    """List the fields that define a value of a class, without those that only cache."""
    return [field.name for field in fields(kind) if field.init and field.compare]


_PLAIN = (None, None, -1, None, None, None)
"""Details of a dense, bound extent without encoding and CRC; they are not written."""


class Encoder:
    """Encoder of fragments; files are numbered in the order of their first use.

    Args:
        unknown: as for ``plain``.

    Attributes:
        files: number of each file with arrays.
        encoding_files: names of the files that encodings read.
    """

    def __init__(self, unknown: Callable[[object], object] = refuse_class) -> None:
        self.files: dict[str, int] = {}
        self.encoding_files: set[str] = set()
        self._unknown = unknown

    def fragments(
        self, key: str, tensor: AnyTensor, fragments: Sequence[AnyFragment]
    ) -> list[object]:
        """Encode a tensor's fragments as [arrays, encodings, rows of box and position]."""
        arrays: list[object] = []
        encodings: list[object] = []
        numbers: dict[int, int] = {}
        encoding_numbers: dict[int, int] = {}
        rows: list[object] = []
        for fragment in fragments:
            array, number = fragment.array, -1
            if array is not None:
                # Several fragments may share an array, and several arrays an encoding.
                earlier = numbers.get(id(array))
                number = numbers[id(array)] = len(arrays) if earlier is None else earlier
                if earlier is None:
                    arrays.append(self._array(key, tensor, array, encodings, encoding_numbers))
                box = fragment.box
                if (
                    box.shape == tensor.shape == array.shape
                    and not any(fragment.at)
                    and not any(box.offset)
                ):
                    rows.append(number)
                    continue
            rows.append((number, fragment.box.offset, fragment.box.shape, fragment.at))
        return [arrays, encodings, rows]

    def _array(
        self,
        key: str,
        tensor: AnyTensor,
        array: AnyArray,
        encodings: list[object],
        encoding_numbers: dict[int, int],
    ) -> list[object]:
        """Encode an array; a value that equals the tensor's is written as 0.

        Args:
            key, tensor: the tensor.
            array: one of its arrays.
            encodings: the encodings of the tensor's arrays so far; a new one is added.
            encoding_numbers: index in ``encodings`` by the id of an encoding.
        """
        row: list[object] = [
            0 if array.name == key else array.name,
            0 if array.dtype == tensor.dtype else array.dtype,
            0 if array.shape == tensor.shape else array.shape,
            array.coords,
        ]
        if isinstance(array, PlannedArray):
            return row
        extent = array.extent
        encoding = extent.encoding
        number = -1
        if encoding is not None:
            earlier = encoding_numbers.get(id(encoding))
            number = encoding_numbers[id(encoding)] = len(encodings) if earlier is None else earlier
            if earlier is None:
                encodings.append(plain(encoding, self._unknown))
                self.encoding_files.update(files_read(encoding))
        file = self.files.setdefault(extent.file, len(self.files))
        row += (file, extent.offset)
        more = (
            extent.strides,
            None if extent.item is None else extent.item.n_bytes,
            number,
            extent.crc,
            extent.part_of,
            extent.axes,
        )
        return row if more == _PLAIN else [*row, *more]


class Decoder:
    """Decoder of the data that ``Encoder`` produced.

    Args:
        files: names of the files, by number.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._files = files

    def fragments(
        self, key: str, tensor: AnyTensor, data: Sequence[list[object]]
    ) -> tuple[Fragment, ...]:
        """Decode the fragments of a tensor of the source.

        Raises:
            ValueError, KeyError, TypeError, IndexError: ``Encoder`` does not produce such data.
        """
        arrays, encodings, rows = data
        values = [decode(encoding) for encoding in encodings]
        return _fragments(tensor, [self._stored(key, tensor, row, values) for row in arrays], rows)

    def targets(
        self, key: str, tensor: AnyTensor, data: Sequence[list[object]]
    ) -> tuple[TargetFragment, ...]:
        """Decode the fragments of a tensor of the target.

        Raises:
            ValueError, KeyError, TypeError, IndexError: ``Encoder`` does not produce such data.
        """
        arrays, _, rows = data
        return _fragments(tensor, [_planned(key, tensor, _row(row)) for row in arrays], rows)

    def _stored(
        self, key: str, tensor: AnyTensor, row: object, encodings: Sequence[Any]
    ) -> StoredArray:
        *array, file, offset = _row(row)[:6]
        more = _row(row)[6:]
        extent = Extent(self._files[file], offset)
        if more:
            strides, item_bytes, number, crc, part_of, axes = more
            extent = Extent(
                self._files[file],
                offset,
                None if strides is None else tuple(strides),
                None if item_bytes is None else torch_item(item_bytes),
                encodings[number] if number >= 0 else None,
                crc,
                None if part_of is None else (tuple(part_of[0]), part_of[1]),
                None if axes is None else tuple(axes),
            )
        return _planned(key, tensor, array).at(extent)


def _planned(key: str, tensor: AnyTensor, row: Sequence[Any]) -> PlannedArray:
    name, dtype, shape, coords = row
    return PlannedArray(
        key if name == 0 else name,
        tensor.dtype if dtype == 0 else dtype,
        tensor.shape if shape == 0 else tuple(shape),
        tuple((group, rank) for group, rank in coords),
    )


def _fragments(
    tensor: AnyTensor, arrays: Sequence[ArrayT], rows: Sequence[object]
) -> tuple[Fragment[ArrayT], ...]:
    fragments = []
    for row in rows:
        if isinstance(row, int):
            fragments.append(
                Fragment(full_box(tensor.shape), arrays[row], (0,) * len(tensor.shape))
            )
        else:
            number, offset, shape, at = _row(row)
            array = arrays[number] if number >= 0 else None
            fragments.append(Fragment(Box(tuple(offset), tuple(shape)), array, tuple(at)))
    return tuple(fragments)


def _row(row: object) -> list[Any]:
    if not isinstance(row, list):
        raise TypeError("a row of the plan is not a list")
    return row
