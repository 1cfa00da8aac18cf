"""Several hosts on one machine: namespaces with addresses of their own behind one switch.

::

    switch (a bridge) ─┬─ plug ─ host0 10.77.0.1
                       ├─ plug ─ host1 10.77.0.2
                       └─ …

A host has its own network, host name, processes, /dev/shm and temporary directory. It can be killed
with all that runs on it, and its plug can be pulled, which looks to both sides as a broken cable
does: nobody is told, packets are lost. Files are shared by all hosts, as on a cluster file system,
except the directories that are said to be private.

Linux only. Needs ``ip``, ``unshare`` and ``nsenter``, and root or the right to make user
namespaces. Nothing is left on the machine: everything belongs to the processes of the switch, which
end with this one, however it ends.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

TOOLS = ("ip", "unshare", "nsenter", "mount")
SETUP_S = 30
"""Guard against a hang while namespaces are made, in seconds."""


class NotPermittedError(Exception):
    """This machine, or this user, cannot make hosts."""


@dataclass
class Host:
    """One host.

    Args:
        number: from 0.
        name: its host name, known to all hosts.
        address: of its network card.
        pid: the first process on it, as seen from outside.
        temp_dir: its temporary directory.
        enter: command words that make what follows them run on it.
        switch: command words that make what follows them run on the switch.
    """

    number: int
    name: str
    address: str
    pid: int
    temp_dir: Path
    enter: Sequence[str]
    switch: Sequence[str]
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        output_path: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Starts a command on this host; both its outputs go to a file, or else come in
        ``stdout``.
        """
        with ExitStack() as stack:
            process = subprocess.Popen(
                [*self.enter, *map(str, command)],
                env={**(os.environ if env is None else env), "TMPDIR": str(self.temp_dir)},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE
                if output_path is None
                else stack.enter_context(output_path.open("w")),
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.running.append(process)
        return process

    def signal(self, process: subprocess.Popen[str], number: signal.Signals) -> None:
        """Sends a signal to a command of ``start``; the process that one sees from outside only
        waits for it.
        """
        for pid in _children(process.pid):
            os.kill(pid, number)

    def kill(self) -> None:
        """SIGKILL to everything on this host at once, as by a power cut.

        The plug is pulled first: a machine that lost power tells nobody of the end of its
        connections.
        """
        self.unplug()
        self.end()

    def end(self) -> None:
        """SIGKILL to everything on this host."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        for process in self.running:
            process.wait(SETUP_S)

    def unplug(self) -> None:
        """Pulls the plug: from now on no packet gets through."""
        _done([*self.switch, "ip", "link", "set", f"plug{self.number}", "down"])

    def plug(self) -> None:
        """Puts the plug back."""
        _done([*self.switch, "ip", "link", "set", f"plug{self.number}", "up"])


@contextmanager
def hosts(n: int, *, private_dirs: Mapping[Path, Path] | None = None) -> Iterator[Sequence[Host]]:
    """``n`` hosts named host0, host1, …; they are gone in the end, with what runs on them.

    Args:
        n: up to 250.
        private_dirs: directory → directory under which every host has one of its own (named after
            the host) that it sees in place of the first.

    Raises:
        NotPermittedError: with the reason.
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise NotPermittedError(f"not installed: {', '.join(missing)}")
    own_user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    same_user = ("--user", "--preserve-credentials") if own_user else ()
    names = [f"host{number}" for number in range(n)]
    addresses = [f"10.77.0.{number + 1}" for number in range(n)]
    with ExitStack() as stack:
        state_dir = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="hosts-", ignore_cleanup_errors=True)
            )
        )
        names_path = state_dir / "hosts"
        lines = [
            "127.0.0.1 localhost",
            *(f"{address} {name}" for address, name in zip(addresses, names, strict=True)),
        ]
        names_path.write_text("".join(f"{line}\n" for line in lines))
        no_servers_path = state_dir / "resolv.conf"
        no_servers_path.touch()
        switch_pid = stack.enter_context(
            _first_process(["unshare", *own_user, "--net"], "ip link add switch type bridge")
        )
        switch = ["nsenter", "--target", str(switch_pid), *same_user, "--net"]
        _done([*switch, "ip", "link", "set", "switch", "up"])
        started = []
        for number, name in enumerate(names):
            temp_dir = state_dir / name
            temp_dir.mkdir()
            script = [f"hostname {name}", "mount -t tmpfs tmpfs /dev/shm", "ip link set lo up"]
            script += [f"mount --bind {shlex.quote(str(names_path))} /etc/hosts"]
            if Path("/etc/resolv.conf").exists():
                script += [
                    (
                        f"mount --bind {shlex.quote(str(no_servers_path))} "
                        f"{Path('/etc/resolv.conf').resolve()}"
                    )
                ]
            for shared_dir, own_dir in (private_dirs or {}).items():
                (own_dir / name).mkdir(parents=True, exist_ok=True)
                script += [
                    (
                        f"mount --bind {shlex.quote(str(own_dir / name))} "
                        f"{shlex.quote(str(shared_dir))}"
                    )
                ]
            inside = ["nsenter", "--target", str(switch_pid), *same_user, "--pid"]
            pid = stack.enter_context(
                _first_process(
                    [*inside, "unshare", "--net", "--uts", "--mount"], " && ".join(script)
                )
            )
            _done(
                [
                    *switch,
                    "ip",
                    "link",
                    "add",
                    f"plug{number}",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    str(pid),
                ]
            )
            _done([*switch, "ip", "link", "set", f"plug{number}", "master", "switch", "up"])
            enter = [
                "nsenter",
                "--target",
                str(pid),
                *same_user,
                "--net",
                "--uts",
                "--mount",
                "--pid",
            ]
            _done([*enter, "ip", "addr", "add", f"{addresses[number]}/24", "dev", "eth0"])
            _done([*enter, "ip", "link", "set", "eth0", "up"])
            enter = [*enter, f"--wd={Path.cwd()}"]
            started.append(Host(number, name, addresses[number], pid, temp_dir, enter, switch))
            stack.callback(_ended, started[-1])
        yield started


