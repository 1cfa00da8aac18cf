"""Options of a worker: what stands before the verb in ``python -m ckpt_cli.worker [options] VERB ARGS``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ckpt_cli.host.binding import MODES
from core.device.device import NAMES
from core.errors import UsageError

BACKENDS = ("auto", "gloo", "nccl")
LONGEST_S = 86_400
"""No wait is longer: a day."""

USAGE = """usage: python -m ckpt_cli.worker [options] VERB ARGS
One of several workers that run a ckpt command together; started by ckpt launch, torchrun -m, srun or mpirun.

  --device cpu|cuda|auto   where work on every byte is done (cpu); auto: a GPU, if each worker has one
  --backend auto|gloo|nccl how workers talk (auto: gloo, with nccl beside it on GPUs)
  --timeout SECONDS        a worker that is silent for so long is given up (60)
  --join-timeout SECONDS   how long workers wait for one another at the beginning (300)
  --bind none|cores|numa|auto
                           cores that a worker keeps to (auto)
VERB ARGS are those of ckpt."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a worker works.

    Args:
        device: where work on every byte is done, one of ``core.device.device.NAMES``.
        backend: how workers talk, one of ``BACKENDS``.
        timeout_s: a worker that gives no sign for so many seconds is given up.
        join_timeout_s: seconds that workers wait for one another at the beginning.
        bind: cores that a worker keeps to, one of ``ckpt_cli.host.binding.MODES``.
    """

    device: str = "cpu"
    backend: str = "auto"
    timeout_s: float = 60.0
    join_timeout_s: float = 300.0
    bind: str = "auto"

    def __post_init__(self) -> None:
        for option, value, known in (
            ("--device", self.device, NAMES),
            ("--backend", self.backend, BACKENDS),
            ("--bind", self.bind, MODES),
        ):
            if value not in known:
                raise UsageError(f"{option} is {value!r}, which is none of {', '.join(known)}")
        for option, seconds in (("--timeout", self.timeout_s), ("--join-timeout", self.join_timeout_s)):
            if not 1 <= seconds <= LONGEST_S:
                raise UsageError(f"{option} is {seconds:g} seconds, which is not between 1 and {LONGEST_S}")
        if self.backend == "nccl" and self.device == "cpu":
            raise UsageError("--backend nccl talks between GPUs, but --device is cpu", hint="give --device cuda")

    def as_arguments(self) -> list[str]:
        """The options as a command line has them; those that have their usual values are left out."""
        usual = WorkerOptions()
        found = []
        for option, (name, _) in _OPTIONS.items():
            if getattr(self, name) != getattr(usual, name):
                value = getattr(self, name)
                found += [option, f"{value:g}" if isinstance(value, (int, float)) else value]
        return found


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{text!r} is no number of seconds") from None


_OPTIONS: dict[str, tuple[str, Callable[[str], object]]] = {
    "--device": ("device", str),
    "--backend": ("backend", str),
    "--timeout": ("timeout_s", _seconds),
    "--join-timeout": ("join_timeout_s", _seconds),
    "--bind": ("bind", str),
}


def parsed(arguments: Sequence[str]) -> tuple[WorkerOptions, list[str]]:
    """The options, and the verb with its arguments.

    Raises:
        UsageError: an option is unknown or has no proper value, or there is no verb.
    """
    values: dict[str, object] = {}
    left = list(arguments)
    while left and left[0].startswith("-"):
        word = left.pop(0)
        if word == "--":
            break
        option, equals, value = word.partition("=")
        option = option.replace("_", "-")
        if option not in _OPTIONS:
            raise UsageError(
                f"no such option of a worker: {option}", hint="options of the command follow it; see --help"
            )
        if not equals:
            if not left:
                raise UsageError(f"{option} needs a value")
            value = left.pop(0)
        name, convert = _OPTIONS[option]
        values[name] = convert(value)
    if not left:
        raise UsageError("no command to run", hint="give one, as to ckpt: … convert SRC DST --to FORMAT")
    return replace(WorkerOptions(), **values), left  # type: ignore[arg-type]
