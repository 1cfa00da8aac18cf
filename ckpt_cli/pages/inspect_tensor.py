"""One tensor for people and for ``--json``: the places of its boxes and its first values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from ckpt_cli.pages.inspect_object import attribute_facts
from ckpt_cli.screen.blocks import (
    Block,
    Cell,
    Facts,
    Table,
    box_text,
    bytes_text,
    elements_text,
    n_text,
    shape_text,
    title_cell,
)
from ckpt_cli.screen.terminal import escaped
from core.arrays.box import is_c_contiguous
from core.arrays.dtypes import itemsize
from core.engine.catalog.stored import coords_text
from core.engine.catalog.tensor import Tensor
from core.verbs.inspect.preview import BoxLocation, Number

_COLUMNS = {
    "box": "<",
    "rank": "<",
    "file": "<",
    "in array": "<",
    "byte": ">",
    "strides": "<",
    "stored as": "<",
}
"""Title → alignment of each column of the table of places."""


def tensor_blocks(
    key: str,
    tensor: Tensor,
    places: Sequence[BoxLocation],
    values: Sequence[Number] | None,
    *,
    attributes: Mapping[str, object],
) -> Iterator[Block]:
    """Yield the page of one tensor: facts, a row for each place, and its first values.

    Args:
        places: where the boxes of the tensor are stored.
        values: the first elements in C order; None if they were not requested.
        attributes: what the checkpoint says about the tensor besides.
    """
    # A place is a box of the tensor in one file; replicas are places of the same box.
    yield title_cell(key)
    n_boxes = len({place.box for place in places})
    stored = stored_text(n_boxes, len(places)) + _encoding_text(places)
    elements = elements_text(tensor.n_elements)
    yield Facts(
        [
            ("dtype", tensor.dtype),
            ("shape", f"{shape_text(tensor.shape)}, {elements}, {bytes_text(tensor.n_bytes)}"),
            ("stored", stored),
            *attribute_facts(attributes),
        ]
    )
    # One row for each place, without empty columns.
    yield ""
    head = list(_COLUMNS)
    rows = [place_cells(place, itemsize(tensor.dtype)) for place in places]
    columns = [i for i in range(len(head)) if any(row[i].text for row in rows)]
    align = "".join(_COLUMNS[head[i]] for i in columns)
    cells = [[row[i] for i in columns] for row in rows]
    yield Table(cells, align=align, head=[head[i] for i in columns], stacks=True)
    # The first values, as many as were requested.
    if values is not None:
        yield ""
        count = f"all {len(values)}" if len(values) == tensor.n_elements else f"first {len(values)}"
        texts = (number_text(value, tensor.dtype) for value in values)
        yield Facts([(f"{count} values", ", ".join(texts))])


def stored_text(n_boxes: int, n_places: int) -> str:
    """Return the number of a tensor's boxes, and of the replicas that are stored besides."""
    n_copies = n_places - n_boxes
    replicas = f" and {n_text(n_copies, 'replica')}" if n_copies else ""
    return n_text(n_boxes, "box", "boxes") + replicas


def place_cells(place: BoxLocation, size: int) -> list[Cell]:
    """Return the cells of a place, in the order of ``_COLUMNS``; expected values are left empty.

    Args:
        size: bytes of an element.
    """
    # Padding of the vocabulary is stored nowhere.
    rank = coords_text(place.rank)
    if place.file is None:
        return [
            Cell(box_text(place.box)),
            Cell(rank),
            Cell("zeros (padding)", ("dim",)),
            *(Cell("") for _ in range(4)),
        ]
    # The position in the stored array is only shown if the box is a part of that array, the strides
    # only if the array is not in C order.
    is_part = place.box.shape != place.array_shape
    inside = f"at {shape_text(place.at)}" if is_part else ""
    # Of an array inside a container item, only the position and length of the item are known.
    item = (
        f"item {place.offset} +{place.item_bytes}"
        if place.item_bytes is not None
        else str(place.offset)
    )
    is_plain = place.strides is None or is_c_contiguous(place.array_shape, place.strides)
    return [
        Cell(box_text(place.box)),
        Cell(rank),
        Cell(escaped(place.file), ("cyan",)),
        Cell(inside, ("dim",)),
        Cell(item, ("dim",)),
        Cell("" if is_plain or place.strides is None else shape_text(place.strides), ("yellow",)),
        Cell("" if place.encoding is None else _stored_text(place, size), ("yellow",)),
    ]


def _stored_text(place: BoxLocation, size: int) -> str:
    """Return a place's codec with stored and decoded size: ``zstd, 1.2 KiB of 4 KiB``."""
    if place.stored_bytes is None:
        return escaped(place.encoding or "")
    n_bytes = prod(place.array_shape) * size
    return escaped(f"{place.encoding}, {bytes_text(place.stored_bytes)} of {bytes_text(n_bytes)}")


def _encoding_text(places: Sequence[BoxLocation]) -> str:
    """Return a tensor's codecs and its bytes in the files, as the end of a sentence.

    Returns:
        "" if no array of the tensor is encoded.
    """
    names = dict.fromkeys(place.encoding for place in places if place.encoding is not None)
    if not names:
        return ""
    # Several places may be boxes of one encoded array, whose bytes count once.
    lengths = {
        (place.file, place.array): place.stored_bytes
        for place in places
        if place.encoding is not None
    }
    sizes = [n for n in lengths.values() if n is not None]
    size = f", {bytes_text(sum(sizes))} in the files" if len(sizes) == len(lengths) else ""
    return f", {escaped(', '.join(map(str, names)))}{size}"


def number_text(value: Number, dtype: str) -> str:
    """Format a number with enough digits to identify it among the numbers of its dtype."""
    if isinstance(value, bool) or not isinstance(value, (float, complex)):
        return str(value)
    digits = (
        17 if dtype in ("float64", "complex128") else 9 if dtype in ("float32", "complex64") else 5
    )
    if isinstance(value, complex):
        return f"{value.real:.{digits}g}{value.imag:+.{digits}g}j"
    return f"{value:.{digits}g}"


def number_json(value: Number) -> object:
    """Return a number as a JSON value: ``[real, imaginary]`` if complex, NaN as text."""
    if isinstance(value, complex):
        return [number_json(value.real), number_json(value.imag)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def place_json(place: BoxLocation) -> dict[str, object]:
    """Return a place as an object of ``--json``; the schema is in ``ckpt_cli.commands.inspect``."""
    return {
        "offset": list(place.box.offset),
        "shape": list(place.box.shape),
        "file": place.file,
        "rank": dict(place.rank),
        "array": place.array,
        "at": list(place.at),
        "array_shape": list(place.array_shape),
        "byte_offset": place.offset,
        "item_bytes": place.item_bytes,
        "strides": None if place.strides is None else list(place.strides),
        "bytes": place.n_bytes,
        "encoding": place.encoding,
        "stored_bytes": place.stored_bytes,
    }
