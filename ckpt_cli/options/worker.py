"""Options of a worker process, ``python -m ckpt_cli.worker [options] VERB ARGS``.

They end at the first word without a dash: VERB, whose own options typer parses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ckpt_cli.host.binding import MODES
from core.engine.device.device import NAMES
from core.errors import UsageError, did_you_mean
from core.values import dataclass

BACKENDS = ("auto", "gloo", "nccl")
LONGEST_S = 86_400
"""Largest time limit that can be set, in seconds: a day."""

USAGE = """usage: python -m ckpt_cli.worker [options] VERB ARGS
Run one of several workers that execute a ckpt command together. Start the workers with
ckpt launch, torchrun -m, srun or mpirun.

  --device cpu|cuda|auto   device for casts and checks (cpu); auto: a GPU, if each worker has one
  --backend auto|gloo|nccl how workers communicate (auto: gloo, plus nccl on GPUs)
  --timeout SECONDS        give up on a worker after this long without a heartbeat (60)
  --join-timeout SECONDS   how long workers wait for each other at the start (300)
  --bind none|cores|numa|auto
                           cores to pin each worker to (auto)
VERB and ARGS are the same as for ckpt."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Settings of one worker process.

    Args:
        device: where per-byte work runs, one of ``core.engine.device.device.NAMES``.
        backend: how workers communicate, one of ``BACKENDS``.
        timeout_s: seconds without a heartbeat after which a worker counts as lost.
        join_timeout_s: seconds that workers wait for each other at the start.
        bind: cores to pin the worker to, one of ``ckpt_cli.host.binding.MODES``.

    Raises:
        UsageError: a value is not among those allowed, or two contradict each other.
    """

    device: str = "cpu"
    backend: str = "auto"
    timeout_s: float = 60.0
    join_timeout_s: float = 300.0
    bind: str = "auto"

    def __post_init__(self) -> None:
        # Words.
        for option, value, allowed in (
            ("--device", self.device, NAMES),
            ("--backend", self.backend, BACKENDS),
            ("--bind", self.bind, MODES),
        ):
            if value not in allowed:
                raise UsageError(
                    f"{option} is {value!r}, which is not one of: {', '.join(allowed)}",
                    hint=did_you_mean(value, allowed),
                )
        # Time limits; a NaN fails the comparison and is refused, too.
        for option, seconds in (
            ("--timeout", self.timeout_s),
            ("--join-timeout", self.join_timeout_s),
        ):
            if not 1 <= seconds <= LONGEST_S:
                raise UsageError(
                    f"{option} is {seconds:g} seconds, which is not between 1 and {LONGEST_S}"
                )
        # Values that are valid alone but not together.
        if self.backend == "nccl" and self.device == "cpu":
            raise UsageError(
                "--backend nccl needs GPUs, but --device is cpu", hint="add --device cuda"
            )

    def as_arguments(self) -> list[str]:
        """Return the options that differ from their defaults, as command-line arguments."""
        defaults = WorkerOptions()
        arguments = []
        for option, (name, _) in _OPTIONS.items():
            value = getattr(self, name)
            if value != getattr(defaults, name):
                arguments += [option, f"{value:g}" if isinstance(value, (int, float)) else value]
        return arguments


def _parse_seconds(text: str) -> float:
    """Parse a number of seconds; raise UsageError for any other text."""
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number of seconds") from None


_OPTIONS: dict[str, tuple[str, Callable[[str], object]]] = {
    "--device": ("device", str),
    "--backend": ("backend", str),
    "--timeout": ("timeout_s", _parse_seconds),
    "--join-timeout": ("join_timeout_s", _parse_seconds),
    "--bind": ("bind", str),
}
"""Option → field of ``WorkerOptions``, parser of its value."""


def parse_worker_arguments(arguments: Sequence[str]) -> tuple[WorkerOptions, list[str]]:
    """Split a worker's arguments into its options and the ckpt command that follows them.

    Raises:
        UsageError: an option is unknown or its value invalid, or no command follows.
    """
    values: dict[str, object] = {}
    words = list(arguments)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        # Accept --option=VALUE and --option VALUE, with "_" for "-" as in torchrun.
        option, equals, value = word.partition("=")
        option = option.replace("_", "-")
        if option not in _OPTIONS:
            raise UsageError(
                f"no such worker option: {option}",
                hint=did_you_mean(option, _OPTIONS)
                or "put options of the ckpt command after the command; see --help",
            )
        if not equals:
            if not words:
                raise UsageError(f"{option} needs a value")
            value = words.pop(0)
        name, convert = _OPTIONS[option]
        values[name] = convert(value)
    if not words:
        raise UsageError(
            "no command to run", hint="add a ckpt command: … convert SRC DST --to FORMAT"
        )
    return replace(WorkerOptions(), **values), words  # type: ignore[arg-type]
