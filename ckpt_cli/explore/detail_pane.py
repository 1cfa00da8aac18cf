"""The right side of the screen: reads what the cursor is on, in a worker, part after part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from ckpt_cli.explore.cancellation import Cancellation, Cancelled
from ckpt_cli.explore.drawn_text import text_of_blocks
from ckpt_cli.explore.tensor_page import (
    NO_NUMBERS,
    Reading,
    TensorDetails,
    error_facts,
    module_page,
    tensor_page,
    totals_of,
)
from ckpt_cli.screen.blocks import Block, Cell, Facts, bytes_text, dim_cell, n_text, title_cell
from core.engine.numbers.difference import has_numbers

if TYPE_CHECKING:
    from ckpt_cli.explore.names import Entry
    from ckpt_cli.explore.source import CheckpointSource
    from core.progress import Progress

_Result = TypeVar("_Result")
_PAUSE_S = 0.08
"""Time that the cursor has to rest on an entry before anything is read."""
_MOST_KEPT = 500
"""Most tensors whose details are kept."""
_ADDED_AT_ONCE = 1_000
"""Most tensors that are added up without a worker."""
_MOST_OBJECT_LINES = 400
_REFRESH_S = 0.1


class DetailPane(VerticalScroll):
    """The page of the entry at the cursor."""

    def __init__(self) -> None:
        super().__init__()
        self._source: CheckpointSource | None = None
        self._page: Sequence[Block] = ()
        self._cancellation = Cancellation()
        self._kept: OrderedDict[str, TensorDetails] = OrderedDict()
        self._overview: Sequence[Block] | None = None
        self._shown: TensorDetails | None = None

    def compose(self) -> ComposeResult:
        """Return the only widget, which has the text."""
        yield Static("", markup=False)

    def on_resize(self) -> None:
        """Draw again at the new width."""
        self._redraw()

    def on_unmount(self) -> None:
        """Ask the work to end."""
        self._cancellation.cancel()

    def stop_reading(self) -> None:
        """Give up what is being read; statistics can be asked for again."""
        if self._shown is None or self._cancellation.is_cancelled():
            return
        self._cancellation.cancel()
        details = self._details(self._shown)
        if details.statistics is None or isinstance(details.statistics, Reading):
            self._keep(replace(details, statistics=Reading()))

    def show(self, source: CheckpointSource, entry: Entry, *, is_root: bool) -> None:
        """Show an entry: at once what is in the metadata, the rest when it was read.

        Args:
            is_root: the entry is the checkpoint.
        """
        self._source = source
        tensor = entry.branch.meta if entry.kind == "tensor" else None
        self._shown = None if tensor is None else TensorDetails(entry.branch.first_key, tensor)
        # What was begun for the last entry is of no use.
        cancellation = self._begin()
        if is_root:
            self._set(self._overview or _first_facts(source, entry))
            if self._overview is None:
                self._read(cancellation, partial(self._read_overview, source))
        elif self._shown is not None:
            self._show_tensor(source, self._shown, cancellation)
        elif entry.kind == "object":
            self._set([dim_cell("reading…")])
            self._read(cancellation, partial(self._read_object, source, entry.key or ""))
        elif entry.is_object:
            count = n_text(len(entry.children()), "entry", "entries")
            self._set([title_cell(entry.label), count])
        else:
            title = ".".join(entry.path) if entry.kind == "module" else entry.label
            is_small = entry.n_tensors <= _ADDED_AT_ONCE
            totals = totals_of(entry) if is_small else None
            self._set(module_page(entry, title=title, totals=totals))
            if not is_small:
                self._read(cancellation, partial(self._add_up, entry, title))
        self.scroll_home(animate=False)

    def read_statistics(self) -> None:
        """Measure the tensor that is shown, whatever its size."""
        shown, source = self._shown, self._source
        if shown is None or source is None:
            self.app.notify("select a tensor to see its statistics", markup=False)
            return
        if isinstance(self._details(shown).statistics, Reading | Exception):
            cancellation = self._begin()
            self._read(cancellation, partial(self._read_tensor, source, shown, is_asked=True))

    def _begin(self) -> Cancellation:
        """Cancel what is being read, and return the cancellation of what comes."""
        self._cancellation.cancel()
        self._cancellation = Cancellation()
        return self._cancellation

    def _show_tensor(
        self, source: CheckpointSource, shown: TensorDetails, cancellation: Cancellation
    ) -> None:
        """Show what is kept of a tensor, and read what is missing."""
        details = self._details(shown)
        self._set(tensor_page(details))
        if None in (details.placement, details.values, details.statistics):
            self._read(cancellation, partial(self._read_tensor, source, shown))

    def _details(self, shown: TensorDetails) -> TensorDetails:
        """Return what was read of a tensor so far."""
        return self._kept.get(shown.key, shown)

    def _read(self, cancellation: Cancellation, work: Callable[[Cancellation], None]) -> None:
        """Begin some work in a worker, after the cursor has rested for a moment."""

        def begin() -> None:
            if not cancellation.is_cancelled():
                self.run_worker(partial(_run, work, cancellation), thread=True, exit_on_error=False)

        self.set_timer(_PAUSE_S, begin)

    def _read_tensor(
        self,
        source: CheckpointSource,
        shown: TensorDetails,
        cancellation: Cancellation,
        *,
        is_asked: bool = False,
    ) -> None:
        """Read the missing parts of a tensor's page, and show each; called in a worker.

        Args:
            is_asked: measure the tensor even if it is large.
        """
        details = self._details(shown)
        for part in self._missing_parts(source, details, cancellation, is_asked=is_asked):
            cancellation.check()
            details = part
            self.app.call_later(self._keep, details)

    def _missing_parts(
        self,
        source: CheckpointSource,
        details: TensorDetails,
        cancellation: Cancellation,
        *,
        is_asked: bool,
    ) -> Iterator[TensorDetails]:
        """Yield the details with one part more each time; errors are parts, too."""
        key, tensor = details.key, details.meta
        if details.placement is None:
            details = replace(details, placement=_or_error(lambda: source.placement(key)))
            yield details
        if details.values is None:
            cancellation.check()
            details = replace(details, values=_or_error(lambda: source.values(key)))
            yield details
        # Large tensors are only measured if the user asks for it.
        if not is_asked and details.statistics is not None:
            return
        if not has_numbers(tensor.dtype):
            yield replace(details, statistics=NO_NUMBERS)
            return
        if tensor.n_bytes > source.statistics_limit_bytes and not is_asked:
            yield replace(details, statistics=Reading())
            return
        shown_at = 0.0

        def report(progress: Progress) -> None:
            nonlocal shown_at
            if monotonic() - shown_at >= _REFRESH_S:
                shown_at = monotonic()
                step = replace(details, statistics=Reading(progress))
                self.app.call_later(self._show_step, step, cancellation)

        statistics = _or_error(lambda: source.statistics(key, tensor, cancellation, report))
        yield replace(details, statistics=NO_NUMBERS if statistics is None else statistics)

    def _keep(self, details: TensorDetails) -> None:
        """Keep what was read of a tensor, and show it if the cursor is still there."""
        key = details.key
        self._kept[key] = details
        self._kept.move_to_end(key)
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        if self._shown is not None and self._shown.key == key:
            self._set(tensor_page(details))

    def _show_step(self, details: TensorDetails, cancellation: Cancellation) -> None:
        """Show how far the statistics are, unless they have ended since."""
        is_over = not isinstance(self._details(details).statistics, Reading | None)
        is_shown = self._shown is not None and self._shown.meta is details.meta
        if is_shown and not (cancellation.is_cancelled() or is_over):
            self._set(tensor_page(details))

    def _read_overview(self, source: CheckpointSource, cancellation: Cancellation) -> None:
        """Read the facts about the checkpoint; called in a worker."""
        from ckpt_cli.explore.overview import read_overview

        page: list[Block]
        try:
            page = read_overview(source)
        except Exception as err:
            page = [error_facts(err)]
        self.app.call_later(self._set_overview, page, cancellation)

    def _set_overview(self, page: Sequence[Block], cancellation: Cancellation) -> None:
        """Keep the facts about the checkpoint, and show them if the cursor is still there."""
        self._overview = page
        self._set_unless(page, cancellation)

    def _read_object(self, source: CheckpointSource, key: str, cancellation: Cancellation) -> None:
        """Read an object; called in a worker."""
        from ckpt_cli.pages.inspect_object import object_blocks, object_json

        page: Iterable[Block]
        try:
            value = object_json(source.view.objects[key], source.checkpoint)
            page = object_blocks([(key, value)], limit=_MOST_OBJECT_LINES)
        except Exception as err:
            page = [error_facts(err)]
        cancellation.check()
        self.app.call_later(self._set_unless, page, cancellation)

    def _add_up(self, entry: Entry, title: str, cancellation: Cancellation) -> None:
        """Add the tensors of a large module up; called in a worker."""
        page = module_page(entry, title=title, totals=totals_of(entry))
        self.app.call_later(self._set_unless, page, cancellation)

    def _set_unless(self, page: Iterable[Block], cancellation: Cancellation) -> None:
        """Show a page unless the cursor has moved on."""
        if not cancellation.is_cancelled():
            self._set(page)

    def _set(self, page: Iterable[Block]) -> None:
        """Show a page from now on."""
        self._page = list(page)
        self._redraw()

    def _redraw(self) -> None:
        """Draw what is shown, at the width of the pane."""
        if self._page and self.is_mounted:
            width = self.scrollable_content_region.width
            self.query_one(Static).update(text_of_blocks(self._page, width))


def _run(work: Callable[[Cancellation], None], cancellation: Cancellation) -> None:
    """Do some work of a worker, until it ends or is cancelled."""
    cancellation.watch_this_thread()
    try:
        work(cancellation)
    except Cancelled:
        return


def _or_error(read: Callable[[], _Result]) -> _Result | Exception:
    """Return what is read, or the error of reading it."""
    try:
        return read()
    except Exception as err:
        return err


def _first_facts(source: CheckpointSource, entry: Entry) -> list[Block]:
    """Return the facts about a checkpoint that are in memory when it is open."""
    format = source.checkpoint.format
    pairs: list[tuple[str, Cell | str]] = [("format", f"{format.name}: {format.title}")]
    if source.checkpoint.iteration is not None:
        pairs.append(("iteration", str(source.checkpoint.iteration)))
    pairs.append(("tensors", f"{entry.n_tensors:,}"))
    pairs.append(("size", bytes_text(entry.n_bytes)))
    return [title_cell(str(source.checkpoint.path)), Facts(pairs), "", dim_cell("reading…")]
