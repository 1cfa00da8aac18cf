"""Answer a shell that completes a command line.

Nothing but the answer is ever written, and the exit code is 0: an error would appear in the middle
of the line that the user types. (To fish, 1 says that it should complete file names.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpt_cli.completion.deadline import remaining_s, run_within
from ckpt_cli.completion.memory import cache_dir, recalled
from ckpt_cli.completion.position import Position, position_of
from ckpt_cli.completion.shell import Candidate, Reply, Request, reply_to, request_from
from ckpt_cli.options.shared.values import OneOf
from core.formats.registry import TARGETS
from core.verbs.convert.job_options import AUTO

WORDS = {
    "to": TARGETS,
    "names": ("hf", "megatron"),
    "dequantize": ("bf16", "fp16", "fp32"),
    "dtype": ("bf16", "fp16", "fp32", "fp64"),
    "quantize": ("block", "tensor", "none"),
    "unstack_layers": (AUTO,),
    "nproc_per_node": ("auto", "cpu", "gpu"),
}
"""Words of options whose other values are free, by field; ``OneOf`` knows those of the others."""
KEYS = frozenset({"keys", "include", "exclude", "unstack_layers", "tie", "untie"})
"""Fields whose values are keys of the source, or patterns of them."""
PAIRS = frozenset({"tie", "untie", "dtype", "quantize"})
"""Fields whose values may be two texts with "=" between them."""
ITERATIONS = {"iteration": 0, "iteration_b": 1}
"""Fields whose values are iterations → which argument is the training root."""


def answer(root: Any, environ: Mapping[str, str]) -> Reply:
    """Return the answer to the question in the environment.

    Args:
        root: typer's group of commands.
        environ: variables of the shell's script (``ckpt_cli.completion.shell``).
    """
    request = request_from(environ)
    if request is None:
        return Reply("")
    try:
        position = position_of(root, request.words, request.incomplete)
        are_files = position.value_of is not None and _is_path(position.value_of)
        candidates: list[Candidate] = []
        if not are_files and not request.asks_only_for_files:
            candidates = _candidates(position, request, environ)
    except Exception:  # whatever is wrong, the user is typing
        return reply_to(request, [], are_files=False)
    return reply_to(request, candidates, are_files=are_files)


def _candidates(
    position: Position, request: Request, environ: Mapping[str, str]
) -> list[Candidate]:
    """Return the candidates that begin with the incomplete word."""
    if position.value_of is None:
        items = [Candidate(command.name, command.short_help) for command in position.commands]
        items += _option_names(position, request.incomplete)
        return [item for item in items if item.value.startswith(request.incomplete)]
    # The text before the last "=" of a pair stays as it is, like that before the value.
    field = position.value_of.name
    typed = request.incomplete[len(position.start) :]
    first = typed[: typed.rfind("=") + 1] if field in PAIRS else ""
    typed = typed[len(first) :]
    values = [Candidate(word) for word in _words(position.value_of)]
    if field in ITERATIONS or (field in KEYS and (field != "untie" or first)):
        values += _from_source(position, typed, environ)
    return [
        Candidate(f"{position.start}{first}{item.value}", item.text)
        for item in values
        if item.value.startswith(typed)
    ]


def _option_names(position: Position, incomplete: str) -> list[Candidate]:
    """Return the names of the options: those on the help page, or aliases if only these match."""
    if not incomplete.startswith("-"):
        return []
    shown, aliases = [Candidate("--help", "Show this message and exit.")], []
    for option in position.options:
        long_names = [name for name in option.opts if name.startswith("--")]
        text = (option.help or "").partition("; ")[0]
        shown += [Candidate(name, text) for name in long_names[:1] + option.secondary_opts]
        aliases += [Candidate(name, text) for name in option.opts if name not in long_names[:1]]
    if any(item.value.startswith(incomplete) for item in shown):
        return shown
    return aliases


def _words(param: Any) -> tuple[str, ...]:
    """Return the fixed words that an option accepts."""
    parser = param.type_descriptor.parameter_info.parser
    return parser.words if isinstance(parser, OneOf) else WORDS.get(param.name, ())


def _is_path(param: Any) -> bool:
    """Return whether the values of a parameter are files or directories."""
    descriptor = param.type_descriptor
    return Path in (descriptor.annotation, descriptor.parameter_info.parser)


def _from_source(position: Position, typed: str, environ: Mapping[str, str]) -> list[Candidate]:
    """Return the iterations or keys of the checkpoint that the command line names."""
    from ckpt_cli.completion.source import iterations_in, keys_in, offered_keys

    seconds = remaining_s(environ)
    # Shells pass "~" and variables as they are typed.
    field = position.value_of.name
    number = ITERATIONS.get(field, 0)
    arguments = (*position.arguments, *["."][len(position.arguments) :])
    if number >= len(arguments):
        return []
    path = Path(os.path.expandvars(os.path.expanduser(arguments[number])))
    if field in ITERATIONS:
        rows = run_within(lambda: iterations_in(path), seconds=seconds) or []
        return [Candidate(value, text) for value, text in rows]
    iteration = None
    with suppress(KeyError, ValueError):
        iteration = int(position.values["iteration"])

    def matching_keys() -> list[str]:
        keys = recalled(
            cache_dir(environ), path, iteration, lambda: keys_in(path, iteration=iteration)
        )
        return offered_keys(keys, typed)

    return [Candidate(key) for key in run_within(matching_keys, seconds=seconds) or []]
