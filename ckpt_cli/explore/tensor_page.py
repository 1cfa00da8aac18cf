"""The right side of the screen: the pages of a tensor and of a module.

Pure functions from what was read to blocks; ``None`` stands for what is still being read. Names are
escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ckpt_cli.pages.inspect_tensor import number_text, place_cells, stored_text
from ckpt_cli.pages.pictures.bars import draw_bar
from ckpt_cli.pages.pictures.histogram import histogram_line, scale_of
from ckpt_cli.pages.pictures.shards import picture_lines
from ckpt_cli.screen.blocks import (
    Block,
    Cell,
    Facts,
    Table,
    bytes_text,
    count_text,
    dim_cell,
    elements_text,
    n_text,
    shape_text,
    table,
    table_width,
    title_cell,
)
from ckpt_cli.screen.failure import failure_of
from ckpt_cli.screen.terminal import Screen, escaped, shortened
from core.arrays.dtypes import itemsize
from core.values import dataclass

if TYPE_CHECKING:
    from ckpt_cli.explore.names import Entry
    from ckpt_cli.explore.source import Placement
    from core.engine.catalog.tensor import Tensor
    from core.engine.numbers.statistics import ValueStatistics
    from core.progress import Progress
    from core.verbs.inspect.preview import Number

LONGEST_NAME = 400
"""Most characters of a name that are shown."""
_MOST_MEMBERS = 40
_BAR = 12
"""Columns of the bar of a module's size."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Statistics that are being read, or that wait to be asked for.

    Args:
        progress: how far they are; None if they were not begun.
    """

    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class TensorDetails:
    """The facts about a tensor that were read so far; None stands for what is being read.

    Args:
        key, meta: the tensor.
        placement: where it is stored, or why that is unknown.
        values: the first values, or why they could not be read.
        statistics: the statistics, or why they could not be read; ``NO_NUMBERS`` without any.
    """

    key: str
    meta: Tensor
    placement: Placement | Exception | None = None
    values: list[Number] | Exception | None = None
    statistics: ValueStatistics | Reading | str | Exception | None = None


NO_NUMBERS = "this dtype does not store numbers"
_Part = TypeVar("_Part")


def tensor_page(details: TensorDetails) -> Iterator[Block]:
    """Yield the page of a tensor: facts, statistics, places, and values."""
    tensor = details.meta
    yield _title(details.key)
    pairs: list[tuple[str, Cell | str]] = [
        ("shape", shape_text(tensor.shape)),
        ("dtype", tensor.dtype),
        ("size", f"{bytes_text(tensor.n_bytes)}, {elements_text(tensor.n_elements)}"),
    ]
    placement, shards = details.placement, None
    if placement is not None and not isinstance(placement, Exception):
        pairs.append(("stored", stored_text(placement.n_boxes, placement.n_places)))
        shards = placement.shards
    yield Facts(pairs)
    yield from _section(
        "statistics", details.statistics, partial(_statistics_blocks, tensor=tensor)
    )
    # A single box is the complete tensor: there is nothing to draw.
    if shards is not None and len(shards.shards) > 1:
        yield from ("", dim_cell("map"), partial(picture_lines, shards=shards, highest=8))
    yield from _section("places", placement, _place_blocks)
    yield from _section("first values", details.values, partial(_value_blocks, tensor=tensor))


@dataclass(frozen=True, slots=True)
class ModuleTotals:
    """Totals of the tensors of a module.

    Args:
        n_elements: number of elements.
        bytes_of: size in bytes by dtype.
    """

    n_elements: int
    bytes_of: dict[str, int]


def totals_of(entry: Entry) -> ModuleTotals:
    """Add up the tensors of an entry."""
    n_elements = 0
    bytes_of: dict[str, int] = {}
    for tensor in entry.tensors():
        n = tensor.n_elements
        n_elements += n
        bytes_of[tensor.dtype] = bytes_of.get(tensor.dtype, 0) + n * itemsize(tensor.dtype)
    return ModuleTotals(n_elements, dict(sorted(bytes_of.items(), key=lambda item: -item[1])))


def module_page(entry: Entry, *, title: str, totals: ModuleTotals | None) -> Iterator[Block]:
    """Yield the page of a module: totals, and its members, the largest first.

    Args:
        totals: the totals; None while they are being added up.
    """
    yield _title(title)
    elements = dtypes = "…"
    if totals is not None:
        elements = count_text(totals.n_elements)
        dtypes = ", ".join(f"{name} {bytes_text(n)}" for name, n in totals.bytes_of.items())
    yield Facts(
        [
            ("tensors", f"{entry.n_tensors:,}"),
            ("elements", elements),
            ("size", bytes_text(entry.n_bytes)),
            ("dtypes", dtypes),
        ]
    )
    members = sorted(entry.children(), key=lambda member: -member.n_bytes)
    if not members:
        return
    # A bar for each member; its length is the member's part of all bytes.
    yield ""
    rows = []
    for member in members[:_MOST_MEMBERS]:
        share = member.n_bytes / entry.n_bytes if entry.n_bytes else 0.0
        bar = Cell(draw_bar(share, _BAR), ("cyan",))
        name = escaped(member.label[:LONGEST_NAME])
        rows.append((name, bytes_text(member.n_bytes), dim_cell(f"{share:.0%}"), bar))
    yield Table(rows, align="<>><", fits=True)
    if len(members) > _MOST_MEMBERS:
        yield dim_cell(f"… {n_text(len(members) - _MOST_MEMBERS, 'more member')}")


def error_facts(err: BaseException) -> Facts:
    """Return an error in the words of the command line."""
    failure = failure_of(err, command="ckpt explore")
    parts = (("error", failure.message), ("at", failure.place), ("hint", failure.hint))
    return Facts([(name, Cell(text, ("red",) * (name == "error"))) for name, text in parts if text])


def progress_text(progress: Progress) -> str:
    """Return the phase of some work and how far it is: ``comparing: 1.2 GiB of 4 GiB``."""
    if not progress.done and not progress.total:
        return f"{progress.phase}…"
    if progress.unit == "files":
        total = f" of {progress.total:,}" if progress.total else ""
        return f"{progress.phase}: {progress.done:,}{total} files"
    total = f" of {bytes_text(progress.total)}" if progress.total else ""
    return f"{progress.phase}: {bytes_text(progress.done)}{total}"


def _title(name: str) -> Cell:
    """Return a name in bold, whose end is left out if it is very long."""
    return title_cell(name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…")


def _section(
    title: str, part: _Part | Exception | None, draw: Callable[[_Part], Iterable[Block]]
) -> Iterator[Block]:
    """Yield a part of a page below its title, or the error of reading it.

    Args:
        part: what was read; None while it is being read.
    """
    yield from ("", dim_cell(title))
    if part is None:
        yield dim_cell("reading…")
    elif isinstance(part, Exception):
        yield error_facts(part)
    else:
        yield from draw(part)


def _statistics_blocks(
    statistics: ValueStatistics | Reading | str, tensor: Tensor
) -> Iterator[Block]:
    """Yield the statistics, how far they are, or how to get them."""
    if isinstance(statistics, str):
        yield dim_cell(statistics)
    elif isinstance(statistics, Reading):
        progress = statistics.progress
        text = f"s reads {bytes_text(tensor.n_bytes)}"
        yield dim_cell(text if progress is None else progress_text(progress))
    else:
        # The extremes, the mean, and what is unusual.
        figures = [
            "–" if value is None else f"{value:.4g}"
            for value in (statistics.least, statistics.greatest, statistics.mean, statistics.std)
        ]
        names = list(map(dim_cell, ("min", "max", "mean", "std")))
        rows = [(names[i], figures[i], names[i + 1], figures[i + 1]) for i in (0, 2)]
        yield Table(rows, align="<><>")
        if statistics.histogram.top is not None:  # else there are only zeros
            scale = scale_of(statistics.histogram)
            yield histogram_line(statistics.histogram, statistics.n_zeros, scale)
        bad: Cell | str = "no NaN or Inf"
        if statistics.n_nan + statistics.n_infinite:
            text = f"{statistics.n_nan:,} NaN, {statistics.n_infinite:,} Inf"
            bad = Cell(text, ("red", "bold"))
        yield bad, f", {n_text(statistics.n_zeros, 'zero')}"


def _value_blocks(values: Sequence[Number], tensor: Tensor) -> Iterator[Block]:
    """Yield the first values on one line, which the pane wraps."""
    text = " ".join(number_text(value, tensor.dtype) for value in values) or "none"
    yield f"{text} …" if tensor.n_elements > len(values) else text


def _place_blocks(placement: Placement) -> Iterator[Block]:
    """Yield the places; their boxes have the numbers of the map."""
    shards = placement.shards.shards
    numbers = {shard.box: str(at) for at, shard in enumerate(shards)} if len(shards) > 1 else {}
    rows = []
    for place in placement.places:
        box, rank, file, *_ = place_cells(place, 0)
        byte = f"byte {place.offset:,}" if place.file and place.offset is not None else ""
        number = Cell(numbers.get(place.box, ""))
        rows.append((number, box, replace(rank, styles=("bold",)), file, dim_cell(byte)))
    yield partial(_draw_places, rows=rows)
    n_more = placement.n_places - len(placement.places)
    if n_more:
        yield dim_cell(f"… {n_text(n_more, 'more place')}")


def _draw_places(screen: Screen, rows: Sequence[Sequence[Cell]]) -> Iterator[str]:
    """Yield a row for each place if there is room for it, else two lines for each."""
    columns = [i for i in range(5) if any(row[i].text for row in rows)]
    cells = [[row[i] for i in columns] for row in rows]
    align = "".join("><<<>"[i] for i in columns)
    if screen.width is None or table_width(cells, align=align) <= screen.width:
        yield from table(screen, cells, align=align)
        return
    for number, box, rank, file, byte in rows:
        title = f"{number.text} {box.text}".lstrip()
        yield screen.plain(f"{title}  {screen.styled(rank.text, 'bold')}".rstrip())
        room = screen.width - len(byte.text) - 3
        name = shortened(file.text, room, ellipsis=screen.plain("…"))
        yield f"  {screen.styled(name, 'cyan')} {screen.styled(byte.text, 'dim')}".rstrip()
