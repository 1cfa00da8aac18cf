"""Runs command lines one by one in children with limits, forked from a process that has imported
what they use: ``python server.py COMMANDS``.

COMMANDS, as JSON: lists of words, with SRC for a checkpoint; each is run once before the first
fork, so that children find what it imports and parses. A line of JSON on stdin, ``[[argument, …],
working directory]``; a line on stdout: how the command ended, what it printed, the processor time
it took and by how much its memory grew.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import resource
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import NoReturn

WALL_S = 600
CPU_S = 40
ADDRESS_BYTES = 2 << 30
_PRELOADED = tuple(
    """
    ckpt_cli.app ckpt_cli.commands.inspect ckpt_cli.commands.convert
    ckpt_cli.commands.validate core.verbs.convert.run core.verbs.validate.run core.formats
    core.verbs.inspect.summary numpy zstandard ckpt_cli.findings.grouping
    ckpt_cli.commands.diff ckpt_cli.pages.diff_page ckpt_cli.findings.json_report
    ckpt_cli.findings.text ckpt_cli.commands.manifest core.verbs.diff.run
    core.verbs.diff.tensor_pass core.hf.to_hf core.hf.to_megatron
    core.publish.manifest.inventory
    """.split()
)


def serve() -> None:
    """Answers every line of stdin."""
    for name in _PRELOADED:
        import_module(name)
    from core.formats.registry import formats
    from core.verbs.checks.registry import MODULES

    for row in MODULES:
        row.load()
    formats()
    _run_once(json.loads(sys.argv[1]))
    gc.collect()
    gc.freeze()  # so that forks do not copy pages for the sake of the collector
    for line in sys.stdin:
        arguments, folder = json.loads(line)
        sys.stdout.write(json.dumps(_run(arguments, folder)) + "\n")
        sys.stdout.flush()


def _run_once(commands: list[list[str]]) -> None:
    """Runs commands here, on a sound checkpoint."""
    from ckpt_cli.app import main
    from tests.hostile.cases import SOUND

    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.chdir(folder),
    ):
        source = str(SOUND["sound dcp"](Path(folder)))
        for words in commands:
            main([source if word == "SRC" else word for word in words])


def _run(arguments: list[str], folder: str) -> dict[str, object]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begun = time.monotonic()
        before = _resident_bytes()
        pid = os.fork()
        if pid == 0:
            _be_child(arguments, folder, out.fileno(), err.fileno())
        _, status, used = _waited(pid, begun + WALL_S)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(1 << 22).decode("utf-8", "surrogateescape"))
    return {
        "code": os.waitstatus_to_exitcode(status),
        "out": texts[0],
        "err": texts[1],
        "cpu_s": used.ru_utime + used.ru_stime,
        "grown_bytes": max(0, (used.ru_maxrss << 10) - before),
    }


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _waited(pid: int, deadline: float) -> tuple[int, int, resource.struct_rusage]:
    while True:
        waited = os.wait4(pid, os.WNOHANG)
        if waited[0]:
            return waited
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            return os.wait4(pid, 0)
        time.sleep(0.002)


def _be_child(arguments: list[str], folder: str, out: int, err: int) -> NoReturn:
    code = 99
    try:
        os.chdir(folder)
        os.dup2(out, 1)
        os.dup2(err, 2)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        with open("/proc/self/statm", "rb") as statm:
            mapped = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_BYTES, mapped + ADDRESS_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)
        from ckpt_cli.app import main

        code = main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        os.write(2, traceback.format_exc().encode("utf-8", "replace"))
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve()
