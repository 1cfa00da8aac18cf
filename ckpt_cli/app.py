"""The command ``ckpt``: parses the line, runs one command, maps whatever happens to one line and an exit code.

Parsing and running are apart: a typer command returns the work as a function, and ``main`` calls it, so that no
exception of the work passes through typer. Bodies are imported when they run; ``ckpt --help`` imports none of them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from itertools import pairwise
from typing import Annotated

from typer import Exit, Option, Typer

from ckpt_cli.options.diff import DiffOptions
from ckpt_cli.options.launch import LaunchOptions
from ckpt_cli.options.manifest import ManifestOptions
from ckpt_cli.options.transfer import InspectOptions, TransferOptions, accepts
from ckpt_cli.options.typer_command import Command, Group
from ckpt_cli.options.validate import ValidateOptions
from ckpt_cli.screen.failure import Failure, end_on_signals, failure_of
from ckpt_cli.screen.terminal import screen_of
from core.errors import UsageError

Work = Callable[[], int]
"""A command that is parsed and not yet run; returns the exit code."""
Heed = Callable[[BaseException, Failure], Failure | None]
"""What a worker of a team does with what ended its work; see ``main``."""

_ALIASES = (
    "Every size also goes by the names of other tools: --target-tp, --target-tensor-parallel-size, and so on. "
    "The layout of SRC is read from SRC; --tp, --pp, --vpp, --ep, --etp (or --tensor-model-parallel-size …) beside it "
    "are assertions. Whatever their order on the line, content options apply so: --dequantize; --include, --exclude; "
    "--strip-prefix, --add-prefix, --rename; --untie, --tie; --stack-layers, --unstack-layers; --dtype; --quantize. "
    "Each sees the names that those before it made."
)

app = Typer(
    name="ckpt",
    cls=Group,
    help="Look at training checkpoints, convert them between formats, and change their parallel layout.",
    epilog="Exit codes: 0 fine, 1 findings, 2 usage, 3 corrupt or incomplete, 4 unsupported, 5 unsafe, 6 input/output, "
    "7 memory or disk full, 8 worker failed, 70 internal error, 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "max_content_width": 100,
    },
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            number = version("ckpt-toolkit")
        except PackageNotFoundError:
            number = "(not installed)"
        print(f"ckpt {number}")
        raise Exit


@app.callback()
def _root(
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("inspect", cls=Command, short_help="Show what a checkpoint holds and what can be done with it.")
@accepts(InspectOptions)
def _inspect(options: InspectOptions) -> Work:
    """Show what a checkpoint holds, how it is laid out and what can be done with it; reads no tensor data."""
    from ckpt_cli.commands.inspect import inspect

    return partial(inspect, options)


@app.command("convert", cls=Command, epilog=_ALIASES, short_help="Write a checkpoint in another format.")
@accepts(TransferOptions)
def _convert(options: TransferOptions) -> Work:
    """Write a checkpoint in another format (--to). Bytes are moved, not loaded: memory stays small."""
    from ckpt_cli.commands.convert import convert

    return partial(convert, options)


@app.command(
    "reshard", cls=Command, epilog=_ALIASES, short_help="Write a Megatron checkpoint for other parallel sizes."
)
@accepts(TransferOptions)
def _reshard(options: TransferOptions) -> Work:
    """Write a Megatron checkpoint for other parallel sizes (--tp-new, --pp-new, …)."""
    from ckpt_cli.commands.reshard import reshard

    return partial(reshard, options)


@app.command("manifest", cls=Command, short_help="Write down what a checkpoint holds, to check it later.")
@accepts(ManifestOptions)
def _manifest(options: ManifestOptions) -> Work:
    """Read a checkpoint once and write ckpt-manifest.json: sizes, CRCs, digests, and fingerprints of its tensors."""
    from ckpt_cli.commands.manifest import manifest

    return partial(manifest, options)


@app.command("validate", cls=Command, short_help="Say whether a checkpoint is whole.")
@accepts(ValidateOptions)
def _validate(options: ValidateOptions) -> Work:
    """Say whether checkpoints are whole; exits with 1 if one is not."""
    from ckpt_cli.commands.validate import validate

    return partial(validate, options)


@app.command("diff", cls=Command, short_help="Say whether two checkpoints hold the same.")
@accepts(DiffOptions)
def _diff(options: DiffOptions) -> Work:
    """Say whether two checkpoints hold the same, and how they differ; formats and layouts may be different ones."""
    from ckpt_cli.commands.diff import run_diff

    return partial(run_diff, options)


@app.command(
    "launch",
    cls=Command,
    context_settings={"allow_interspersed_args": False},  # the first word is the command's
    short_help="Run a command with many workers, on many hosts.",
)
@accepts(LaunchOptions)
def _launch(options: LaunchOptions) -> Work:
    """Run convert, reshard, manifest, validate or diff with several workers, by PyTorch's elastic launcher.

    Options are torchrun's, with - or _ inside, and stand before COMMAND.
    """
    from ckpt_cli.launch.run import check_command, launch

    command = check_command(options.command)
    work = work_of(command)  # a mistake is told before any worker starts
    if not callable(work):
        return partial(int, work)
    return partial(launch, options, lambda err: _report(err, ["launch", "--", *command]))


def work_of(arguments: Sequence[str]) -> Work | int:
    """A command line, parsed and not yet run; its exit code where parsing did all (``--help``).

    Raises:
        Exception: the line is wrong; ``failure_of`` knows what it means.
    """
    work = app(list(arguments), prog_name="ckpt", standalone_mode=False)
    return work if callable(work) else int(work or 0)


def main(argv: Sequence[str] | None = None, *, heed: Heed | None = None) -> int:
    """Runs one command line.

    Args:
        argv: arguments after the program's name; None for the process's own.
        heed: hears what ended the work, and says what of it this process is to print; None for nothing.

    Returns:
        The exit code; see ``ckpt_cli.screen.failure``.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _prepare_streams()
    restore = _nothing
    try:
        work = work_of(arguments)  # imports the command as well
        restore = end_on_signals()
        code = work() if callable(work) else work
        sys.stdout.flush()
    except SystemExit:  # typer's, and only where nobody reads its help to the end
        code = failure_of(BrokenPipeError()).exit_code
    except BaseException as err:
        code = _report(err, arguments, heed)
    finally:
        restore()
    return code


