"""Run Python programs in forks of a process that has imported torch and this project already:
``python fork_server.py SOCKET``, where SOCKET is the descriptor of a socket that keeps messages
apart.

A message is an object of JSON: ``arguments`` as an interpreter takes them (``-W ACTION``, then
``-c TEXT``, ``-m MODULE`` or a file, then the program's own), ``env``, ``cwd``. With it come four
descriptors: the program's stdin, stdout and stderr, and a pipe that is told its process id and,
when it has ended, its exit code, a line each.

megatron-core is not imported: programs patch torch before they import it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import threading
import traceback
import types
import warnings
from typing import Any, NoReturn

PRELOADED = tuple(
    """
    numpy torch torch.distributed.checkpoint torch.distributed.fsdp torch.distributed.tensor
    torch._inductor.compile_fx torch._dynamo.testing safetensors.numpy safetensors.torch
    tensorstore core.dist_checkpointing.storage_reader
    core.dist_checkpointing.storage_writer core.dist_checkpointing.strategies.fully_parallel
    core.verbs.convert.run ckpt_cli.app ckpt_cli.completion.answer core.formats.registry
    """.split()
)
"""What cannot be imported is passed over."""
MESSAGE_BYTES = 1 << 17
"""Less than the buffer of a socket, 208 KiB by default."""


def serve(socket_fd: int) -> None:
    """Run a program for each message, until the other end is closed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in PRELOADED:
            try:
                importlib.import_module(name)
            except ImportError:
                continue
    gc.collect()
    gc.freeze()  # so that forks do not copy pages for the sake of the collector
    connection = socket.socket(fileno=socket_fd)
    running = 0
    while True:
        message, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 4)
        if not message:
            return
        while running and os.waitpid(-1, os.WNOHANG)[0]:
            running -= 1
        running += 1
        if os.fork() == 0:
            connection.close()
            _start(json.loads(message), fds)
        for fd in fds:
            os.close(fd)


def _start(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Fork the program, and report its process id and its exit code."""
    pid = os.fork()
    if pid == 0:
        _be_program(request, fds)
    for fd in fds[:3]:
        os.close(fd)
    os.write(fds[3], f"{pid}\n".encode())
    status = os.waitpid(pid, 0)[1]
    os.write(fds[3], f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _be_program(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Run the program to its end, as an interpreter would."""
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)
    code = 1
    try:
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.path[1:1] = filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))
        _run(request["arguments"])
        code = 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            code = end.code or 0
        else:
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(code)


def _run(arguments: list[str]) -> None:
    # What the server ignores, a program may show; these are the interpreter's own filters.
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    while arguments[0] == "-W":
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        arguments = arguments[2:]
    if arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), module.__dict__)
    elif arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # whoever starts it names the project's folder
    serve(int(sys.argv[1]))
