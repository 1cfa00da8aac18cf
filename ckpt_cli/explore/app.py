"""The screen of ``ckpt explore``.

::

    ┌ names, or a search ┬ the entry at the cursor ┐
    │ ▼ decoder.layers   │ decoder.layers.0.mlp…   │
    │   ▶ 0  1.2 GiB     │ shape [384, 64]         │
    │ …                  │ …                       │
    └ / Search  d Compare  v Validate … q Quit ────┘

Whatever reads a file runs in a worker: opening, the right side (``detail_pane``), comparing and
validating (``report_screen``). The names are in memory.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Footer, Static, Tree

from ckpt_cli.explore.cancellation import Cancellation, Cancelled
from ckpt_cli.explore.checkpoint_list import CheckpointList
from ckpt_cli.explore.detail_pane import DetailPane
from ckpt_cli.explore.drawn_text import label_of
from ckpt_cli.explore.key_help import KeyHelp
from ckpt_cli.explore.name_tree import NameTree
from ckpt_cli.explore.names import Entry
from ckpt_cli.explore.path_prompt import PathPrompt
from ckpt_cli.explore.report_screen import ReportScreen
from ckpt_cli.explore.search import SearchPanel
from ckpt_cli.explore.source import CheckpointSource, SourceOptions, open_source
from ckpt_cli.screen.blocks import Block, bytes_text, n_text
from core.errors import CheckpointingException, UnsupportedError
from core.files.remote_path import location_of
from core.files.requests.ending import allow_requests, end_requests
from core.files.store import override
from core.opening.iterations import CHECKPOINTS_BELOW
from core.pickle.noted import gc_paused
from core.progress import OnProgress

if TYPE_CHECKING:
    from pathlib import Path

    from core.opening.listing import Listing

_OF_FIRST_SCREEN = frozenset(
    {
        "search",
        "compare",
        "validate",
        "statistics",
        "stop_reading",
        "widen",
        "app.focus_next",
        "help",
    }
)
_DIFF_ROWS = 40
"""Most lines of each list of a comparison."""


class ExplorerApp(App[int]):
    """The explorer of one checkpoint.

    Attributes:
        failure: the error that ended the program before anything could be shown.
        signal_number: the signal that asked the program to end.
    """

    CSS_PATH = "explorer.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "Search", key_display="/"),
        Binding("d", "compare", "Compare"),
        Binding("v", "validate", "Validate"),
        Binding("s", "statistics", "Statistics"),
        Binding("w", "widen", "Wide"),
        Binding("tab", "app.focus_next", "Pane", key_display="tab"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
        Binding("escape", "stop_reading", "Stop reading", show=False),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
    ]

    def __init__(self, options: SourceOptions) -> None:
        super().__init__()
        self.failure: BaseException | None = None
        self.signal_number: int | None = None
        self.source: CheckpointSource | None = None
        self._options = options
        self._opening = Cancellation()
        self._n_opened = 0
        self._other = ""

    def compose(self) -> ComposeResult:
        """Return the widgets."""
        yield Static("", id="title", markup=False)
        with Horizontal():
            with Vertical(id="names"):
                yield NameTree("")
                yield SearchPanel()
            yield DetailPane()
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to open the checkpoint."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._end, number)
        self.query_one(SearchPanel).display = False
        self.query_one(NameTree).focus()
        self._show_opening()
        self.set_interval(0.2, self._show_opening, name="opening")
        self.run_worker(self._open, thread=True, exit_on_error=False)

    def on_unmount(self) -> None:
        """Let whatever is being read end soon, and close the files."""
        self._opening.cancel()
        end_requests()
        try:
            if self.source is not None:
                self.source.close()
        finally:
            allow_requests()

    @override
    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        # The keys of the first screen do nothing on the others, and are not shown there.
        is_first = len(self.screen_stack) == 1
        return is_first or action not in _OF_FIRST_SCREEN

    async def action_quit(self) -> None:
        """Leave."""
        self._opening.cancel()
        self.exit(0)

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(KeyHelp())

    def action_search(self) -> None:
        """Show the search in place of the tree."""
        if self.source is not None:
            self.query_one(NameTree).display = False
            panel = self.query_one(SearchPanel)
            panel.display = True
            panel.begin()

    def action_statistics(self) -> None:
        """Measure the tensor at the cursor."""
        self.query_one(DetailPane).read_statistics()

    def action_stop_reading(self) -> None:
        """Give up what is being read for the right side."""
        self.query_one(DetailPane).stop_reading()

    def action_widen(self) -> None:
        """Give the right side all columns, or show the names again."""
        names = self.query_one("#names")
        names.display = not names.display
        self.query_one(NameTree if names.display else DetailPane).focus()

    def action_compare(self) -> None:
        """Ask for a second checkpoint, and compare the entry at the cursor with it."""
        if self.source is None:
            return
        entry = self._entry_to_compare()
        subject = self._subject_of(entry)
        begin = partial(self._compare, self.source, entry, subject)
        self.push_screen(PathPrompt(subject, self._other), begin)

    def action_validate(self) -> None:
        """Check the checkpoint."""
        source = self.source
        if source is None:
            return

        def work(cancellation: Cancellation, progress: OnProgress) -> list[Block]:
            from ckpt_cli.findings.text import text_lines
            from ckpt_cli.findings.verdict import Verdict
            from core.verbs.validate.accepted import Acceptance

            validation = source.validate(cancellation, progress)
            verdict = Verdict(validation, Acceptance().judge(validation.findings))
            return [partial(text_lines, verdicts=[verdict], limit=None, is_quiet=False)]

        self.push_screen(ReportScreen("Validate", str(source.checkpoint.path), work))

    @on(Tree.NodeHighlighted)
    def _show_entry(self, event: Tree.NodeHighlighted[Entry]) -> None:
        """Show the entry at the cursor."""
        if self.source is not None and event.node.data is not None:
            is_root = event.node is event.node.tree.root
            self.query_one(DetailPane).show(self.source, event.node.data, is_root=is_root)

    @on(SearchPanel.Highlighted)
    def _show_match(self, event: SearchPanel.Highlighted) -> None:
        """Show the name at the cursor of the search."""
        source = self.source
        if source is None:
            return
        branch_entry = self._entry_of(source, event.name)
        self.query_one(DetailPane).show(source, branch_entry, is_root=False)

    @on(SearchPanel.Chosen)
    def _reveal_match(self, event: SearchPanel.Chosen) -> None:
        """Show a name in the tree."""
        if self.source is not None:
            entry = self._entry_of(self.source, event.name)
            self._close_search()
            self.query_one(NameTree).reveal(entry.path, entry.kind)

    @on(SearchPanel.Left)
    def _close_search(self) -> None:
        """Show the tree again."""
        self.query_one(SearchPanel).display = False
        tree = self.query_one(NameTree)
        tree.display = True
        tree.focus()

    def _entry_of(self, source: CheckpointSource, key: str) -> Entry:
        """Return the entry of a key, wherever it is in the tree."""
        is_object = key not in source.view.tensors
        path = source.path_of(key)
        branch = source.objects if is_object else source.tensors
        for name in path:
            branch = branch.below[name]
        return Entry("object" if is_object else "tensor", key, path, (branch,), is_object)

    def _entry_to_compare(self) -> Entry | None:
        """Return the entry at the cursor; None for the checkpoint, and for objects."""
        node = self.query_one(NameTree).cursor_node
        entry = None if node is None else node.data
        if entry is None or entry.is_object or not entry.path:
            return None
        return entry

    def _subject_of(self, entry: Entry | None) -> str:
        """Return the name of what is compared."""
        return "everything" if entry is None else ".".join(entry.path)

    def _compare(
        self, source: CheckpointSource, entry: Entry | None, subject: str, other: str | None
    ) -> None:
        """Compare an entry, if a path was given."""
        if other is None:
            return
        self._other = other
        path = location_of(other).expanduser()

        def work(cancellation: Cancellation, progress: OnProgress) -> list[Block]:
            from ckpt_cli.pages.diff_page import diff_blocks

            result = source.compare(entry, path, cancellation, progress)
            # Equal checkpoints, and a single tensor, need no map.
            has_map = not result.same and len(result.tensors) > 1
            return list(diff_blocks(result, limit=_DIFF_ROWS, is_flat=False, has_map=has_map))

        self.push_screen(ReportScreen("Compare", f"{subject} with {other}", work))

    def _open(self) -> None:
        """Open the checkpoint; called in a worker."""

        def count(n_files: int) -> None:
            self._opening.check()
            self._n_opened += n_files

        self._opening.watch_this_thread()
        try:
            with gc_paused():
                source = open_source(self._options, count)
                # It stays until the end: collections need not pass over 10⁵ tensors each time.
                gc.freeze()
        except Cancelled:
            return
        except BaseException as err:
            listing = self._list_checkpoints(err)
            if listing is None:
                self.call_later(self._fail, err)
            else:
                self.call_later(self._ask_for_checkpoint, listing)
            return
        if self._opening.is_cancelled():
            source.close()
            return
        self.call_later(self._show_source, source)

    def _list_checkpoints(self, err: BaseException) -> Listing | None:
        """Return the checkpoints in the directory, if it is only none itself; else None."""
        is_folder = isinstance(err, UnsupportedError) and err.rule == CHECKPOINTS_BELOW
        if not is_folder or self._options.iteration is not None:
            return None
        from core.opening.listing import list_checkpoints

        with suppress(CheckpointingException):
            listing = list_checkpoints(self._options.path)
            return listing if listing.checkpoints else None
        return None

    def _ask_for_checkpoint(self, listing: Listing) -> None:
        """Let the user choose a checkpoint, and open it."""

        def begin(path: Path | None) -> None:
            if path is None:
                self.exit(0)
                return
            self._options = replace(self._options, path=path)
            self.run_worker(self._open, thread=True, exit_on_error=False)

        self.push_screen(CheckpointList(self._options.path, listing), begin)

    def _show_opening(self) -> None:
        """Show how many files were opened, until all are."""
        if self.source is None and self.failure is None:
            text = Text("opening ").append_text(label_of(str(self._options.path), width=60))
            if self._n_opened:
                text.append(f"  {n_text(self._n_opened, 'file')}", "dim")
            self.query_one("#title", Static).update(text)

    def _show_source(self, source: CheckpointSource) -> None:
        """Show the names of the checkpoint."""
        self.source = source
        checkpoint = source.checkpoint
        root = Entry("module", "", (), (source.tensors,))
        # The line at the top: what it is, in a few words.
        iteration = "" if checkpoint.iteration is None else f" · iteration {checkpoint.iteration}"
        figures = f"{n_text(root.n_tensors, 'tensor')} · {bytes_text(root.n_bytes)}"
        facts = f"  {checkpoint.format.name}{iteration} · {figures}"
        mark = "✗ damaged " if checkpoint.problems else ""
        room = max(self.size.width - len(mark) - len(facts) - 2, 16)
        name = label_of(str(checkpoint.path), width=room)
        title = Text.assemble((mark, "bold red"), name, (facts, "dim"), no_wrap=True)
        self.query_one("#title", Static).update(title)
        # The names.
        n_objects = len(source.view.objects)
        objects = Entry("module", f"objects ({n_objects:,})", (), (source.objects,), True)
        label = label_of(checkpoint.path.name or str(checkpoint.path))
        self.query_one(NameTree).show_names(label, root, objects if n_objects else None)
        self.query_one(SearchPanel).names = (*source.view.tensors, *source.view.objects)
        self.query_one(DetailPane).show(source, root, is_root=True)

    def _fail(self, err: BaseException) -> None:
        """Leave, because nothing can be shown; the command prints the error."""
        self.failure = err
        self.exit(1)

    def _end(self, number: int) -> None:
        """Leave, because a signal asks for it."""
        self.signal_number = number
        self._opening.cancel()
        self.exit(128 + number)
