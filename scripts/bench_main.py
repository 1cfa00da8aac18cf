"""scripts/bench: the speed and the memory of whole commands, as ratios measured in one run.

"Copy" is ``cp -r`` plus fsync of the copied files. A ratio is the wall time of the whole command, start-up and commit
included, by the time of a copy of its source; both run on a warm page cache, in turn, and the median of the ratios
counts. Checksums and digests are on. Sources are made by torch (bench_sources.py); torch_dist by our own writer, since
megatron-core needs a model to write it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

from bench_measure import Case, CommandError, Run, ckpt, in_turn, remove, run, table, warm

GIB = 1 << 30
TARGETS = ("torch", "dcp", "torch_dist", "megatron")
SOURCES = {"torch": "torch", "dcp-1": "dcp", "dcp-4": "dcp", "megatron-tp8": "megatron", "torch_dist": "torch_dist"}
"""Kind of source → the format that it is in."""

PEERS = {"torch": "torch_save_to_dcp", "dcp-1": "dcp_to_torch_save", "dcp-4": "dcp_to_torch_save"}
"""Kind of source → torch's converter for it."""
CALL_PEER = (
    "import sys; from torch.distributed.checkpoint import format_utils as f; getattr(f, sys.argv[1])(*sys.argv[2:])"
)
TIME_PICKLE = """
import pickle, sys, time, torch.distributed.checkpoint
data = open(sys.argv[1], "rb").read()
began = time.perf_counter(); pickle.loads(data); print(time.perf_counter() - began)
"""
HEAVY = {"torch", "numpy", "zarr", "tensorstore"}


class Bench:
    """One run of the bench: its options, its scratch directory and the rows so far."""

    def __init__(self, options: argparse.Namespace, scratch_dir: Path) -> None:
        self.options = options
        self.scratch_dir = scratch_dir
        self.cases: list[Case] = []
        self.failures: list[str] = []

    def wants(self, name: str) -> bool:
        return self.options.only is None or re.search(self.options.only, name) is not None

    def add(self, case: Case) -> None:
        self.cases.append(case)
        print(table([case]).splitlines()[-1], file=sys.stderr, flush=True)

    @contextmanager
    def tolerant(self, name: str) -> Iterator[None]:
        """Around the work for some rows: a command that fails is reported at the end and ends nothing else."""
        try:
            yield
        except CommandError as err:
            self.failures.append(f"{name}: {err}")
            print(f"{name}: FAILED\n{err}", file=sys.stderr, flush=True)
            for left in ("written", "copied"):
                remove(self.scratch_dir / left)

    @contextmanager
    def source(self, kind: str, n_bytes: int) -> Iterator[Path]:
        """A checkpoint of that kind, removed afterwards."""
        folder = self.scratch_dir / f"{kind}-{n_bytes}"
        print(f"making {kind}, {n_bytes / GIB:.3g} GiB", file=sys.stderr, flush=True)
        try:
            if kind == "torch_dist":
                with self.source("megatron-tp8", n_bytes) as ranks:
                    run(ckpt("convert", ranks, folder, "--to", "torch_dist", "-q"))
            else:
                maker = Path(__file__).with_name("bench_sources.py")
                run([sys.executable, "-W", "ignore", maker, kind, folder, "--bytes", str(n_bytes)])
            yield folder
        finally:
            remove(folder)

    # ---- the rows of the table

    def convert(self) -> None:
        """Between any two raw formats; once more without fsync on both sides; torch's own converters beside ours."""
        for kind, format in SOURCES.items():
            names = {to: f"convert {kind} → {to}" for to in TARGETS if to != format or kind == "dcp-4"}
            peer = PEERS.get(kind)
            peer_name = f"{peer} of torch, {kind}"
            if not any(map(self.wants, [*names.values(), peer_name] if peer else names.values())):
                continue
            with self.tolerant(f"source {kind}"), self.source(kind, round(self.options.size * GIB)) as src:
                for to, name in names.items():
                    self._transfer(name, src, ["convert", "--to", to], reach=1.0, aim=0.75)
                if peer and self.wants(peer_name):
                    with self.tolerant(peer_name):
                        self.add(self._peer(peer_name, peer, src, fsync=True))
                        if peer == "dcp_to_torch_save":  # torch.save does not fsync; dcp.save does
                            self.add(self._peer(f"{peer_name}, no fsync", peer, src, fsync=False))

    def reshard(self) -> None:
        """TP8 → TP4 and TP4 → TP8."""
        for old, new in ((8, 4), (4, 8)):
            name = f"reshard TP{old} → TP{new}"
            if self.wants(name):
                with self.source(f"megatron-tp{old}", round(self.options.size * GIB)) as src:
                    self._transfer(name, src, ["reshard", "--tp-new", str(new)], reach=1.2, aim=0.9)

    def _transfer(self, name: str, src: Path, arguments: list[str], *, reach: float, aim: float) -> None:
        """One job with fsync on both sides, and one without on either."""
        verb, *options = arguments
        for fsync in (True, False):
            if not self.wants(name) or (self.options.no_unsynced and not fsync):
                continue
            full = name if fsync else f"{name}, no fsync"
            extra = [*options, "-q", *([] if fsync else ["--no-fsync"])]
            with self.tolerant(full):
                case = Case(full, reach, aim)
                command = partial(_command, verb, src, extra)
                self.add(in_turn(case, src, self.scratch_dir, command, n_runs=self.options.runs, fsync=fsync))

    def _peer(self, name: str, peer: str, src: Path, *, fsync: bool) -> Case:
        """How many times slower torch's converter is; ``fsync`` is ours, torch's side does what it does by default."""
        dst = self.scratch_dir / "written"
        to_dcp = peer == "torch_save_to_dcp"
        theirs = [sys.executable, "-W", "ignore", "-c", CALL_PEER, peer, src / "model.pt" if to_dcp else src, dst]
        ours = ckpt("convert", src, dst, "--to", "dcp" if to_dcp else "torch", "-q", *([] if fsync else ["--no-fsync"]))
        case = Case(name, 8.0, 10.0, unit="× ours", is_lower_better=False)
        for _ in range(self.options.peer_runs):
            warm(src)
            case.copies.append(run(theirs).wall_s)
            remove(dst)
            warm(src)
            case.ours.append(run(ours))
            remove(dst)
        case.value = statistics.median(1 / ratio for ratio in case.ratios)
        return case

    def memory(self) -> None:
        """Peak RSS of converts and of a reshard, at two sizes."""
        for label, kind, arguments in (
            ("dcp-4 → torch", "dcp-4", ["convert", "--to", "torch"]),
            ("torch → dcp", "torch", ["convert", "--to", "dcp"]),
            ("reshard TP8 → TP4", "megatron-tp8", ["reshard", "--tp-new", "4"]),
        ):
            for gib in self.options.memory_sizes:
                name = f"peak RSS, {label}, {gib:g} GiB"
                if self.wants(name):
                    with self.tolerant(name), self.source(kind, round(gib * GIB)) as src:
                        done = run(_command(arguments[0], src, [*arguments[1:], "-q"], self.scratch_dir / "written"))
                        remove(self.scratch_dir / "written")
                        self.add(Case(name, 128.0, 64.0, ours=[done], value=done.rss_bytes / 1e6, unit="MB"))

    def inspect(self) -> None:
        """Start-up, and 100 000 chunks against ``pickle.loads`` on their metadata, start-up apart."""
        names = ("start-up of ckpt --help", "start-up of ckpt inspect", "inspect of 100 000 chunks")
        if any(map(self.wants, names)):
            with (
                self.tolerant("inspect"),
                self.source("tiny", 0) as tiny,
                self.source("chunks", 100_000) as chunks,
            ):
                for case in self._inspect(names, tiny, chunks):
                    self.add(case)

    def _inspect(self, names: Sequence[str], tiny: Path, chunks: Path) -> list[Case]:
        commands = [ckpt("--help"), ckpt("inspect", tiny), ckpt("inspect", chunks)]
        load = [sys.executable, "-W", "ignore", "-c", TIME_PICKLE, chunks / ".metadata"]
        runs: list[list[Run]] = [[], [], []]
        loads_s = []
        warm(chunks / ".metadata")
        for _ in range(max(5, self.options.runs)):
            for found, command in zip(runs, commands, strict=True):
                found.append(run(command))
            loads_s.append(float(run(load).stdout))
        walls_s = [statistics.median(done.wall_s for done in found) for found in runs]
        ratio = (walls_s[2] - walls_s[1]) / statistics.median(loads_s)
        return [
            Case(names[0], ours=runs[0], value=walls_s[0], unit="s"),
            Case(f"{names[0]}: heavy imports", 0, value=len(_imported(commands[0]) & HEAVY), unit="modules"),
            Case(names[1], ours=runs[1], value=walls_s[1], unit="s"),
            Case(f"{names[1]}: heavy imports", 0, value=len(_imported(commands[1]) & HEAVY), unit="modules"),
            Case(f"{names[2]}, start-up apart", 1.5, None, runs[2], loads_s, ratio, "× pickle.loads"),
            Case(f"{names[2]}, whole command", None, 0.5, runs[2], value=walls_s[2], unit="s"),
        ]


