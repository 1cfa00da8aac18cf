"""Jobs on several hosts, and the hosts themselves."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

import pytest

from core.publish.stage.folder_lock import WORKERS_LOCK, stage_dir_of
from tests.ckpt_cli.launch.hosts import Host, NotPermittedError, hosts, wait_all
from tests.ckpt_cli.launch.jobs import (
    CKPT,
    LIMIT_S,
    WORKER,
    environment,
    is_copying,
    tree,
    wait_for,
)

TIMEOUT_S = 5
"""``--timeout`` of the jobs here: what belongs to a host that is gone is given up after it."""

LISTEN = """
import socket, sys
server = socket.create_server(("", 4000))
print("listening", flush=True)
while True:
    connection, _ = server.accept()
    connection.sendall(socket.gethostname().encode())
    connection.close()
"""
ASK = """
import socket, sys, time
end = time.monotonic() + float(sys.argv[1])
while True:
    try:
        with socket.create_connection(("host0", 4000), timeout=1) as connection:
            sys.exit(print(connection.recv(100).decode()))
    except OSError as err:
        if time.monotonic() > end:
            sys.exit(str(err))
"""


@contextmanager
def permitted_hosts(
    n: int, *, private_dirs: Mapping[Path, Path] | None = None
) -> Iterator[Sequence[Host]]:
    """Hosts; the test is skipped where they cannot be made."""
    with ExitStack() as stack:
        try:
            started = stack.enter_context(hosts(n, private_dirs=private_dirs))
        except NotPermittedError as err:
            pytest.skip(f"hosts cannot be made here: {err}")
        yield started


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Sequence[Host]]:
    """Two hosts; ``own`` in the test's directory is another one on each."""
    (tmp_path / "own").mkdir()
    with permitted_hosts(2, private_dirs={tmp_path / "own": tmp_path / "owns"}) as machines:
        yield machines


def run_on(host: Host, *command: str | Path) -> tuple[int, str]:
    """Exit code and output of a command."""
    process = host.start(command)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def test_hosts_reach_each_other_unless_a_plug_is_pulled(two_hosts: Sequence[Host]) -> None:
    server = two_hosts[0].start([sys.executable, "-c", LISTEN])
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    assert run_on(two_hosts[1], sys.executable, "-c", ASK, "30") == (0, "host0\n")
    two_hosts[1].unplug()
    code, output = run_on(two_hosts[1], sys.executable, "-c", ASK, "0")
    assert code == 1, output
    two_hosts[1].plug()
    assert run_on(two_hosts[1], sys.executable, "-c", ASK, "30") == (0, "host0\n")
    two_hosts[0].kill()
    assert wait_all([server], limit_s=60) == [-9]


def test_hosts_share_files_but_for_private_directories(
    two_hosts: Sequence[Host], tmp_path: Path
) -> None:
    for host in two_hosts:
        script = f"touch {tmp_path}/$(hostname) {tmp_path}/own/$(hostname) && ls -x {tmp_path}/own"
        assert run_on(host, "sh", "-c", script) == (0, f"{host.name}\n")
    assert {path.name for path in tmp_path.iterdir()} == {"own", "owns", "host0", "host1"}
    assert list((tmp_path / "own").iterdir()) == []


