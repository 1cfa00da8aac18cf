"""The checkpoints in a directory that is none itself, to choose one of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen as TextualScreen
from textual.widgets import Footer, Label, OptionList, Static
from textual.widgets.option_list import Option

from ckpt_cli.explore.drawn_text import label_of
from ckpt_cli.screen.blocks import bytes_text, date_text, n_text

if TYPE_CHECKING:
    from pathlib import Path

    from core.opening.listing import ListedCheckpoint, Listing


class CheckpointList(TextualScreen["Path | None"]):
    """A list of checkpoints, answered with the path of one, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "Open"),
        Binding("escape,q", "leave", "Quit", key_display="q"),
    ]

    def __init__(self, root: Path, listing: Listing) -> None:
        """Show the checkpoints in a directory.

        Args:
            root: the directory.
            listing: a listing with at least one checkpoint.
        """
        super().__init__()
        self._root = root
        self._listing = listing

    def compose(self) -> ComposeResult:
        """Return the widgets."""
        count = n_text(len(self._listing.checkpoints), "checkpoint")
        title = Text(f"{count}, the newest first, in ").append_text(label_of(str(self._root)))
        yield Static(title, id="title")
        rows = map(self._row, self._listing.checkpoints)
        yield OptionList(*map(Option, rows), markup=False, compact=True)
        if self._listing.rest is not None:
            yield Label(label_of(self._listing.rest))
        yield Footer(show_command_palette=False)

    def action_leave(self) -> None:
        """Answer with nothing."""
        self.dismiss(None)

    @on(OptionList.OptionSelected)
    def _choose(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(self._listing.checkpoints[event.option_index].path)

    def _row(self, item: ListedCheckpoint) -> Text:
        """Return date, size, format and path of a checkpoint."""
        size = "" if item.n_bytes is None else bytes_text(item.n_bytes)
        name = "?" if item.format is None else item.format.name
        facts = f"{date_text(item.modified)}  {size:>8}  {name:<12}  "
        return Text(facts, "dim").append_text(label_of(os.path.relpath(item.path, self._root)))