def _command(verb: str, src: Path, options: Sequence[str], dst: Path) -> list[str | Path]:
    return ckpt(verb, src, dst, *options)


def _imported(command: list[str | Path]) -> set[str]:
    """Top-level names of the modules that a command imports."""
    python, *rest = command
    done: Run = run([python, "-X", "importtime", *rest])
    names = (line.rpartition("|")[2].strip() for line in done.stdout.splitlines() if line.startswith("import time:"))
    return {name.partition(".")[0] for name in names}


def _machine(scratch_dir: Path) -> dict[str, object]:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "n_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes,
        "kernel": platform.release(),
        "filesystem": run(["stat", "-f", "-c", "%T", scratch_dir]).stdout.strip(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=float, default=4.0, metavar="GIB", help="size of a checkpoint [4]")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="runs of each side of a ratio [3]")
    parser.add_argument("--peer-runs", type=int, default=2, metavar="N", help="runs of torch's own converters [2]")
    parser.add_argument(
        "--memory-sizes", type=float, nargs="*", default=[2.0, 8.0], metavar="GIB", help="sizes for the peak RSS [2 8]"
    )
    parser.add_argument("--no-unsynced", action="store_true", help="leave out the runs without fsync")
    parser.add_argument("--only", metavar="REGEX", help="measure only the rows whose names match")
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="where to work [build/ of this repository]; needs 4 times the largest size",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here as well")
    return parser.parse_args()


def main() -> int:
    options = _options()
    parent_dir = options.scratch or Path(__file__).resolve().parent.parent / "build"
    parent_dir.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    scratch_dir = Path(tempfile.mkdtemp(prefix="bench-", dir=parent_dir))
    bench = Bench(options, scratch_dir)
    try:
        machine = _machine(scratch_dir)
        bench.inspect()
        bench.reshard()
        bench.convert()
        bench.memory()
    finally:
        shutil.rmtree(scratch_dir, ignore_errors=True)
        if bench.cases:
            print(table(bench.cases))
    result = {
        "machine": machine,
        "size_bytes": round(options.size * GIB),
        "cases": [case.as_dict() for case in bench.cases],
    }
    result["failures"] = bench.failures
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    else:
        print(json.dumps(result))
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
