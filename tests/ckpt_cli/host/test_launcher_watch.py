"""ckpt_cli.host.launcher_watch: a worker ends when its launcher has been killed."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHER = """
import os, signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], start_new_session=True)
signal.pause()
"""
WORKER = """
import os, sys, time
from ckpt_cli.host import launcher_watch
from ckpt_cli.screen.failure import Terminated, end_on_signals
launcher_watch._END_S = 1.0 if IS_STUCK else 60.0
end_on_signals()
launcher_watch.end_with(int(sys.argv[1]))
try:
    os.write(1, b"works, ")
    time.sleep(1000)
except Terminated:
    os.write(1, b"is told")
    if IS_STUCK:
        time.sleep(1000)
"""


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_worker_does_not_outlive_a_launcher_that_is_killed(
    repo_dir: Path, *, is_stuck: bool
) -> None:
    worker = WORKER.replace("IS_STUCK", str(is_stuck))
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, worker], cwd=repo_dir, stdout=subprocess.PIPE, bufsize=0
    ) as launcher:
        assert launcher.stdout is not None
        waiting = select.poll()
        waiting.register(launcher.stdout, select.POLLIN | select.POLLHUP)
        output = os.read(launcher.stdout.fileno(), 100) if waiting.poll(60_000) else b""
        launcher.kill()
        while waiting.poll(60_000):
            part = os.read(launcher.stdout.fileno(), 100)
            output += part
            if not part:  # the worker has ended: nobody holds the pipe any more
                break
        else:
            pytest.fail("the worker still runs")
    assert output == b"works, is told"
