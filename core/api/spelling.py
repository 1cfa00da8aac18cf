"""Spell options and commands in messages as Python does.

Messages of the engine name options as the command line does, as does ``--json``. At the Python door
(``naming_arguments`` of ``core.api.arguments``) this is the one place that spells them anew::

    use --force                           use force=True
    drop the optimizer with --no-optim    drop the optimizer with optim=False
    --rename: 'a(' is not a regular …     rename: 'a(' is not a regular …
    ckpt convert SRC DST --dtype bf16     ckpt.convert(SRC, DST, dtype='bf16')

What neither ``convert`` nor the called verb takes is left as it is: an option of the command line
alone, or of Megatron's script; so is a command that Python has no call for (``ckpt manifest``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from inspect import Parameter
from typing import Any, TypeVar

from core.verbs.convert.job_options import CHOICES

Value = TypeVar("Value")
Verbs = Mapping[str, Mapping[str, Parameter]]
"""Name of a verb → its arguments."""

_WORD = r"'(?:[^']|'\"'\"')*'|[\w.*/=:+\\^$|,@%-]*[\w*/=.@%]"
_OPTION = re.compile(rf"(?<![\w-])--(?P<flag>[a-z][a-z0-9-]*)(?:[ =](?P<word>{_WORD}))?")
_QUOTED = re.compile(r"(?<!\w)'[^'\n]*'(?!\w)")
"""A name, a path or a value: what is in it is not an option or a command."""
_LONGEST = 4_000
"""Texts of more characters are lists of names, and stay as they are."""
_LISTING = re.compile(r"\bckpt inspect ([A-Z]+) --flat")
_COMMAND = re.compile(r"\bckpt (?P<verb>[a-z]+)\b")
_ARGUMENT = re.compile(rf" (?:{_OPTION.pattern}|(?:-o )?(?P<path>{_WORD}))(?P<is_last>[,;:)]?)")
_GIVEN = re.compile(r"(?:\b(?:add|pass|use|using|with) |\()$")
"""Text before an option that is to be given, with a value that the user knows."""
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*(\.[a-z]+)?|\d+")
_PROSE = frozenset(
    "accepts afterwards and applies cannot compares contradict describes drop has if is keeps "
    "leave lists names or requires says sets shows sum takes that the to when with would".split()
)
"""Words after an option or a command in messages that are not its value."""
_TEXTS = frozenset(
    "capabilities dropped dropped_reasons findings hint left_out message notes reason unchecked "
    "warnings why".split()
)
"""Fields of results that are messages, or contain some."""


def spell(text: str, verbs: Verbs, *, verb: str = "convert") -> str:
    """Return a message with its options and commands as Python spells them.

    Args:
        verbs: the verbs, ``convert`` among them.
        verb: the verb that the user called.
    """
    if len(text) > _LONGEST:
        return text
    text = _LISTING.sub(r"list(ckpt.open(\1))", text)
    start, parts = 0, []
    arguments = {**verbs["convert"], **verbs[verb]}
    quoted = [match.span() for match in _QUOTED.finditer(text)]
    for command in _COMMAND.finditer(text):
        if command.start() < start or _is_in(command.start(), quoted):
            continue
        call, stop = _spell_command(command, verbs.get(command["verb"], {}))
        parts += [_spell_options(text[start : command.start()], arguments), call]
        start = stop
    return "".join([*parts, _spell_options(text[start:], arguments)])


def spell_result(result: Value, verbs: Verbs, *, verb: str) -> Value:
    """Return the result of a verb with its messages as ``spell`` returns them."""

    def reword(value: Any) -> Any:
        if isinstance(value, str):
            return spell(value, verbs, verb=verb)
        if isinstance(value, tuple):
            return tuple(map(reword, value))
        if not is_dataclass(value) or isinstance(value, type):
            return value
        names = [field.name for field in fields(value) if field.name in _TEXTS]
        return replace(value, **{name: reword(getattr(value, name)) for name in names})

    return reword(result)  # type: ignore[no-any-return]


def _is_in(position: int, spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether a position is inside one of a few spans."""
    return any(start < position < stop for start, stop in spans)


def _spell_options(text: str, arguments: Mapping[str, Parameter]) -> str:
    """Return a text with its options as arguments."""

    quoted = [match.span() for match in _QUOTED.finditer(text)]

    def reword(option: re.Match[str]) -> str:
        if _is_in(option.start(), quoted):
            return option[0]
        argument, rest = _spell_option(option, arguments)
        return option[0] if argument is None else f"{argument}{rest}"

    return _OPTION.sub(reword, text)


def _spell_option(
    option: re.Match[str], arguments: Mapping[str, Parameter]
) -> tuple[str | None, str]:
    """Return an option as an argument, None if it is not one, and the text that is not its value.

    Args:
        option: a match of ``_OPTION``.
    """
    name, word = option["flag"].replace("-", "_"), option["word"]
    rest = "" if word is None else f" {word}"
    if name.startswith("no_") and name not in arguments:
        name = name.removeprefix("no_")
        return (f"{name}=False" if name in arguments else None), rest
    if name not in arguments:
        return None, rest
    if "bool" in str(arguments[name].annotation):
        return f"{name}=True", rest
    if word is None or (word in _PROSE and word not in CHOICES.get(name, ())):
        is_given = _GIVEN.search(option.string, 0, option.start()) is not None
        return (f"{name}=…" if is_given else name), rest
    return f"{name}={_spell_word(word)}", ""


def _spell_command(command: re.Match[str], arguments: Mapping[str, Parameter]) -> tuple[str, int]:
    """Return a command as a call, or unchanged if Python has no such call, and where it ends."""
    text, stop = command.string, command.end()
    paths, options = [], []
    is_call = bool(arguments)
    while argument := _ARGUMENT.match(text, stop):
        stop = argument.start("is_last")
        if argument["path"] in _PROSE or argument["path"] == "ckpt":
            stop = argument.start()
            break
        if argument["path"]:
            paths.append(_spell_word(argument["path"]))
        else:
            option, rest = _spell_option(argument, arguments)
            stop -= len(rest) if option is not None else 0
            is_call &= option is not None
            is_bare = option is not None and "=" not in option
            options.append(f"{option}=…" if is_bare else option or "")
        if argument["is_last"] or stop < argument.start("is_last"):
            break
    if not is_call:
        return text[command.start() : stop], stop
    names = [name for name, item in arguments.items() if item.kind != Parameter.KEYWORD_ONLY]
    if len(paths) > len(names):
        if command["verb"] != "merge":
            return text[command.start() : stop], stop
        # Several sources, and the destination.
        paths = [f"[{', '.join(paths[:-1])}]", paths[-1]]
    if not paths:
        paths = [name.upper() for name in names]
    paths += [
        name.upper() for name in names[len(paths) :] if arguments[name].default is Parameter.empty
    ]
    return f"ckpt.{command['verb']}({', '.join([*paths, *options])})", stop


def _spell_word(word: str) -> str:
    """Return a value of the command line as a literal; placeholders and numbers stay."""
    return word if _PLACEHOLDER.fullmatch(word) else repr("".join(shlex.split(word)))
