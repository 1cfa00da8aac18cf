"""A screen for work that takes long: it shows how far the work is, and then the result.

The work runs in a worker. Esc cancels it or, when it has ended, closes the screen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen as TextualScreen
from textual.widgets import Footer, Static
from textual.worker import get_current_worker

from ckpt_cli.explore.cancellation import Cancellation, Cancelled
from ckpt_cli.explore.drawn_text import label_of, text_of_blocks
from ckpt_cli.explore.tensor_page import error_facts, progress_text
from ckpt_cli.screen.blocks import Block
from core.progress import OnProgress, Progress

Work = Callable[[Cancellation, OnProgress], Sequence[Block]]
"""Called in a worker; raises ``Cancelled`` when it was asked to end."""
_REFRESH_S = 0.1


class ReportScreen(TextualScreen[None]):
    """A title, and the progress of some work or its result."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "leave", "Cancel/back", key_display="esc"),
    ]

    def __init__(self, verb: str, subject: str, work: Work) -> None:
        """Prepare the screen; the work begins when the screen is shown.

        Args:
            verb: what is done, such as ``validate``.
            subject: what it is done to, not escaped.
            work: the work.
        """
        super().__init__()
        self._verb = verb
        self._subject = subject
        self._work = work
        self._cancellation = Cancellation()
        self._page: Sequence[Block] | None = None
        self._progress: Progress | None = None
        self._shown_at = 0.0

    def compose(self) -> ComposeResult:
        """Return the widgets."""
        room = max(self.app.size.width - len(self._verb) - 3, 20)
        subject = label_of(self._subject, width=room)
        yield Static(Text(f"{self._verb} ", "bold").append_text(subject), id="title")
        with VerticalScroll():
            yield Static(Text("beginning…", "dim"), id="result", markup=False)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin the work."""
        self.query_one(VerticalScroll).focus()
        self.run_worker(self._run, thread=True, exit_on_error=False)

    def on_unmount(self) -> None:
        """Ask the work to end; nobody waits for its result."""
        self._cancellation.cancel()

    def on_resize(self) -> None:
        """Draw the result again at the new width."""
        self.call_after_refresh(self._show)

    def action_leave(self) -> None:
        """Cancel the work and close the screen."""
        self._cancellation.cancel()
        self.dismiss(None)

    def _run(self) -> None:
        """Do the work; called in a worker."""
        worker = get_current_worker()
        self._cancellation.watch_this_thread()
        try:
            page = self._work(self._cancellation, self._report)
        except Cancelled:
            return
        except Exception as err:
            page = [error_facts(err)]
        if not (worker.is_cancelled or self._cancellation.is_cancelled()):
            self.app.call_later(self._finish, page)

    def _report(self, progress: Progress) -> None:
        """Show how far the work is, a few times per second; called from any thread."""
        self._progress = progress
        now = monotonic()
        if now - self._shown_at >= _REFRESH_S:
            self._shown_at = now
            self.app.call_later(self._show)

    def _finish(self, page: Sequence[Block]) -> None:
        """Show the result."""
        self._page = page
        self._show()

    def _show(self) -> None:
        """Draw the result, or how far the work is."""
        if not self.is_mounted:
            return
        result = self.query_one("#result", Static)
        if self._page is not None:
            width = self.query_one(VerticalScroll).scrollable_content_region.width
            result.update(text_of_blocks(self._page, width))
        elif self._progress is not None:
            result.update(Text(f"{progress_text(self._progress)}   (Esc cancels)", "dim"))
