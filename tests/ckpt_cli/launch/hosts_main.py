r"""scripts/hosts: runs a command on each of several hosts, made of namespaces on this machine.

The hosts are called host0, host1, … and reach each other by these names; they share all files.
{number} and {name} in the command stand for those of the host. For example, resharding on two hosts
of which one is killed after 20 s:

  scripts/hosts 2 --kill host1@20 -- ckpt launch --nnodes 2 --nproc-per-node 2 --rdzv-endpoint
  host0:29400 \
      --max-restarts 0 --timeout 10 -- reshard SRC DST --tp-new 4

Exits with the first code that is not 0 of a host that was not killed, with 1 if a command outlives
--limit, and with 77, saying why, where hosts cannot be made: that takes Linux and root, or the
right to make user namespaces.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.ckpt_cli.launch.hosts import Host, NotPermittedError, hosts

SKIPPED = 77
"""Exit code by which test runners know that something could not be tried."""


def main() -> int:
    """Parses the command line, runs."""
    parser = argparse.ArgumentParser(
        prog="scripts/hosts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("n", type=int, choices=range(1, 251), metavar="N", help="number of hosts")
    parser.add_argument("command", nargs="+", help="what to run on each, after --")
    parser.add_argument("--kill", type=_event, action="append", default=[], metavar="HOST@SECONDS")
    parser.add_argument(
        "--unplug", type=_event, action="append", default=[], metavar="HOST@SECONDS"
    )
    parser.add_argument(
        "--plug", type=_event, action="append", default=[], metavar="HOST@SECONDS", help="in again"
    )
    parser.add_argument(
        "--private",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="another on every host, namely DIR.private/HOST",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=3600,
        metavar="SECONDS",
        help="for the whole (default: an hour)",
    )
    options = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    private_dirs = {
        folder.resolve(): folder.resolve().with_name(f"{folder.name}.private")
        for folder in options.private
    }
    names = {f"host{number}" for number in range(options.n)}
    for name, _ in (*options.kill, *options.unplug, *options.plug):
        if name not in names:
            parser.error(f"{name} is none of the {options.n} hosts")
    try:
        with hosts(options.n, private_dirs=private_dirs) as started:
            return run(started, options)
    except NotPermittedError as err:
        print(f"scripts/hosts: skipped, hosts cannot be made here: {err}", file=sys.stderr)
        return SKIPPED


def run(machines: Sequence[Host], options: argparse.Namespace) -> int:
    """Runs the command on every host, and lets happen what was asked for at its time."""
    running = [
        host.start([word.format(number=host.number, name=host.name) for word in options.command])
        for host in machines
    ]
    printers = [
        threading.Thread(target=_print, args=pair) for pair in zip(machines, running, strict=True)
    ]
    for printer in printers:
        printer.start()
    events = sorted(
        (at, name, kind)
        for kind in ("kill", "unplug", "plug")
        for name, at in getattr(options, kind)
    )
    begun = time.monotonic()
    killed = set()
    while any(process.poll() is None for process in running):
        seconds = time.monotonic() - begun
        if events and events[0][0] <= seconds:
            _, name, action = events.pop(0)
            host = next(host for host in machines if host.name == name)
            print(
                f"scripts/hosts: {action} {name}, {seconds:.1f} s after the beginning", flush=True
            )
            getattr(host, action)()
            killed |= {name} if action == "kill" else set()
        if seconds > options.limit:
            print(f"scripts/hosts: a command still runs after {options.limit:g} s", file=sys.stderr)
            return 1
        time.sleep(0.05)
    for printer in printers:
        printer.join()
    codes = [
        process.returncode
        for host, process in zip(machines, running, strict=True)
        if host.name not in killed
    ]
    return next((code for code in codes if code), 0)


def _print(host: Host, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"[{host.name}] {line}", end="", flush=True)


def _event(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("@")
    return name, float(seconds)


if __name__ == "__main__":
    sys.exit(main())
