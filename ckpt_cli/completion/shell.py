"""What a shell asks, and the text that answers it.

The scripts are typer's (``ckpt_cli.completion.install``). They run ``ckpt`` without arguments and
with these variables:

=========================  ==============================================================
 ``_CKPT_COMPLETE``         ``complete_bash``, ``complete_zsh`` or ``complete_fish``
 ``COMP_WORDS``             bash: the words of the line, one per line, as they are typed
 ``COMP_CWORD``             bash: index of the word to complete
 ``_TYPER_COMPLETE_ARGS``   zsh, fish: the line up to the cursor
 ``..._FISH_ACTION``        fish: ``is-args`` asks for an exit code only
=========================  ==============================================================

bash takes one candidate per line; fish too, with a description after a tab. zsh evaluates the
answer, so every text in it is quoted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from core.values import dataclass

VARIABLE = "_CKPT_COMPLETE"
"""Environment variable that makes ``ckpt`` answer a shell instead of running a command."""
SHELLS = ("bash", "zsh", "fish")

_BREAKS = re.compile(r"[=:]+")
"""Characters at which bash divides a word; it then replaces only the part behind the last."""
_BASH_SPECIAL = re.compile(r"([^A-Za-z0-9_@%+=:,./-])")


@dataclass(frozen=True, slots=True)
class Request:
    """The beginning of a command line.

    Args:
        shell: one of ``SHELLS``.
        words: the words before the one to complete, without the program's name and quotes.
        incomplete: the beginning of the word to complete, without quotes.
        kept: the beginning of ``incomplete`` that bash does not replace.
        is_quoted: the word to complete begins with a quote.
        asks_only_for_files: fish only asks whether it should complete file names.
    """

    shell: str
    words: tuple[str, ...]
    incomplete: str
    kept: str = ""
    is_quoted: bool = False
    asks_only_for_files: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A word that can replace the incomplete one, and its description (may be "")."""

    value: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request: text for stdout, and the exit code."""

    text: str
    exit_code: int = 0


def request_from(environ: Mapping[str, str]) -> Request | None:
    """Return what the shell asks; None if the variables are not those of one of its scripts."""
    shell = environ.get(VARIABLE, "").removeprefix("complete_")
    if shell not in SHELLS:
        return None
    if shell == "bash":
        return _request_of_bash(environ)
    line = environ.get("_TYPER_COMPLETE_ARGS", "")
    words = _unquoted(line)[1:]
    incomplete = words.pop() if words and not line.endswith(" ") else ""
    return Request(
        shell,
        tuple(words),
        incomplete,
        asks_only_for_files=environ.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args",
    )


def _request_of_bash(environ: Mapping[str, str]) -> Request | None:
    """Return what bash asks; join the words that it has divided at ``=`` and ``:``."""
    position = environ.get("COMP_CWORD", "")
    pieces = environ.get("COMP_WORDS", "").split("\n")[1:]
    if not position.isdecimal() or not 1 <= int(position) <= len(pieces) + 1:
        return None
    pieces = [*pieces, ""][: int(position)]
    words: list[str] = []
    kept = ""
    is_joined = False
    for piece in pieces:
        is_break = _BREAKS.fullmatch(piece) is not None
        # An empty word behind a "=" is a new one: there is a space between them.
        if words and piece and (is_break or is_joined):
            kept = words[-1] + (piece if is_break else "")
            words[-1] += piece
        else:
            kept = ""
            words.append(piece)
        is_joined = is_break
    *before, last = words
    return Request(
        "bash",
        tuple("".join(_unquoted(word)) for word in before),
        "".join(_unquoted(last)),
        kept="".join(_unquoted(kept)),
        is_quoted=last[len(kept) :][:1] in ("'", '"'),
    )


def _unquoted(line: str) -> list[str]:
    """Split a line into words as a shell does; the last word may lack its closing quote."""
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    try:
        words.extend(lexer)
    except ValueError:
        words.append(lexer.token)
    return words


def reply_to(request: Request, candidates: Sequence[Candidate], *, are_files: bool) -> Reply:
    """Return the answer that makes the shell offer some candidates.

    Args:
        candidates: those that begin with the incomplete word.
        are_files: the shell completes file names instead.
    """
    if request.shell == "bash":
        # Without candidates, bash completes file names by itself.
        return Reply("\n".join(_bash_word(request, item.value) for item in candidates))
    if request.shell == "fish":
        lines = [f"{item.value}\t{item.text}".rstrip("\t") for item in candidates]
        return Reply("\n".join(lines), exit_code=int(are_files))
    if are_files:
        return Reply("_files")
    if not candidates:
        return Reply(":")
    # _describe takes value:description, with a backslash before each colon of the value.
    rows = [
        shlex.quote(item.value.replace("\\", "\\\\").replace(":", "\\:") + f":{item.text}")
        if item.text
        else shlex.quote(item.value.replace("\\", "\\\\").replace(":", "\\:"))
        for item in candidates
    ]
    return Reply(
        f"local -a ckpt_words; ckpt_words=({' '.join(rows)}); _describe -V ckpt ckpt_words"
    )


def _bash_word(request: Request, value: str) -> str:
    """Return the part of a value that bash inserts, with special characters quoted."""
    part = value[len(request.kept) :]
    return part if request.is_quoted else _BASH_SPECIAL.sub(r"\\\1", part)
