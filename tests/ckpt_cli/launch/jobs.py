"""Whole runs of ``ckpt launch`` for the tests: a source that takes a while to copy, commands, and
what they leave.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from core.publish.stage.folder_lock import stage_dir_of

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 120
"""Guard against a hang, far above what any command here takes."""
CKPT = (sys.executable, "-m", "ckpt_cli")
WORKER = (sys.executable, "-m", "ckpt_cli.worker")
_ROWS, _COLUMNS, _TENSORS = 2048, 2048, 24
"""bf16: 8 MiB a tensor."""


def write_source(folder: Path) -> Path:
    """A safetensors file of 192 MiB, in which no two places are alike."""
    folder.mkdir()
    header, offset = {}, 0
    for number in range(_TENSORS):
        end = offset + 2 * _ROWS * _COLUMNS
        header[f"layers.{number}.weight"] = {
            "dtype": "BF16",
            "shape": [_ROWS, _COLUMNS],
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number in range(_TENSORS):
            file.write(np.random.default_rng(number).bytes(2 * _ROWS * _COLUMNS))
    return folder


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """For a command: this process's, without what a launcher may have put there."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "OMPI_", "PMI_"))
    }
    return {**environ, "PYTHONPATH": str(ROOT), "COLUMNS": "1000", **(more or {})}


def start(
    command: tuple[str | Path, ...], output_path: Path, more: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a command; stdout goes to a file, and stderr to one beside it that ends in
    ``.err``.
    """
    with output_path.open("wb") as output, output_path.with_suffix(".err").open("wb") as errors:
        return subprocess.Popen(
            [str(word) for word in command],
            stdout=output,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            env=environment(more),
            cwd=output_path.parent,
        )


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command came to.

    Args:
        code: exit code.
        output, errors: what it printed.
    """

    code: int
    output: str
    errors: str


def ran(
    command: tuple[str | Path, ...], output_path: Path, more: Mapping[str, str] | None = None
) -> Ran:
    """Runs a command to its end."""
    return ended(start(command, output_path, more), output_path)


def ended(process: subprocess.Popen[bytes], output_path: Path) -> Ran:
    """Waits for a command of ``start``.

    Raises:
        AssertionError: it has not ended in time.
    """
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise AssertionError(f"still runs after {LIMIT_S} s: {output_path.read_text()}") from None
    return Ran(code, output_path.read_text(), output_path.with_suffix(".err").read_text())


def tree(place: Path) -> dict[str, str]:
    """Digests of the files of a directory, by path."""
    return {
        str(path.relative_to(place)): xxhash.xxh3_128_hexdigest(path.read_bytes())
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }


def wait_for(
    is_done: Callable[[], bool], process: subprocess.Popen[bytes] | subprocess.Popen[str]
) -> None:
    """Waits until something has happened while a process runs.

    Raises:
        AssertionError: the process ended before, or it has not happened in time.
    """
    end = time.monotonic() + LIMIT_S
    while not is_done():
        assert process.poll() is None, "ended before it could be disturbed"
        assert time.monotonic() < end, f"has not happened within {LIMIT_S} s"
        time.sleep(0.002)


def is_copying(dst: Path) -> bool:
    """Whether a job has begun to copy tensors: its files have their size from the beginning, but
    hold zeros.
    """
    return any(_holds_data(path) for path in (stage_dir_of(dst) / "data").glob("*"))


def _holds_data(path: Path) -> bool:
    """Whether one of the places looked at, one in each MiB, is not zero; the source has no zeros to
    speak of.
    """
    with path.open("rb", buffering=0) as file:
        for place in range(1 << 19, path.stat().st_size, 1 << 20):
            file.seek(place)
            if any(file.read(64)):
                return True
    return False


def workers_below(pid: int) -> Iterator[int]:
    """Process ids of the workers that a process has started, directly or not, in the order of their
    start.
    """
    for child in children(pid):
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"ckpt_cli.worker" in words:
            yield child
        else:
            yield from workers_below(child)


def children(pid: int) -> list[int]:
    """Process ids of the children of a process."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_worker(launcher: subprocess.Popen[bytes], number: int) -> None:
    """SIGKILL to the worker that was started as number ``number``, from 0."""
    os.kill(list(workers_below(launcher.pid))[number], signal.SIGKILL)
