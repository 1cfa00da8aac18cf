"""Ask for the path of the checkpoint to compare with."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Label

from ckpt_cli.explore.drawn_text import label_of


class PathPrompt(ModalScreen[str | None]):
    """A question for a path, answered with the text, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Cancel")]

    def __init__(self, subject: str, answer: str) -> None:
        """Ask about a subject.

        Args:
            subject: what is compared, not escaped.
            answer: the answer to begin with.
        """
        super().__init__()
        self._subject = subject
        self._answer = answer

    def compose(self) -> ComposeResult:
        """Return the widgets."""
        with Vertical():
            yield Label(Text("Compare ").append_text(label_of(self._subject, width=50)))
            yield Label("with the checkpoint at this path or URL:", markup=False)
            yield Input(self._answer, placeholder="run/iter_0020000")
            yield Label(Text("Enter compares, Esc cancels", "dim"))

    def action_leave(self) -> None:
        """Answer with nothing."""
        self.dismiss(None)

    @on(Input.Submitted)
    def _answer_with(self, event: Input.Submitted) -> None:
        event.stop()
        self.dismiss(event.value.strip() or None)
