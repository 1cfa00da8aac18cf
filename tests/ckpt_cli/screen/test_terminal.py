from __future__ import annotations

import io

from ckpt_cli.screen.terminal import Screen, columns_of, escaped, padded, screen_of, shortened


class Terminal(io.StringIO):
    """A stream that says it is a terminal with UTF-8."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Pipe(Terminal):
    def isatty(self) -> bool:
        return False


def test_control_characters_and_direction_marks_are_spelled_out() -> None:
    assert escaped("a\x1b[31mb\r\n\x07") == "a\\x1b[31mb\\r\\n\\x07"
    assert escaped("evil\u202etxt.exe") == "evil\\u202etxt.exe"
    assert escaped("\udc80") == "\\udc80"
    assert escaped("\x9b31m") == "\\x9b31m"


def test_printable_text_and_rich_markup_are_left_as_they_are() -> None:
    assert (
        escaped("[bold]decoder.layers.0[/bold] größe 層")
        == "[bold]decoder.layers.0[/bold] größe 層"
    )


def test_colors_are_only_for_terminals_unless_forced() -> None:
    assert screen_of(Terminal(), {"TERM": "xterm"}).has_color
    assert not screen_of(Pipe(), {"TERM": "xterm"}).has_color
    assert not screen_of(Terminal(), {"TERM": "dumb"}).has_color
    assert not screen_of(Terminal(), {"TERM": "xterm", "NO_COLOR": "1"}).has_color
    assert screen_of(Pipe(), {"FORCE_COLOR": "1"}).has_color
    assert not screen_of(Pipe(), {"FORCE_COLOR": "1", "NO_COLOR": "1"}).has_color


def test_a_pipe_has_no_width_so_that_nothing_is_shortened() -> None:
    assert screen_of(Pipe(), {}).width is None
    assert screen_of(Terminal(), {}).width is not None


def test_styles_do_nothing_without_colors() -> None:
    assert Screen().styled("x", "bold", "red") == "x"
    assert Screen(has_color=True).styled("x", "bold", "red") == "\x1b[1;31mx\x1b[0m"


def test_glyphs_become_ascii_where_the_encoding_has_no_others() -> None:
    text = Screen(has_unicode=False).plain("├─ ✓ 4 × 2 … →")
    assert text.isascii()
    assert Screen().plain("├─ ✓") == "├─ ✓"


def test_wide_and_combining_characters_take_their_columns() -> None:
    assert columns_of("層") == 2
    assert columns_of("e\u0301") == 1
    assert padded("層", 4) == "層  "
    assert padded("ab", 4, right=True) == "  ab"


def test_long_text_loses_its_middle_and_keeps_its_lead() -> None:
    assert shortened("decoder.weight", 14) == "decoder.weight"
    assert shortened("decoder.weight", 9) == "deco…ight"
    assert shortened("├─ decoder.weight", 10, lead=3) == "├─ dec…ght"
    assert shortened("decoder.weight", 9, ellipsis="...") == "dec...ght"
    assert all(columns_of(shortened("層層a層b層", width)) <= width for width in range(3, 12))
