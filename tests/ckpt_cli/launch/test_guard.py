"""ckpt_cli.launch.guard: an agent that comes to no end is not waited for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from ckpt_cli.host.results import WorkerResult, write_result
from ckpt_cli.launch import guard
from ckpt_cli.launch.agent import Attempt, LaunchHistory
from ckpt_cli.launch.failure import Ended
from ckpt_cli.launch.guard import AgentDeadlines, Limits, Overdue, find_worker_processes


def started(history: LaunchHistory, tmp_path: Path) -> Path:
    number = len(history.attempts)
    folder = tmp_path / f"attempt_{number}"
    folder.mkdir()
    history.attempts.append(Attempt(number, number, folder, (0, 1), (None, None)))
    history.first = None
    return folder


def test_failed_workers_are_to_be_started_again_within_the_limit(tmp_path: Path) -> None:
    history, deadlines = LaunchHistory(), AgentDeadlines(Limits(10, 30, 1))
    assert deadlines.check(history, 0) is None
    folder = started(history, tmp_path)
    assert deadlines.check(history, 1000) is None
    write_result(folder, WorkerResult(1, "here", 1, 6))
    assert deadlines.check(history, 2000) is None
    assert deadlines.check(history, 2010) is None
    assert deadlines.check(history, 2011) == Overdue(False, True, 11)


def test_a_process_that_the_agent_saw_fail_counts_without_a_result(tmp_path: Path) -> None:
    history, deadlines = LaunchHistory(), AgentDeadlines(Limits(10, 30, 1))
    started(history, tmp_path)
    history.first = Ended(0, -9)
    assert deadlines.check(history, 0) is None
    assert deadlines.check(history, 11) == Overdue(False, True, 11)


def test_new_workers_have_all_the_time_again(tmp_path: Path) -> None:
    history, deadlines = LaunchHistory(), AgentDeadlines(Limits(10, 30, 1))
    folder = started(history, tmp_path)
    write_result(folder, WorkerResult(1, "here", 1, 6))
    assert deadlines.check(history, 0) is None
    started(history, tmp_path)
    assert deadlines.check(history, 100) is None
    assert deadlines.check(history, 1000) is None


def test_after_the_last_restart_the_agent_only_has_to_end_the_workers_and_leave(
    tmp_path: Path,
) -> None:
    history, deadlines = LaunchHistory(), AgentDeadlines(Limits(1000, 30, 0))
    write_result(started(history, tmp_path), WorkerResult(1, "here", 1, 6))
    assert deadlines.check(history, 0) is None
    assert deadlines.check(history, 45) is None
    assert deadlines.check(history, 46) == Overdue(False, False, 46)


def test_the_other_agents_are_not_waited_for_for_ever_when_the_work_is_done(tmp_path: Path) -> None:
    history, deadlines = LaunchHistory(), AgentDeadlines(Limits(10, 30, 1))
    folder = started(history, tmp_path)
    for rank in (0, 1):
        assert deadlines.check(history, 0) is None
        write_result(folder, WorkerResult(rank, "here", 1, 1))
    assert deadlines.check(history, 5) is None
    assert deadlines.check(history, 60) is None
    assert deadlines.check(history, 66) == Overdue(True, False, 61)


def test_the_guard_ends_a_process_that_is_stuck_and_the_workers_that_are_left(
    repo_dir: Path, tmp_path: Path
) -> None:
    code = """
import subprocess, sys, time
from pathlib import Path
from ckpt_cli.launch.agent import Attempt, LaunchHistory
from ckpt_cli.launch.guard import Limits, guard_agent
from ckpt_cli.host.results import WorkerResult, write_result
folder = Path(sys.argv[1])
left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
(folder / "pid").write_text(str(left.pid))
write_result(folder, WorkerResult(1, "here", 1, 6, "no space"))
history = LaunchHistory(attempts=[Attempt(0, 0, folder, (0, 1), (None, None))])
def end(overdue):
    print(history.results[1].line, overdue.is_done, flush=True)
    return 8
with guard_agent(history, Limits(0.1, 30, 1), on_wait=print, end=end):
    time.sleep(1000)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=repo_dir,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (8, "no space False\n"), done.stderr
    cmdline_path = Path(f"/proc/{(tmp_path / 'pid').read_text()}/cmdline")
    assert not cmdline_path.exists() or not cmdline_path.read_bytes(), (
        "it runs no more; whoever inherits it may not have asked yet"
    )


def test_a_signal_ends_a_process_that_native_code_keeps_from_hearing_it(repo_dir: Path) -> None:
    code = """
import ctypes, os, signal, threading
from ckpt_cli.screen.failure import end_on_signals
from ckpt_cli.launch.agent import LaunchHistory
from ckpt_cli.launch.guard import Limits, guard_agent
end_on_signals()
end = lambda overdue: print(overdue.signal, flush=True) or 130
with guard_agent(LaunchHistory(), Limits(100, 100, 1), on_wait=print, end=end):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    ctypes.CDLL(None).sleep(1000)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repo_dir, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (130, "2\n"), done.stderr


@pytest.mark.skipif(shutil.which("ps") is None, reason="ps is not installed")
def test_worker_processes_are_found_without_proc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_group = subprocess.Popen(["sleep", "60"], start_new_session=True)
    other = subprocess.Popen(["sleep", "60"])
    try:
        assert in_group.pid in find_worker_processes()
        list_them = partial(guard._processes, tmp_path)
        monkeypatch.setattr(guard, "_processes", list_them)
        pids = find_worker_processes()
        assert in_group.pid in pids and other.pid not in pids
    finally:
        for child in (in_group, other):
            child.kill()
            child.wait()
