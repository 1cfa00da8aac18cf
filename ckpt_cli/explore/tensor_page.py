"""The right side of the screen: the pages of a tensor and of a module.

Pure functions from what was read to lines with the colours of a terminal; ``None`` stands for what
is still being read. Every name is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ckpt_cli.pages.inspect_tensor import number_text
from ckpt_cli.pages.pictures.bars import draw_bar
from ckpt_cli.pages.pictures.histogram import histogram_line, scale_of
from ckpt_cli.pages.pictures.shards import picture_lines
from ckpt_cli.screen.blocks import (
    Cell,
    box_text,
    bytes_text,
    count_text,
    elements_text,
    facts,
    n_text,
    shape_text,
    table,
    table_width,
    wrapped,
)
from ckpt_cli.screen.failure import failure_of
from ckpt_cli.screen.terminal import Screen, columns_of, escaped, shortened
from core.arrays.dtypes import itemsize
from core.engine.catalog.stored import coords_text
from core.values import dataclass

if TYPE_CHECKING:
    from ckpt_cli.explore.names import Entry
    from ckpt_cli.explore.source import Placement
    from core.engine.catalog.tensor import Tensor
    from core.engine.numbers.statistics import ValueStatistics
    from core.progress import Progress
    from core.verbs.inspect.preview import BoxLocation, Number

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


NO_NUMBERS = "the dtype has no numbers"


def tensor_page(screen: Screen, details: TensorDetails) -> Iterator[str]:
    """Yield the lines of a tensor: facts, statistics, places, and values."""
    tensor = details.meta
    yield from _title(screen, details.key)
    pairs: list[tuple[str, Cell | str]] = [
        ("shape", shape_text(tensor.shape)),
        ("dtype", tensor.dtype),
        ("size", f"{bytes_text(tensor.n_bytes)}, {elements_text(tensor.n_elements)}"),
    ]
    placement, shards = details.placement, None
    if placement is not None and not isinstance(placement, Exception):
        n_copies = placement.n_places - placement.n_boxes
        replicas = f" and {n_text(n_copies, 'replica')}" if n_copies else ""
        pairs.append(("stored", n_text(placement.n_boxes, "box", "boxes") + replicas))
        shards = placement.shards
    yield from facts(screen, pairs)
    yield from _section(screen, "statistics", _statistics_lines(screen, details))
    # A single box is the complete tensor: there is nothing to draw.
    if shards is not None and len(shards.shards) > 1:
        yield from _section(screen, "map", picture_lines(screen, shards, highest=8))
    yield from _section(screen, "places", _place_lines(screen, placement))
    yield from _section(screen, "first values", _values_lines(screen, details))


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


def module_page(
    screen: Screen, entry: Entry, *, title: str, totals: ModuleTotals | None
) -> Iterator[str]:
    """Yield the lines of a module: totals, and its members, the largest first.

    Args:
        totals: the totals; None while they are being added up.
    """
    yield from _title(screen, title)
    elements = dtypes = "…"
    if totals is not None:
        elements = count_text(totals.n_elements)
        dtypes = ", ".join(f"{name} {bytes_text(n)}" for name, n in totals.bytes_of.items())
    yield from facts(
        screen,
        [
            ("tensors", f"{entry.n_tensors:,}"),
            ("elements", elements),
            ("size", bytes_text(entry.n_bytes)),
            ("dtypes", dtypes),
        ],
    )
    members = sorted(entry.children(), key=lambda member: -member.n_bytes)
    if not members:
        return
    # A bar for each member; its length is the member's part of all bytes.
    yield ""
    rows = []
    for member in members[:_MOST_MEMBERS]:
        share = member.n_bytes / entry.n_bytes if entry.n_bytes else 0.0
        name = escaped(member.label[:LONGEST_NAME])
        rows.append(
            [
                Cell(name),
                Cell(bytes_text(member.n_bytes)),
                Cell(f"{share:.0%}", ("dim",)),
                Cell(draw_bar(share, _BAR), ("cyan",)),
            ]
        )
    yield from _named_rows(screen, rows, align="<>><")
    if len(members) > _MOST_MEMBERS:
        more = f"… {n_text(len(members) - _MOST_MEMBERS, 'more member')}"
        yield screen.plain(screen.styled(more, "dim"))


def error_lines(screen: Screen, err: BaseException) -> list[str]:
    """Return the lines of an error, in the words of the command line, within the screen."""
    failure = failure_of(err, command="ckpt explore")
    parts = (("error", failure.message), ("at", failure.place), ("hint", failure.hint))
    return list(
        facts(
            screen,
            [(name, Cell(text, ("red",) * (name == "error"))) for name, text in parts if text],
        )
    )


def progress_text(progress: Progress) -> str:
    """Return the phase of some work and how far it is: ``comparing: 1.2 GiB of 4 GiB``."""
    if not progress.done and not progress.total:
        return f"{progress.phase}…"
    if progress.unit == "files":
        total = f" of {progress.total:,}" if progress.total else ""
        return f"{progress.phase}: {progress.done:,}{total} files"
    total = f" of {bytes_text(progress.total)}" if progress.total else ""
    return f"{progress.phase}: {bytes_text(progress.done)}{total}"


def _title(screen: Screen, name: str) -> Iterator[str]:
    """Yield a name in bold, in as many lines as it needs."""
    text = escaped(name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…")
    width = screen.width or columns_of(text) or 1
    # Names have no spaces to break at.
    start = 0
    while start < len(text) or start == 0:
        end = start + width
        while columns_of(text[start:end]) > width:
            end -= 1
        yield screen.styled(text[start:end], "bold")
        start = end


def _section(screen: Screen, title: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield an empty line, a title, and the lines below it."""
    yield ""
    yield screen.styled(title, "dim")
    yield from lines


