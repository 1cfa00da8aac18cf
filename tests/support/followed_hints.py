"""Takes the hint of an error as a user would: as the command lines that it names.

Words that only a person can fill in (``--config FILE``) and advice that is no command ("copy the
file again") lead nowhere here.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from typer.core import TyperArgument
from typer.main import get_command

from ckpt_cli.app import app
from ckpt_cli.options.typer_command import Group

_VALUES = {"on-replica-mismatch": "first"}
_WORD = r"(?:'(?:[^']|'\"'\"')*'|\w+\.(?= --)|[\w.*/=:+-]*[\w*/])"
_OPTION = rf"--([a-z][a-z0-9-]*)(:? {_WORD})?"
_SERIES = re.compile(rf"(?<![\w'-]){_OPTION}(?:,? (?:and )?{_OPTION})*")
_MORE_VALUES = re.compile(r"(?:,| or|, or) (\w+)(?=[,;.]| or|$)")
_COMMAND = re.compile(r"\bckpt (convert|reshard) SRC DST")
_OMITTED = re.compile(rf"\b(?:drop|omit|without) {_OPTION}")
_SIZES = re.compile(r"\b([TPE])P sizes that work: ([\d, ]*\d)")
_POINT_AT = re.compile(r"(?:point at|pass) (?:one of (?:them|the iterations): )?('?/[^,;]+)")
_LEAVING_OUT = ("no-optim", "drop-missing", "exclude")


@dataclass(frozen=True)
class CommandEnd:
    """How a command line ended.

    Args:
        code: the exit status.
        err: what it wrote to stderr.
    """

    code: int
    err: str

    @property
    def problem(self) -> str:
        """The error and its place, without notes before it."""
        return self.err[self.err.find("error: ") :].partition("\n  hint: ")[0]

    @property
    def hint(self) -> str:
        return self.err.partition("\n  hint: ")[2].partition("\n  more: ")[0].strip()

    @property
    def key(self) -> str | None:
        """The tensor or object that the error names."""
        place = re.search(r"\n  at: (?:.*, )?tensor (.*?)(?:, rank .*|, bytes .*)?$", self.problem)
        return None if place is None else place[1]


@cache
def read_options(verb: str) -> dict[str, Any]:
    """Return the options of a command: name without dashes → typer's parameter."""
    group = get_command(app)
    assert isinstance(group, Group)
    return {
        option.lstrip("-"): param
        for param in group.commands[verb].params
        if not isinstance(param, TyperArgument)
        for option in (*param.opts, *param.secondary_opts)
    }


def read_rules(hint: str | None) -> str:
    """Return the rules file in a hint, from its first table to the end: "" if there is none.

    Raises:
        tomllib.TOMLDecodeError: who copies it gets a file that is not TOML.
    """
    table = re.search(r"\[\[\w+\]\]\s*\n.*|\[\[\w+\]\] \w+ = .*", hint or "", re.DOTALL)
    text = "" if table is None else table[0]
    tomllib.loads(text)
    return text


Run = Callable[[Sequence[str]], CommandEnd]


def follow_hints(
    line: Sequence[str], run: Run, *, most: int = 4
) -> Iterator[tuple[list[str], CommandEnd]]:
    """Yield the command lines that the hints of a refused one lead to, and how they end.

    Args:
        line: ``VERB SRC DST [--option …]``.
        most: length of the longest chain of hints.

    Raises:
        AssertionError: a hint leads back to an error that was seen, or names what is done already.
    """
    yield from _follow([*line], run(line), run, most=most, problems=())


def _follow(
    line: list[str],
    ended: CommandEnd,
    run: Run,
    *,
    most: int,
    problems: tuple[str, ...],
) -> Iterator[tuple[list[str], CommandEnd]]:
    assert ended.code not in (1, 70), (line, ended.err)
    assert ended.problem not in problems, f"{shlex.join(line)}: again {ended.err}"
    read_rules(ended.hint)
    yield line, ended
    if not ended.code or not most:
        return
    for other in list_advised_lines(line, ended):
        assert other != line, f"{shlex.join(line)}: done already: {ended.err}"
        yield from _follow(
            other,
            run(other),
            run,
            most=most - 1,
            problems=(*problems, ended.problem),
        )


def list_advised_lines(line: Sequence[str], ended: CommandEnd) -> list[list[str]]:
    """Return the command lines that the hint of an error names, each once."""
    options = read_options(line[0])
    hint = ended.hint
    lines: list[list[str]] = []
    if command := _COMMAND.search(hint):
        # The advised command takes the place of the line; what was left out stays out.
        options = read_options(command[1])
        advised = [
            line[at : at + 2 - options[name].is_flag]
            for at, word in enumerate(line)
            if (name := word.removeprefix("--")) in _LEAVING_OUT and name != word
        ]
        line = [command[1], *line[1:3], *(word for words in advised for word in words)]
    lines += [
        _without(line, match[1], options)
        for match in _OMITTED.finditer(hint)
        if f"--{match[1]}" in line
    ]
    hint = _OMITTED.sub("", hint)
    for match in _SERIES.finditer(hint):
        words: list[tuple[str, str | None]] = []
        for option, value in re.findall(_OPTION, match[0]):
            if option not in options:
                break  # another program's
            words.append((option, _value_of(option, value.lstrip(": "), ended, options)))
        if not words or any(value == "" for _, value in words):
            continue
        lines.append(_with(line, words, options))
        last, _ = words[-1]
        if last == "to":
            at = match.end()
            while more := _MORE_VALUES.match(hint, at):
                lines.append(_with(line, [*words[:-1], (last, more[1])], options))
                at = more.end()
    for axis, sizes in _SIZES.findall(hint):
        lines += [
            _with(line, [(f"{axis.lower()}p-new", size)], options) for size in sizes.split(", ")
        ]
    for match in _POINT_AT.finditer(hint):
        lines.append([line[0], *shlex.split(match[1])[:1], *line[2:]])
    return [other for number, other in enumerate(lines) if other not in lines[:number]]


def _value_of(option: str, word: str, ended: CommandEnd, options: Mapping[str, Any]) -> str | None:
    """Return the value of an advised option: None for a flag, "" if a person has to choose it."""
    if options[option].is_flag:
        return None
    if option == "config":
        return ""  # a file of the user's
    word = "".join(shlex.split(word)) if word else ""
    if option == "exclude" and (not word or word in ("KEY", "or", "and")):
        return ended.key or ""
    is_open = re.fullmatch("[A-Z]*|or|and", word) is not None
    return _VALUES.get(option, "") if is_open else word


def _with(
    line: Sequence[str], words: Sequence[tuple[str, str | None]], options: Mapping[str, Any]
) -> list[str]:
    """Return a line with more options, in place of those that cannot be given twice."""
    result = [*line]
    for option, value in words:
        if not options[option].multiple:
            result = _without(result, option, options)
        result += [f"--{option}"] if value is None else [f"--{option}", value]
    # What was there already stays where it was.
    return [*line] if sorted(result) == sorted(line) else result


def _without(line: Sequence[str], option: str, options: Mapping[str, Any]) -> list[str]:
    if f"--{option}" not in line:
        return [*line]
    at = line.index(f"--{option}")
    return [*line[:at], *line[at + 2 - options[option].is_flag :]]
