"""The command ``ckpt``: parses the command line and runs one command.

Every error becomes a message and an exit code. Parsing and running are separate: a typer command
returns its work as a function, which ``main`` calls, so that no exception of the work passes
through typer. The modules of commands are imported when they run; ``ckpt --help`` imports none.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import cache, partial
from io import TextIOWrapper
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option, Typer
from typer.core import TyperGroup
from typer.main import get_group

from ckpt_cli.options.declaration import accepts
from ckpt_cli.options.typer_command import HELP_ALL, Command, Group, short_page
from ckpt_cli.screen.failure import Failure, end_on_signals, failure_of
from ckpt_cli.screen.terminal import screen_of
from core.errors import UsageError

if TYPE_CHECKING:
    from ckpt_cli.options.demo import DemoOptions
    from ckpt_cli.options.diff import DiffOptions
    from ckpt_cli.options.explain import ExplainOptions
    from ckpt_cli.options.explore import ExploreOptions
    from ckpt_cli.options.inspect import InspectOptions
    from ckpt_cli.options.launch import LaunchOptions
    from ckpt_cli.options.manifest import ManifestOptions
    from ckpt_cli.options.merge import MergeOptions
    from ckpt_cli.options.prune import PruneOptions
    from ckpt_cli.options.transfer import TransferOptions
    from ckpt_cli.options.validate import ValidateOptions

_PAGES = ("-h", "--help", "--help-all", "--version")
"""First words of a command line that runs no command."""
Work = Callable[[], int]
"""A parsed command that has not run yet; returns the exit code."""
FailureFilter = Callable[[BaseException, Failure], Failure | None]
"""Called with the error that ended the work; returns the failure to print, None for no message."""

_TRANSFER_EPILOG = (
    "The sizes to write can also be set with the option names of other tools, such as --target-tp "
    "and --target-tensor-parallel-size. The layout of SRC is detected; --tp, --pp, --vpp, --ep "
    "and --etp (or --tensor-model-parallel-size, …) only check it. Content options are applied in "
    "this order, regardless of their order on the command line: --dequantize, --dequantize-optim; "
    "--include, --exclude; "
    "--strip-prefix, --add-prefix, --rename; --untie, --tie; "
    "--stack-layers, --unstack-layers, both with --layer-axis; "
    "--dtype; --quantize. Each option sees the names that the previous options produced."
)

_NOT_IN_MERGE = (
    "src",
    "dst",
    "iteration",
    "metadata_only",
    "no_optim",
    "dequantize",
    "dequantize_optim",
    "param_order",
)
"""Fields of ``TransferOptions`` that merge does not take: they move data, or concern one source."""

app = Typer(
    name="ckpt",
    cls=Group,
    help="Inspect, convert, reshard and verify training checkpoints. ckpt PATH is short for "
    "ckpt inspect PATH.",
    epilog="Exit codes: 0 success, 1 findings, 2 usage error, 3 corrupt or incomplete, "
    "4 unsupported, 5 unsafe, 6 I/O error, 7 out of memory or disk space, 8 worker failed, "
    "70 internal error, 130 interrupted.",
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


def _show_version(is_given: bool) -> None:
    """Print the version and exit, if ``--version`` is given."""
    if is_given:
        from core.version import __version__, read_commit

        commit = read_commit()
        print(f"ckpt {__version__}{f' ({commit})' if commit else ''}")
        raise Exit


def _install_completion(is_given: bool) -> None:
    """Install the script for shell completion and exit, if ``--install-completion`` is given."""
    if is_given:
        from ckpt_cli.completion.install import install_script

        shell, path = install_script()
        print(f"installed {shell} completion in {path}; it takes effect in new shells")
        raise Exit


def _show_completion(is_given: bool) -> None:
    """Print the script for shell completion and exit, if ``--show-completion`` is given."""
    if is_given:
        from ckpt_cli.completion.install import shell_script

        print(shell_script(), end="")
        raise Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the version and commit, then exit.",
        ),
    ] = False,
    help_all: Annotated[bool, HELP_ALL] = False,
    install_completion: Annotated[
        bool,
        Option(
            "--install-completion",
            callback=_install_completion,
            is_eager=True,
            help="Install tab completion for the current shell (bash, zsh or fish) and exit.",
        ),
    ] = False,
    show_completion: Annotated[
        bool,
        Option(
            "--show-completion",
            callback=_show_completion,
            is_eager=True,
            help="Print the completion script and exit.",
        ),
    ] = False,
) -> None:
    pass


@app.command(
    "inspect",
    cls=Command,
    short_help="Show what a checkpoint contains and what can be done with it.",
)
@accepts("inspect.InspectOptions")
def _inspect(options: InspectOptions) -> Work:
    """Show what a checkpoint contains and what can be done with it.

    Tensor data is read only for --values and --stats.
    """
    from ckpt_cli.commands.inspect import inspect

    return partial(inspect, options)


@app.command("explore", cls=Command, short_help="Browse a checkpoint in the terminal.")
@accepts("explore.ExploreOptions")
def _explore(options: ExploreOptions) -> Work:
    """Browse a checkpoint: names, shapes, shard locations, values, differences and damage.

    The key bindings are shown at the bottom of the screen. Nothing is written.
    """
    from ckpt_cli.commands.explore import explore

    return partial(explore, options)


@app.command(
    "convert",
    cls=Command,
    epilog=_TRANSFER_EPILOG,
    short_help="Convert a checkpoint to another format.",
)
@accepts("transfer.TransferOptions")
def _convert(options: TransferOptions) -> Work:
    """Convert a checkpoint to another format; tensors are streamed, so memory use stays low."""
    from ckpt_cli.commands.convert import convert

    return partial(convert, options)


@app.command(
    "reshard",
    cls=Command,
    epilog=_TRANSFER_EPILOG,
    short_help="Reshard a Megatron checkpoint to new parallel sizes.",
)
@accepts("transfer.TransferOptions")
def _reshard(options: TransferOptions) -> Work:
    """Reshard a Megatron checkpoint to new parallel sizes (--tp-new, --pp-new, …)."""
    from ckpt_cli.commands.reshard import reshard

    return partial(reshard, options)


@app.command(
    "merge",
    cls=Command,
    epilog="Content options apply to the computed tensors, under the first source's names, in the "
    "order that ckpt convert --help-all lists.",
    short_help="Average or combine checkpoints, or fold in a LoRA adapter.",
)
@accepts("merge.MergeOptions", "transfer.TransferOptions", without=_NOT_IN_MERGE)
def _merge(merge_options: MergeOptions, options: TransferOptions) -> Work:
    """Compute one checkpoint from several, in float32; optimizer states are not merged."""
    from ckpt_cli.commands.merge import merge

    return partial(merge, options, merge_options)


@app.command(
    "manifest",
    cls=Command,
    short_help="Record checksums and fingerprints to verify a checkpoint later.",
)
@accepts("manifest.ManifestOptions")
def _manifest(options: ManifestOptions) -> Work:
    """Record file sizes, checksums and fingerprints in ckpt-manifest.json to verify them later."""
    from ckpt_cli.commands.manifest import manifest

    return partial(manifest, options)


@app.command(
    "validate",
    cls=Command,
    short_help="Check a checkpoint for missing, damaged or inconsistent data.",
)
@accepts("validate.ValidateOptions")
def _validate(options: ValidateOptions) -> Work:
    """Check checkpoints for missing, damaged or inconsistent data; exit with 1 on errors."""
    from ckpt_cli.commands.validate import validate

    return partial(validate, options)


@app.command("diff", cls=Command, short_help="Compare two checkpoints tensor by tensor.")
@accepts("diff.DiffOptions")
def _diff(options: DiffOptions) -> Work:
    """Compare two checkpoints tensor by tensor, across formats and layouts."""
    from ckpt_cli.commands.diff import run_diff

    return partial(run_diff, options)


@app.command(
    "explain", cls=Command, short_help="Explain what an error or a finding means and how to fix it."
)
@accepts("explain.ExplainOptions")
def _explain(options: ExplainOptions) -> Work:
    """Explain what an error message or a finding means, what causes it, and how to fix it.

    Error messages from PyTorch, Megatron-LM, DeepSpeed, Transformers, vLLM and other tools are
    identified by their wording. Given a checkpoint, ckpt checks its metadata and explains the
    findings.
    """
    from ckpt_cli.commands.explain import explain

    return partial(explain, options)


@app.command("prune", cls=Command, short_help="Remove old iterations of a training run.")
@accepts("prune.PruneOptions")
def _prune(options: PruneOptions) -> Work:
    """Remove iterations of a training run that no rule keeps, after asking for confirmation.

    The newest valid iteration is always kept, and so is every iteration that a tracker names,
    that is still being written, or that is not recognised as a checkpoint.
    """
    from ckpt_cli.commands.prune import prune

    return partial(prune, options)


@app.command(
    "launch",
    cls=Command,
    context_settings={"allow_interspersed_args": False},  # words after the command belong to it
    short_help="Run a command with several workers on one or more hosts.",
)
@accepts("launch.LaunchOptions")
def _launch(options: LaunchOptions) -> Work:
    """Run convert, reshard, merge, manifest, validate or diff with PyTorch's elastic launcher.

    Options have the same names as in torchrun, with - or _, and precede COMMAND.
    """
    from ckpt_cli.launch.run import check_command, launch

    command = check_command(options.command)
    work = parse_command(command)  # reports wrong arguments before any worker starts
    if not callable(work):
        return partial(int, work)
    # The launcher tells what an interruption leaves at the destination.
    from ckpt_cli.options.transfer import TransferOptions

    named = work.args[0] if isinstance(work, partial) else None
    dst = named.output or named.dst if isinstance(named, TransferOptions) else None
    return partial(launch, options, lambda err: _report(err, ["launch", "--", *command]), dst=dst)


@app.command("demo", cls=Command, short_help="Write small checkpoints to try the commands on.")
@accepts("demo.DemoOptions")
def _demo(options: DemoOptions) -> Work:
    """Write the small checkpoints used in the documentation, to try the commands on."""
    from ckpt_cli.commands.demo import demo

    return partial(demo, options)


@cache
def _group_for(word: str) -> TyperGroup:
    """Return typer's group of the commands that a command line needs, by its first word.

    Making all takes ten times as long as making one, and imports the options of each.
    """
    commands = [command for command in app.registered_commands if command.name == word]
    # The program's own page needs the names of the commands, not their options.
    if word in _PAGES:
        commands = [copy(command) for command in app.registered_commands]
        for command in commands:
            command.callback = _no_options
    if not commands:
        return get_group(app)
    program = copy(app)
    program.registered_commands = commands
    return get_group(program)


def _no_options() -> None:
    pass


def _with_command(arguments: list[str]) -> list[str]:
    """Return the arguments with ``inspect`` before a path, if they begin with one.

    The name of a command is never a path, and a word that names nothing a misspelt command.
    """
    if not arguments or arguments[0].startswith("-"):
        return arguments
    word = arguments[0]
    name = word.lower().replace("_", "-")
    if name == "help" or name in [command.name for command in app.registered_commands]:
        return arguments
    is_path = os.sep in word or "://" in word or os.path.lexists(word)
    return ["inspect", *arguments] if is_path else arguments


def parse_command(arguments: Sequence[str]) -> Work | int:
    """Parse a command line; return its work, or the exit code of ``--help`` and ``--version``.

    Raises:
        Exception: the command line is invalid; ``failure_of`` translates the error.
    """
    word = arguments[0].lower().replace("_", "-") if arguments else "--help"
    if word == "help":
        return _parse_help(arguments[1:])
    try:
        work = _group_for(word)(list(arguments), prog_name="ckpt", standalone_mode=False)
    except Exception as err:
        # The hint about an unknown option names the commands that have it: all must be there.
        if not hasattr(err, "possibilities"):
            raise
        work = _group_for("ckpt")(list(arguments), prog_name="ckpt", standalone_mode=False)
    return work if callable(work) else int(work or 0)


def _parse_help(words: Sequence[str]) -> Work | int:
    """Parse the words after ``ckpt help``: none, a command, a topic, or a question."""
    if not words:
        from ckpt_cli.commands.help import topic_sections
        from ckpt_cli.screen.help_page import sections_text

        code = parse_command(["--help"])
        print(f"\n{sections_text(topic_sections(), screen_of(sys.stdout))}")
        return code
    names = [command.name for command in app.registered_commands]
    is_question = any(not word.startswith("-") for word in words[1:])
    is_command = words[0].lower().replace("_", "-") in names and not is_question
    if words[0].startswith("-") or is_command:
        return parse_command([*words, "--help"])
    from ckpt_cli.commands.help import show_topic

    return partial(show_topic, " ".join(words))


def main(argv: Sequence[str] | None = None, *, failure_filter: FailureFilter | None = None) -> int:
    """Run one command line.

    Args:
        argv: arguments after the program's name; None for those of this process.
        failure_filter: chooses what this process prints after a failure; None prints every failure.

    Returns:
        The exit code; ``ckpt_cli.screen.failure`` lists the codes.
    """
    arguments = _with_command(list(sys.argv[1:] if argv is None else argv))
    # Signals keep their default while parsing: nothing has to be cleaned up until the work begins.
    # Output is flushed here, while a full disk or closed pipe can still be reported.
    _prepare_streams()
    restore: Callable[[], None] | None = None
    try:
        work = parse_command(arguments)  # imports the command's module
        restore = end_on_signals()
        code = work() if callable(work) else work
        sys.stdout.flush()
    except SystemExit:  # raised by typer, only if the reader of its help page closed the pipe
        code = failure_of(BrokenPipeError()).exit_code
    except BaseException as err:
        code = _report(err, arguments, failure_filter)
    finally:
        if restore is not None:
            restore()
    return code


def _prepare_streams() -> None:
    """Redirect closed streams to the null device, and escape characters that cannot be encoded."""
    # Python sets a stream to None if its descriptor was closed when the process started (``>&-``).
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _report(
    err: BaseException, arguments: list[str], failure_filter: FailureFilter | None = None
) -> int:
    """Print ``err`` for the user and return the exit code."""
    # ``ckpt`` without arguments prints its help. The error's class is private, but has this name in
    # every version of typer.
    if type(err).__name__ == "NoArgsIsHelpError":
        context = getattr(err, "ctx", None)
        assert context is not None, "typer gives the context of the program"
        print(short_page(context.command, context).text(screen_of(sys.stderr)), file=sys.stderr)
        return UsageError.exit_code
    # Translate the error; another process may be the one to print it.
    options = _option_words(arguments)
    is_command = bool(options) and options[0] in [
        command.name for command in app.registered_commands
    ]
    failure = failure_of(err, command=f"ckpt {options[0]}" if is_command else "ckpt")
    if failure_filter is not None:
        filtered = failure_filter(err, failure)
        if filtered is None:
            return failure.exit_code
        failure = filtered
    # People read stderr: a traceback with --debug, then the message.
    with suppress(OSError):
        if "--debug" in options and not isinstance(err, BrokenPipeError):
            import traceback

            traceback.print_exception(err)
        if failure.message:
            is_quiet = not {"-q", "--quiet"}.isdisjoint(options)
            print(failure.text(screen_of(sys.stderr), is_one_line=is_quiet), file=sys.stderr)
    # Programs read stdout: with --json the error is an object there. The option is looked up
    # without the parser, because the command line may be invalid.
    try:
        wants_json = (
            "--json" in options
            or "--format=json" in options
            or ("--format", "json") in pairwise(options)
        )
        if wants_json and failure.message:
            print(json.dumps({"error": {**failure.fields, "exit_code": failure.exit_code}}))
        sys.stdout.flush()
    except OSError:
        # A full disk or a closed pipe: drop the output, so that the interpreter's own flush at the
        # end does not fail again.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return failure.exit_code


def _option_words(arguments: list[str]) -> list[str]:
    """Return the arguments before ``--``, among which the options are.

    In ``launch -- COMMAND ARGS`` the options of COMMAND come after the first ``--``; they end at a
    second one.
    """
    start = arguments.index("--") + 1 if arguments[:1] == ["launch"] and "--" in arguments else 0
    end = arguments.index("--", start) if "--" in arguments[start:] else len(arguments)
    return arguments[:end]
