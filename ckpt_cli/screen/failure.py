"""Translates an exception into what the user reads, a JSON object and an exit code.

On the screen an error takes up to four lines, however wide the terminal is::

    error: the rank's file is missing
      at: file iter_0000020/mp_rank_03/model_optim_rng.pt
      hint: copy the checkpoint again, with all its files
      more: ckpt explain ranks-missing

With ``--quiet``, in logs of workers and in JSON an error is one line of text. An interruption is
one line that tells what remains::

    interrupted: nothing was written (rerun with --resume to keep partial work next time)

======  ===============================================================
 code    meaning
======  ===============================================================
 0       success
 1       findings (``validate``, ``diff``), nothing valid (``prune``), nothing known (``explain``)
 2       usage: invalid request, no such source, or the destination exists
 3       the checkpoint is corrupt or incomplete
 4       unsupported format, layout or feature
 5       refused as unsafe
 6       input or output failed
 7       not enough memory or disk space
 8       a worker failed, or the hosts did not find each other
 70      internal error: a bug in ckpt
 129     hung up (SIGHUP)
 130     interrupted (SIGINT, Ctrl-C)
 141     the reader of the output went away (SIGPIPE)
 143     terminated (SIGTERM)
======  ===============================================================
"""

from __future__ import annotations

import os
import signal
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from ckpt_cli.screen.terminal import Screen, escaped
from core.errors import (
    EXTRAS,
    CapacityError,
    CheckpointingException,
    CorruptError,
    StorageError,
    UnsupportedError,
    UsageError,
    did_you_mean,
)
from core.files.requests.ending import allow_requests, end_requests
from core.values import dataclass

INTERNAL_ERROR = 70
"""Exit code of a bug in ckpt (EX_SOFTWARE of sysexits.h)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as the user reads it, with texts that are safe for a terminal.

    Args:
        exit_code: one of the module's table.
        message: what is wrong, on one line; "" if nothing is to be printed.
        fields: the ``error`` object of ``--json``.
        place: the file, tensor, rank and bytes concerned, or "".
        hint: the next step, or ""; several lines if it proposes a layout rule.
        label: the word before the message.
    """

    exit_code: int
    message: str
    fields: dict[str, object]
    place: str = ""
    hint: str = ""
    label: str = "error"

    @property
    def line(self) -> str:
        """Message, place and hint on one line; "" if nothing is to be printed."""
        where = f" ({self.place})" if self.place else ""
        return f"{self.message}{where}{f'; {self.hint}' if self.hint else ''}"

    def text(self, screen: Screen, *, is_one_line: bool = False) -> str:
        """Return the text to print: up to four lines, or one."""
        label = screen.styled(f"{self.label}:", "bold", "red")
        if is_one_line:
            return f"{label} {self.line}"
        # Later lines of a hint are aligned with its first.
        parts = [
            ("at", self.place),
            ("hint", self.hint.replace("\n", "\n" + " " * len("  hint: "))),
            ("more", _explain_command(self.message)),
        ]
        return "\n".join(
            [f"{label} {self.message}", *(f"  {name}: {text}" for name, text in parts if text)]
        )


def _explain_command(message: str) -> str:
    """Return the command that explains a refusal of ckpt; "" if nothing more is known."""
    from core.verbs.explain.messages import match_messages

    matches = match_messages(message, printed_by="ckpt")
    return f"ckpt explain {matches[0].name}" if matches else ""


