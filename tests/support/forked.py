"""Run programs in processes of their own that need not import torch again (``fork_server.py``).

Use it for what another process does with the project's files. A test of the start itself (what is
imported, options of the interpreter) needs ``subprocess``.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests.support.fork_server import MESSAGE_BYTES

ROOT = Path(__file__).resolve().parents[2]
SERVER = Path(__file__).with_name("fork_server.py")


class Forked:
    """A running program.

    Args:
        status_fd: a pipe from which its process id is read, then its exit code.
    """

    def __init__(self, status_fd: int) -> None:
        self._status_fd = status_fd
        self.pid = self._number()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the program has ended, and return its exit code; negative for a signal.

        Args:
            timeout: seconds after which it is killed.
        """
        # select() takes no descriptor above 1023.
        poll = select.poll()
        poll.register(self._status_fd, select.POLLIN)
        try:
            if not poll.poll(None if timeout is None else 1000 * timeout):
                with suppress(ProcessLookupError):  # it may have ended by now
                    os.kill(self.pid, signal.SIGKILL)
            return self._number()
        finally:
            os.close(self._status_fd)

    def _number(self) -> int:
        line = b""
        while not line.endswith(b"\n"):
            read = os.read(self._status_fd, 1)
            if not read:
                _server.cache_clear()  # the next program gets another one
                raise RuntimeError("the server of forks has ended")
            line += read
        return int(line)


def start(
    arguments: Sequence[object],
    *,
    stdin: int,
    stdout: int,
    stderr: int,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Forked:
    """Start a program.

    Args:
        arguments: of the interpreter: ``-W ACTION`` first, then ``-c TEXT``, ``-m MODULE`` or a
            file, then the program's own.
        stdin, stdout, stderr: descriptors, which the caller may close afterwards.
        env: its environment; this process's by default.
        cwd: the project's folder by default.
    """
    request = {
        "arguments": [str(argument) for argument in arguments],
        "env": dict(os.environ if env is None else env),
        "cwd": str(cwd or ROOT),
    }
    message = json.dumps(request).encode()
    assert len(message) <= MESSAGE_BYTES
    reader, writer = os.pipe()
    socket.send_fds(_server(os.getpid()), [message], [stdin, stdout, stderr, writer])
    os.close(writer)
    return Forked(reader)


def run(
    arguments: Sequence[object],
    *,
    input: str = "",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: int = 300,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, like ``subprocess.run`` with captured text.

    Args:
        arguments, env, cwd: as in ``start``.
        input: what it reads.
        timeout: seconds after which it is killed.

    Raises:
        subprocess.CalledProcessError: with ``check``, it failed.
    """
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        given.write(input.encode())
        given.seek(0)
        program = start(
            arguments,
            stdin=given.fileno(),
            stdout=out.fileno(),
            stderr=err.fileno(),
            env=env,
            cwd=cwd,
        )
        code = program.wait(timeout)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    done = subprocess.CompletedProcess(list(map(str, arguments)), code, *texts)
    if check:
        done.check_returncode()
    return done


@cache
def _server(owner: int) -> socket.socket:
    """Start the server of this process, which ends with it, and return its socket.

    Args:
        owner: this process: a fork of it has a server of its own.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(SERVER), str(theirs.fileno())],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()

    @atexit.register
    def close() -> None:
        if os.getpid() == owner:
            with suppress(OSError):  # it has ended already
                ours.shutdown(socket.SHUT_RDWR)
            ours.close()
            process.wait()

    return ours