def _nothing() -> None:
    pass


def _prepare_streams() -> None:
    """Closed streams lead nowhere, and what an encoding does not hold is spelled out, so that printing cannot fail."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _report(err: BaseException, arguments: list[str], heed: Heed | None = None) -> int:
    """Tells the user about ``err``; returns the exit code."""
    if type(err).__name__ == "NoArgsIsHelpError":  # the name in every typer; the class is private
        print(getattr(err, "message", ""), file=sys.stderr)
        return UsageError.exit_code
    options = _options_in(arguments)
    is_command = bool(options) and options[0] in [command.name for command in app.registered_commands]
    failure = failure_of(err, command=f"ckpt {options[0]}" if is_command else "ckpt")
    shown = failure if heed is None else heed(err, failure)
    if shown is None:
        return failure.exit_code
    failure = shown
    with suppress(OSError):
        if "--debug" in options and not isinstance(err, BrokenPipeError):
            import traceback

            traceback.print_exception(err)
        if failure.message:
            is_quiet = not {"-q", "--quiet"}.isdisjoint(options)
            print(failure.text(screen_of(sys.stderr), is_one_line=is_quiet), file=sys.stderr)
    try:
        if _wants_json(options) and failure.message:
            print(json.dumps({"error": {**failure.fields, "exit_code": failure.exit_code}}))
        sys.stdout.flush()
    except OSError:  # a full disk or a closed pipe; the interpreter's own flush at the end must not fail again
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return failure.exit_code


def _options_in(arguments: list[str]) -> list[str]:
    """The words of a line that may be options: those before ``--``, of which the first one of ``launch`` is none."""
    start = arguments.index("--") + 1 if arguments[:1] == ["launch"] and "--" in arguments else 0
    end = arguments.index("--", start) if "--" in arguments[start:] else len(arguments)
    return arguments[:end]


def _wants_json(options: list[str]) -> bool:
    """Whether a program reads stdout, as far as a line tells that may not parse."""
    return "--json" in options or "--format=json" in options or ("--format", "json") in pairwise(options)