class Terminated(KeyboardInterrupt):
    """Raised when a signal asks the process to end; everything cleans up as after Ctrl-C.

    Args:
        number: the signal.

    Attributes:
        remaining: what the interrupted command has left on the disk; set by the command.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.remaining = "the command did not finish"


_received: int | None = None
"""The signal that ``end_on_signals`` has turned into ``Terminated``."""


def raise_if_ended() -> None:
    """Raise ``Terminated`` again if other software has dropped it, as torch's import may do.

    Raises:
        Terminated: a signal asked the process to end.
    """
    if _received is not None:
        raise Terminated(_received)


_ENTRY_AND_EXIT = (threading.Condition.__enter__.__code__, threading.Condition.__exit__.__code__)
_WAIT = threading.Condition.wait.__code__
_SEND_AGAIN_S = 0.002


def _may_interrupt(frame: FrameType | None) -> bool:
    """Return False while ``frame`` takes, leaves or lends a lock that other threads may wait for.

    ``threading.Condition`` is written in Python. An exception between the moment when it gets its
    lock and the first statement of the ``with`` block would keep the lock for ever, and the threads
    that wait for it, and whoever waits for these.
    """
    while frame is not None:
        if frame.f_code in _ENTRY_AND_EXIT:
            return False
        # It has given back the lock, and its ``try``, which takes it again, has not begun.
        if frame.f_code is _WAIT and "gotit" not in frame.f_locals:
            return False
        frame = frame.f_back
    return True


def _send_again(number: int) -> None:
    time.sleep(_SEND_AGAIN_S)
    os.kill(os.getpid(), number)


def end_on_signals() -> Callable[[], None]:
    """Make SIGINT, SIGTERM and SIGHUP raise ``Terminated`` in the main thread, once.

    Later signals are ignored, so that nothing interrupts the clean-up (a closing terminal sends
    SIGHUP twice, people press Ctrl-C twice). Object stores are hardly waited for any more. A signal
    that the parent chose to ignore (``nohup``) stays ignored. In any other thread this function
    does nothing.

    Returns:
        A function that restores the earlier handlers.
    """
    before: dict[int, Any] = {}

    def end(number: int, frame: FrameType | None) -> None:
        global _received
        # Not by threading, whose locks the interrupted code may have.
        if not _may_interrupt(frame):
            start_new_thread(_send_again, (number,))
            return
        # Ignore later signals before raising, or one of them could interrupt this function.
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        _received = number
        end_requests()
        raise Terminated(number)

    is_main = threading.current_thread() is threading.main_thread()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if is_main else ():
        handler = signal.getsignal(number)
        if handler is not signal.SIG_IGN:
            before[number] = handler
            signal.signal(number, end)

    def restore() -> None:
        global _received
        _received = None
        allow_requests()
        for number, handler in before.items():
            signal.signal(number, handler)

    return restore


PACKAGES = {
    "google_crc32c": ("google-crc32c", "google-crc32c"),
    "jinja2": ("Jinja2", "Jinja2"),
    "ml_dtypes": ("ml_dtypes", "ml_dtypes"),
    "numpy": ("NumPy", "numpy"),
    "obstore": ("obstore", "obstore"),
    "rich": ("rich", "rich"),
    "typer": ("typer", "typer"),
    "xxhash": ("xxhash", "xxhash"),
    "yaml": ("PyYAML", "PyYAML"),
    "zlib_ng": ("zlib-ng", "zlib-ng"),
    "zstandard": ("zstandard", "zstandard"),
    **{name: (title, f"'ckpt-toolkit[{extra}]'") for name, (title, extra) in EXTRAS.items()},
}
"""Dependency by its import name → title for messages, name for pip."""


def failure_of(err: BaseException, *, command: str = "ckpt") -> Failure:
    """Return the report of an exception; an unknown exception is reported as a bug.

    Args:
        command: the command that ran, for errors of typer that do not name it.
    """
    # The process was ended from outside: not an error.
    if isinstance(err, BrokenPipeError):
        return Failure(128 + signal.SIGPIPE, "", {"code": "broken_pipe"})
    if isinstance(err, KeyboardInterrupt):
        ended = err if isinstance(err, Terminated) else Terminated(signal.SIGINT)
        name = signal.Signals(ended.number).name
        message = escaped(ended.remaining)
        return Failure(
            128 + ended.number,
            message,
            {"code": "interrupted", "signal": name, "message": message},
            label="interrupted" if ended.number == signal.SIGINT else f"interrupted ({name})",
        )
    # An error that has a code. Its hint may be a layout rule of several lines, which stay.
    error = _translated(err, command)
    if error is not None:
        hint = "\n".join(map(escaped, (error.hint or "").split("\n")))
        return Failure(
            error.exit_code,
            escaped(error.message),
            error.fields(),
            place=escaped(error.place),
            hint=hint,
        )
    # A bug.
    kind = type(err).__name__
    text = f"internal error, {kind}: {err}".rstrip(": ")
    return Failure(
        INTERNAL_ERROR,
        escaped(text),
        {"code": "internal", "message": str(err), "type": kind},
        hint="this is a bug in ckpt: rerun with --debug and report the output",
    )


def _translated(err: BaseException, command: str) -> CheckpointingException | None:
    """Return the project's own error for ``err``; None if ``err`` is a bug."""
    if isinstance(err, CheckpointingException):
        return err
    if isinstance(err, MemoryError):
        return CapacityError(
            "out of memory", hint="lower --memory or --threads, or use a machine with more memory"
        )
    if isinstance(err, RecursionError):
        return CorruptError(
            "the metadata is nested too deeply to read", hint="do not trust this checkpoint"
        )
    if isinstance(err, OSError):
        from core.files.store import CAPACITY_HINTS

        file = os.fsdecode(err.filename) if isinstance(err.filename, (str, bytes)) else None
        reason = os.strerror(err.errno).lower() if err.errno else str(err)
        if err.errno in CAPACITY_HINTS:
            return CapacityError(reason, file=file, hint=CAPACITY_HINTS[err.errno])
        return StorageError(reason, file=file)
    if isinstance(err, ModuleNotFoundError) and err.name in PACKAGES:
        title, package = PACKAGES[err.name]
        return UnsupportedError(
            f"{command} needs {title}, which is not installed",
            hint=f"pip install {package}",
        )
    # typer's own errors have this method, whether they come from click or from typer's copy of it.
    format_message = getattr(err, "format_message", None)
    if callable(format_message):
        return _usage_error(err, str(format_message()), command)
    return None