def _statistics_lines(screen: Screen, details: TensorDetails) -> Iterator[str]:
    """Yield the statistics, how far they are, or how to get them."""
    statistics = details.statistics
    if isinstance(statistics, Exception):
        yield from error_lines(screen, statistics)
    elif isinstance(statistics, str):
        yield screen.styled(statistics, "dim")
    elif isinstance(statistics, Reading):
        if statistics.progress is None:
            yield screen.styled(f"s reads {bytes_text(details.meta.n_bytes)}", "dim")
        else:
            yield screen.styled(progress_text(statistics.progress), "dim")
    elif statistics is None:
        yield screen.styled("reading…", "dim")
    else:
        yield from _numbers(screen, statistics)


def _numbers(screen: Screen, statistics: ValueStatistics) -> Iterator[str]:
    """Yield the extremes, the mean, and what is unusual."""

    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.4g}"

    pairs = (("min", statistics.least), ("max", statistics.greatest))
    more_pairs = (("mean", statistics.mean), ("std", statistics.std))
    rows = [
        [cell for name, value in row for cell in (Cell(name, ("dim",)), Cell(number(value)))]
        for row in (pairs, more_pairs)
    ]
    yield from table(screen, rows, align="<><>")
    if statistics.histogram.top is not None:  # else there are only zeros
        scale = scale_of(statistics.histogram)
        yield histogram_line(screen, statistics.histogram, statistics.n_zeros, scale)
    n_bad = statistics.n_nan + statistics.n_infinite
    counts = f"{statistics.n_nan:,} NaN, {statistics.n_infinite:,} Inf"
    zeros = n_text(statistics.n_zeros, "zero")
    bad = screen.styled(counts, "red", "bold") if n_bad else "no NaN or Inf"
    yield screen.plain(f"{bad}, {zeros}")


def _values_lines(screen: Screen, details: TensorDetails) -> Iterator[str]:
    """Yield the first values, or the error of reading them."""
    values = details.values
    if isinstance(values, Exception):
        yield from error_lines(screen, values)
    elif values is None:
        yield screen.styled("reading…", "dim")
    else:
        texts = [number_text(value, details.meta.dtype) for value in values]
        rest = details.meta.n_elements - len(values)
        text = " ".join(texts) if texts else "none"
        for line in wrapped(f"{text} …" if rest else text, screen.width or 1_000):
            yield screen.plain(line)


def _place_lines(screen: Screen, placement: Placement | Exception | None) -> Iterator[str]:
    """Yield the places: a table if there is room for it, else two lines for each."""
    if placement is None:
        yield screen.styled("reading…", "dim")
        return
    if isinstance(placement, Exception):
        yield from error_lines(screen, placement)
        return
    # The boxes have the numbers of the map.
    shards = placement.shards.shards
    numbers = {shard.box: str(at) for at, shard in enumerate(shards)} if len(shards) > 1 else {}
    rows = [(Cell(numbers.get(place.box, "")), *_place_row(place)) for place in placement.places]
    columns = [i for i in range(5) if any(row[i].text for row in rows)]
    cells = [[row[i] for i in columns] for row in rows]
    align = "".join("><<<>"[i] for i in columns)
    if screen.width is None or table_width(cells, align=align) <= screen.width:
        yield from table(screen, cells, align=align)
    else:
        for number, box, rank, file, byte in rows:
            title = f"{number.text} {box.text}".lstrip()
            yield screen.plain(f"{title}  {screen.styled(rank.text, 'bold')}".rstrip())
            room = screen.width - len(byte.text) - 3
            name = shortened(file.text, room, ellipsis=screen.plain("…"))
            yield f"  {screen.styled(name, 'cyan')} {screen.styled(byte.text, 'dim')}".rstrip()
    n_more = placement.n_places - len(placement.places)
    if n_more:
        yield screen.plain(screen.styled(f"… {n_text(n_more, 'more place')}", "dim"))


def _place_row(place: BoxLocation) -> tuple[Cell, Cell, Cell, Cell]:
    """Return box, rank, file and byte of a place."""
    rank = coords_text(place.rank)
    box = Cell(box_text(place.box))
    if place.file is None:
        return box, Cell(escaped(rank)), Cell("zeros (padding)", ("dim",)), Cell("")
    return (
        box,
        Cell(escaped(rank), ("bold",)),
        Cell(escaped(place.file), ("cyan",)),
        Cell(f"byte {place.offset:,}" if place.offset is not None else "", ("dim",)),
    )


def _named_rows(screen: Screen, rows: list[list[Cell]], *, align: str) -> Iterator[str]:
    """Yield the rows of a table, with names that leave room for the figures."""
    if screen.width is not None:
        figures = [[Cell(""), *row[1:]] for row in rows]
        room = max(screen.width - table_width(figures, align=align) - 2, 8)
        ellipsis = screen.plain("…")
        rows = [
            [Cell(shortened(row[0].text, room, ellipsis=ellipsis), row[0].styles), *row[1:]]
            for row in rows
        ]
    yield from table(screen, rows, align=align)
