"""Jobs on several hosts, and the hosts themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launch.hosts import Host, NotPermittedError, hosts, wait_all

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


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Sequence[Host]]:
    """Two hosts; ``shared`` in the test's directory is shared, ``own`` is not."""
    (tmp_path / "own").mkdir()
    with ExitStack() as stack:
        try:
            found = stack.enter_context(hosts(2, private_dirs={tmp_path / "own": tmp_path / "owns"}))
        except NotPermittedError as err:
            pytest.skip(f"hosts cannot be made here: {err}")
        yield found


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


def test_hosts_share_files_but_for_private_directories(two_hosts: Sequence[Host], tmp_path: Path) -> None:
    for host in two_hosts:
        script = f"touch {tmp_path}/$(hostname) {tmp_path}/own/$(hostname) && ls -x {tmp_path}/own"
        assert run_on(host, "sh", "-c", script) == (0, f"{host.name}\n")
    assert {path.name for path in tmp_path.iterdir()} == {"own", "owns", "host0", "host1"}
    assert list((tmp_path / "own").iterdir()) == []
