"""Search the names of a checkpoint while they are typed, in a worker."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Key
from textual.message import Message
from textual.widgets import Input, Label, OptionList
from textual.widgets.option_list import Option

from ckpt_cli.explore.drawn_text import label_of
from ckpt_cli.screen.blocks import n_text
from ckpt_cli.screen.terminal import escaped
from core.engine.catalog.key_patterns import matcher
from core.errors import UsageError
from core.values import dataclass

MOST_MATCHES = 200
"""Most names that a search lists; the others are counted."""
_WILD = frozenset("*?[")
_PAUSE_S = 0.12
"""Time without a key after which a search begins."""


@dataclass(frozen=True, slots=True)
class SearchMatches:
    """The names that match a search.

    Args:
        names: the first ``MOST_MATCHES``.
        n_matches: number of all.
    """

    names: tuple[str, ...]
    n_matches: int


def search_names(names: Sequence[str], text: str) -> SearchMatches:
    """Return the names with every word of a text, or those that a pattern selects.

    A pattern has ``*``, ``?`` or ``[0-3]``; alone it selects whole names, among other words parts
    of names. Case does not matter in a word without them.

    Raises:
        UsageError: not a valid pattern.
    """
    words = text.split()
    matches = list(names)
    for word in words:
        if _WILD.isdisjoint(word):
            part = word.lower()
            matches = [name for name in matches if part in name.lower()]
        else:
            is_match = matcher(word if len(words) == 1 else f"*{word}*")
            matches = [name for name in matches if is_match(name)]
    return SearchMatches(tuple(matches[:MOST_MATCHES]), len(matches))


class SearchPanel(Vertical):
    """An input line, and the names that match below it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Close search", show=True),
    ]

    class Chosen(Message):
        """The user chose a name; it is to be shown in the tree."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    class Highlighted(Message):
        """The cursor is on a name."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    class Left(Message):
        """The user closed the search."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Sequence[str] = ()
        self._matches: tuple[str, ...] = ()
        self._n_changes = 0

    def compose(self) -> ComposeResult:
        """Return the widgets."""
        yield Input(placeholder="words of a name, or a pattern", compact=True)
        yield Label("", markup=False)
        yield OptionList(markup=False, compact=True)

    def begin(self) -> None:
        """Let the user type; the text of the last search is still there."""
        self.query_one(Input).focus()

    def action_leave(self) -> None:
        """Close the search."""
        self.post_message(self.Left())

    @on(Input.Changed)
    def _search_soon(self, event: Input.Changed) -> None:
        """Search when no more keys come for a moment."""
        event.stop()
        self._n_changes += 1
        search = partial(self._search, event.value, self._n_changes)
        self.set_timer(_PAUSE_S, lambda: self.run_worker(search, thread=True, exit_on_error=False))

    def _search(self, text: str, number: int) -> None:
        """Search, unless the text was changed again; called in a worker."""
        if number != self._n_changes:
            return
        result: SearchMatches | UsageError
        try:
            result = search_names(self.names, text) if text else SearchMatches((), 0)
        except UsageError as err:
            result = err
        self.app.call_later(self._show_result, result, text, number)

    def _show_result(self, result: SearchMatches | UsageError, text: str, number: int) -> None:
        """Show the result of a search, unless the text was changed since."""
        if number != self._n_changes or not self.is_mounted:
            return
        if isinstance(result, UsageError):
            self._matches = ()
            self.query_one(OptionList).clear_options()
            self.query_one(Label).update(Text(escaped(result.message), "red"))
        else:
            self._show(result, text)

    def _show(self, matches: SearchMatches, text: str) -> None:
        """List the matches."""
        width = max(self.size.width - 4, 20)
        self._matches = matches.names
        options = self.query_one(OptionList)
        options.set_options([Option(label_of(name, width=width)) for name in matches.names])
        n_names = n_text(len(self.names), "name")
        if matches.names:
            options.highlighted = 0
        count = f"{matches.n_matches:,} of {n_names}" if text else n_names
        if matches.n_matches > MOST_MATCHES:
            count = f"first {MOST_MATCHES} of {matches.n_matches:,}"
        self.query_one(Label).update(Text(count, "dim"))

    def on_key(self, event: Key) -> None:
        """Let the arrow keys move in the list while the input has the focus."""
        options = self.query_one(OptionList)
        moves = {"down": options.action_cursor_down, "up": options.action_cursor_up}
        if event.key in moves and self.query_one(Input).has_focus and self._matches:
            moves[event.key]()
            event.stop()

    @on(Input.Submitted)
    def _choose(self, event: Input.Submitted) -> None:
        """Choose the name at the cursor, else the first."""
        event.stop()
        if self._matches:
            index = self.query_one(OptionList).highlighted or 0
            self.post_message(self.Chosen(self._matches[index]))

    @on(OptionList.OptionSelected)
    def _choose_option(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.post_message(self.Chosen(self._matches[event.option_index]))

    @on(OptionList.OptionHighlighted)
    def _highlight_option(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()
        if event.option_index < len(self._matches):
            self.post_message(self.Highlighted(self._matches[event.option_index]))