def _ended(host: Host) -> None:
    host.end()
    for process in host.running:
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def _first_process(unshare: Sequence[str], script: str) -> Iterator[int]:
    """The process id, as seen from here, of the first process of new namespaces, in which
    ``script`` has been run.

    It lives until the pipe to it is closed, be it by the death of this process, and everything in
    the namespaces dies with it.
    """
    starter = subprocess.Popen(
        [
            *unshare,
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            f"{script} && echo ready && read end",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert starter.stdin is not None
    assert starter.stdout is not None
    assert starter.stderr is not None
    try:
        if starter.stdout.readline() != "ready\n":
            starter.stdin.close()
            raise NotPermittedError(starter.stderr.read().strip() or "namespaces cannot be made")
        pid = starter.pid
        while below := _children(pid):  # nsenter, unshare, sh
            pid = below[0]
        yield pid
    finally:
        starter.stdin.close()
        starter.wait(SETUP_S)
        starter.stdout.close()
        starter.stderr.close()


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _done(command: Sequence[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SETUP_S)
    if ended.returncode != 0:
        raise NotPermittedError(f"{shlex.join(command)}: {ended.stderr.strip()}")


def wait_all(processes: Sequence[subprocess.Popen[str]], *, limit_s: float) -> list[int]:
    """Exit codes of all.

    Raises:
        AssertionError: one is still running after ``limit_s`` seconds.
    """
    end = time.monotonic() + limit_s
    codes = []
    for number, process in enumerate(processes):
        try:
            codes.append(process.wait(max(end - time.monotonic(), 0.01)))
        except subprocess.TimeoutExpired as err:
            raise AssertionError(
                f"command {number} of {len(processes)} still runs after {limit_s} s"
            ) from err
    return codes