@dataclass
class Launched:
    """One job on several hosts.

    Args:
        machines: on which it runs.
        source, dst: of the conversion.
        options: of ``ckpt launch``, beside those that all jobs here have.
        is_by_hand: start the workers without a launcher, which is quicker.
    """

    machines: Sequence[Host]
    source: Path
    dst: Path
    options: Sequence[str] = ()
    is_by_hand: bool = False
    processes: list[Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._earlier_run = _run_of(self.dst)
        self._logs_dir = self.dst.parent.with_name(f"{self.dst.parent.name}.logs")
        self._logs_dir.mkdir(exist_ok=True)
        for machine in self.machines:
            words, variables = self._by_hand(machine) if self.is_by_hand else (self._launch(), {})
            words += ["--timeout", str(TIMEOUT_S), *self.options]
            words += ["--", "convert", str(self.source), str(self.dst), "--to", "dcp", "--json"]
            self.processes.append(
                machine.start(
                    words,
                    env=environment(variables),
                    cwd=self._logs_dir,
                    output_path=self._log(machine),
                )
            )

    def _launch(self) -> list[str]:
        words = [*CKPT, "launch", "--nnodes", str(len(self.machines)), "--nproc-per-node", "1"]
        words += ["--rdzv-endpoint", f"{self.machines[0].name}:29400"]
        return [*words, "--rejoin-timeout", "5", "--shutdown-timeout", "3"]

    def _by_hand(self, machine: Host) -> tuple[list[str], dict[str, str]]:
        place = {"RANK": str(self.machines.index(machine)), "WORLD_SIZE": str(len(self.machines))}
        return [*WORKER], {**place, "MASTER_ADDR": self.machines[0].name, "MASTER_PORT": "29500"}

    def _log(self, machine: Host) -> Path:
        return self._logs_dir / machine.name

    def printed(self) -> list[str]:
        """Outputs, by host."""
        return [self._log(machine).read_text() for machine in self.machines]

    def wait_until_copying(self) -> None:
        """Returns when the workers have begun to write."""
        wait_for(
            lambda: is_copying(self.dst) and _run_of(self.dst) != self._earlier_run,
            self.processes[0],
        )

    def codes(self) -> list[int]:
        """Exit codes, by host, when all have ended."""
        try:
            return wait_all(self.processes, limit_s=LIMIT_S)
        except AssertionError as err:
            raise AssertionError("\n".join([str(err), *self.printed()])) from err


def _run_of(dst: Path) -> bytes:
    """What tells the runs that work in a stage apart."""
    path = stage_dir_of(dst) / WORKERS_LOCK
    return path.read_bytes() if path.exists() else b""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where destinations are."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def names_in(place: Path) -> list[str]:
    return [path.name for path in place.iterdir()]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.long
def test_a_job_goes_on_after_a_host_was_killed_and_a_plug_pulled(
    source: Path, wanted: dict[str, str], place: Path
) -> None:
    dst = place / "out"
    with permitted_hosts(3) as (first, second, spare):
        job = Launched([first, second], source, dst, ["--max-restarts", "0"])
        job.wait_until_copying()
        second.kill()
        assert job.codes()[0] == 8, job.printed()
        assert "host1" in job.printed()[0]
        assert names_in(place) == [stage_dir_of(dst).name]

        job = Launched([first, spare], source, dst, ["--max-restarts", "0"])
        job.wait_until_copying()
        spare.unplug()
        assert job.codes() == [8, 8], job.printed()
        assert "host2" in job.printed()[0]
        assert "host0" in job.printed()[1]
        assert names_in(place) == [stage_dir_of(dst).name]

        spare.plug()
        job = Launched([first, spare], source, dst)
        assert job.codes() == [0, 0], job.printed()
    assert tree(dst) == wanted
    assert names_in(place) == ["out"]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.long  # a worker that is killed on one host is test_run's
@pytest.mark.parametrize(("victim", "max_restarts"), [(1, 0), (0, 0), (1, 2), (0, 2)])
def test_what_a_killed_host_leaves_is_finished_by_the_other(
    victim: int, max_restarts: int, source: Path, wanted: dict[str, str], place: Path
) -> None:
    dst = place / "out"
    with permitted_hosts(2) as machines:
        job = Launched(machines, source, dst, ["--max-restarts", str(max_restarts)])
        job.wait_until_copying()
        machines[victim].kill()
        assert job.codes()[1 - victim] == 8, job.printed()
        assert f"host{victim}" in job.printed()[1 - victim]
        assert names_in(place) == [stage_dir_of(dst).name]
        again = Launched([machines[1 - victim]], source, dst)
        assert again.codes() == [0], again.printed()
    assert tree(dst) == wanted
    assert names_in(place) == ["out"]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.long
def test_hosts_that_do_not_share_the_destination_are_named(source: Path, place: Path) -> None:
    with permitted_hosts(2, private_dirs={place: place.with_name("places")}) as machines:
        job = Launched(machines, source, place / "out", is_by_hand=True)
        assert job.codes() == [2, 2], job.printed()
        assert "host1 cannot see the unfinished destination" in job.printed()[0]
        assert f"  at: file {stage_dir_of(place / 'out')}/data" in job.printed()[0]
        assert job.printed()[1] == ""
    assert names_in(place.with_name("places") / "host1") == []


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.long
def test_four_hosts_make_the_same_bytes_as_one_process(
    source: Path, wanted: dict[str, str], place: Path
) -> None:
    with permitted_hosts(4) as machines:
        job = Launched(machines, source, place / "out")
        assert job.codes() == [0, 0, 0, 0], job.printed()
    assert tree(place / "out") == wanted
    reports = [text.splitlines()[-1] for text in job.printed() if "ckpt.transfer" in text]
    (figures,) = [
        json.loads(report)["launch"] for report in reports
    ]  # of rank 0, which may be on any host
    assert {worker["host"] for worker in figures["workers"]} == {"host0", "host1", "host2", "host3"}
