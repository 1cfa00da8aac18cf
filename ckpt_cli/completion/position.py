"""Where in a command line the word to complete is: a command, an option's name, or a value.

typer would parse the words before it, and refuse those that are not valid yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from core.values import dataclass

LAUNCH = "launch"
"""The command whose arguments are again a command line of ``ckpt``."""


@dataclass(frozen=True, slots=True)
class Position:
    """The role of the word to complete, and what the words before it have set.

    Args:
        commands: the commands that the word can be.
        options: the options that the word can name; other options have been given already.
        value_of: the option or argument that the word is a value of.
        start: the beginning of the word that is not part of the value (``--to=``).
        arguments: the arguments of the command so far.
        values: the values of its options so far, by the names of their fields.
    """

    commands: tuple[Any, ...] = ()
    options: tuple[Any, ...] = ()
    value_of: Any = None
    start: str = ""
    arguments: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)


def position_of(root: Any, words: Sequence[str], incomplete: str) -> Position:
    """Return the role of the word behind some words.

    Args:
        root: typer's group of commands.
        words: the words behind the program's name.
        incomplete: the beginning of the word to complete.

    Returns:
        A position at which nothing can be completed, if a command is unknown or the word is one
        argument too many.
    """
    command = root
    arguments: list[str] = []
    values: dict[str, str] = {}
    awaited = None  # the option whose value the next word is
    has_dashes = False  # "--" ends the options
    for word in words:
        is_option = word.startswith("-") and len(word) > 1 and not has_dashes
        if awaited is not None:
            values[awaited.name] = word
            awaited = None
        elif word == "--" and not has_dashes:
            has_dashes = True
        elif is_option:
            name, equals, value = word.partition("=")
            option = _option_of(command, name)
            if option is not None:
                values[option.name] = value
                awaited = option if _takes_value(option) and not equals else None
        elif command is root or command.name == LAUNCH:
            # The options and arguments of the command begin here.
            command = root.commands.get(word)
            arguments, values, has_dashes = [], {}, False
            if command is None:
                return Position()
        else:
            arguments.append(word)

    # The word is the value of an option, as a word of its own or behind "=".
    base = Position(arguments=tuple(arguments), values=values)
    if awaited is not None:
        return replace(base, value_of=awaited)
    if incomplete.startswith("-") and not has_dashes:
        name, equals, _ = incomplete.partition("=")
        option = _option_of(command, name) if equals else None
        if option is not None and _takes_value(option):
            return replace(base, value_of=option, start=f"{name}=")
        options = [p for p in _options(command) if p.multiple or p.name not in values]
        return replace(base, options=tuple(options))
    # It is a command, or an argument.
    if command is root or command.name == LAUNCH:
        commands = [item for item in root.commands.values() if item is not command]
        return replace(base, commands=tuple(commands))
    for number, param in enumerate(p for p in command.params if p.param_type_name == "argument"):
        if number == len(arguments) or param.nargs == -1:
            return replace(base, value_of=param)
    return Position()


def _options(command: Any) -> list[Any]:
    """Return the options of a command, without those that its help page hides."""
    return [p for p in command.params if p.param_type_name == "option" and not p.hidden]


def _option_of(command: Any, name: str) -> Any:
    """Return the option of a command that has a name; None if there is none."""
    # As in ckpt_cli.app, words of a name may be separated by "_".
    plain = name.replace("_", "-")
    for param in command.params:
        if param.param_type_name == "option" and plain in (*param.opts, *param.secondary_opts):
            return param
    return None


def _takes_value(option: Any) -> bool:
    return not (option.is_flag or option.count)