def _usage_error(err: BaseException, message: str, command: str) -> UsageError:
    """Return the UsageError for an error of typer, in the style of ckpt's own messages."""
    from ckpt_cli.screen.other_tools import OPTION_HINTS, TORCHRUN_OPTION_HINTS

    context = getattr(err, "ctx", None)
    command = getattr(context, "command_path", command)
    # An option of another tool: the hint names the option of ckpt.
    option = str(getattr(err, "option_name", ""))
    hints = TORCHRUN_OPTION_HINTS if command == "ckpt launch" else OPTION_HINTS
    if option in hints:
        return UsageError(
            f"no such option: {option}", hint=hints[option].replace("ckpt COMMAND", command)
        )
    # An option that nobody knows: typer's own proposals are not sorted and include hidden ones.
    hint = None
    if context is not None and hasattr(err, "possibilities"):
        message, hint = f"no such option: {option}", _option_hint(option, context)
    # One line, without a capital letter and a full stop.
    message = " ".join(message.split()).rstrip(".?")
    return UsageError(message[:1].lower() + message[1:], hint=hint or f"see {command} --help")


def _option_hint(option: str, context: Any) -> str | None:
    """Return the command that has an option, or the most similar option of the command that ran."""
    commands = getattr(context.find_root().command, "commands", {})
    owners = [name for name, command in commands.items() if option in _option_names(command.params)]
    if owners:
        return f"it is an option of ckpt {', '.join(owners)}"
    return did_you_mean(option, _option_names(context.command.get_params(context)))


def _option_names(params: Iterable[Any]) -> list[str]:
    """Return all names of the options that help pages show."""
    shown = [param for param in params if not getattr(param, "hidden", False)]
    return [name for param in shown for name in (*param.opts, *param.secondary_opts)]
