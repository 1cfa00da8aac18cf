"""The keys of the explorer, as ``?`` shows them."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

_KEYS = (
    ("↑ ↓  ← →", "move; close or open a module"),
    ("/", "search: words of a name in any order, or a pattern"),
    ("", "such as layers.[0-3].*qkv*; Enter shows the match"),
    ("d", "compare with a second checkpoint"),
    ("v", "validate names, sizes and metadata"),
    ("s", "measure a large tensor"),
    ("w", "use the full width for the right side, or show the names again"),
    ("Tab", "switch sides; the arrow keys then scroll that side"),
    ("Esc", "cancel what is being read, or go back"),
    ("q, Ctrl-C", "leave"),
)


class KeyHelp(ModalScreen[None]):
    """The keys and what they do; any of the usual keys closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q,question_mark", "leave", "Close"),
    ]

    def compose(self) -> ComposeResult:
        """Return the widgets."""
        lines = [Text.assemble((f"{key:<11}", "bold"), text) for key, text in _KEYS]
        with Vertical():
            yield Static(Text("\n").join([*lines, Text(), Text("Esc closes this", "dim")]))

    def action_leave(self) -> None:
        """Close the help."""
        self.dismiss(None)
