"""scripts/bench: the speed and the memory of whole commands, as ratios measured in one run.

"Copy" is ``cp -r`` plus fsync of the copied files. A ratio is the wall time of the whole command,
start-up and commit included, by the time of a copy of its source; both run on a warm page cache, in
turn, and the median of the ratios counts. Checksums and digests are on. Sources are made by torch,
safetensors and tensorstore (sources.py); torch_dist and zarr by our own writers, since
megatron-core needs a model to write them.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from scripts.benchmarks.measure import (
    GIB,
    Case,
    Page,
    Run,
    add_result_options,
    ckpt,
    in_turn,
    remove,
    run,
    table,
    warm,
    write_results,
)

TARGETS = ("torch", "dcp", "torch_dist", "megatron", "safetensors", "zarr", "zarr3")
SOURCES = {
    "torch": "torch",
    "dcp-1": "dcp",
    "dcp-4": "dcp",
    "megatron-tp8": "megatron",
    "torch_dist": "torch_dist",
    "zarr": "zarr",
    "safetensors": "safetensors",
    "zarr3": "zarr3",
    "orbax": "orbax",
    "zarr3-zstd": "zarr3",
}
"""Kind of source → the format that it is in."""
MEGATRON = ("torch", "dcp-1", "dcp-4", "megatron-tp8", "torch_dist", "zarr")
"""Kinds that have what ``megatron``, ``torch_dist`` and ``zarr`` need: training arguments and
Megatron's names.
"""
MADE_BY_US = {"torch_dist": "torch_dist", "zarr": "zarr"}
"""Kinds that only a model in Megatron could write: made of rank files by our own writer."""
COMPRESSED = ("zarr3-zstd",)
"""Kinds that go through tensorstore; the copy that they are compared with is of the compressed
files.
"""


@dataclass(frozen=True)
class Peer:
    """Another tool's way to do what one of our commands does.

    Args:
        name: what it is called in the table.
        code: a program; its arguments are the source and the destination.
        target: our format for the same work.
        reach, aim: how many times slower it is to be.
    """

    name: str
    code: str
    target: str
    reach: float
    aim: float


_TO_DCP = (
    "import sys; from torch.distributed.checkpoint import format_utils as f; "
    "f.torch_save_to_dcp(*sys.argv[1:])"
)
_TO_TORCH = (
    "import sys; from torch.distributed.checkpoint import format_utils as f; "
    "f.dcp_to_torch_save(*sys.argv[1:])"
)
_TO_HF = """
import sys, torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
state = torch.load(sys.argv[1], mmap=True, weights_only=False)["model"]
state = {key: value for key, value in state.items() if value is not None}
writer = HuggingFaceStorageWriter(sys.argv[2], fqn_to_index_mapping={key: 1 for key in state})
dcp.save(state, storage_writer=writer, no_dist=True)
"""
_LOAD_SAVE = """
import os, sys
from safetensors.torch import load_file, save_file
os.mkdir(sys.argv[2])
for name in sorted(os.listdir(sys.argv[1])):
    if name.endswith(".safetensors"):
        save_file(load_file(f"{sys.argv[1]}/{name}"), f"{sys.argv[2]}/{name}")
"""
PEERS: dict[str, tuple[Peer, ...]] = {
    "torch": (
        Peer("torch_save_to_dcp of torch", _TO_DCP, "dcp", 8, 10),
        Peer("dcp.save with HuggingFaceStorageWriter", _TO_HF, "safetensors", 1, 10),
    ),
    "dcp-1": (Peer("dcp_to_torch_save of torch", _TO_TORCH, "torch", 8, 10),),
    "dcp-4": (Peer("dcp_to_torch_save of torch", _TO_TORCH, "torch", 8, 10),),
    "safetensors": (Peer("load_file + save_file of safetensors", _LOAD_SAVE, "safetensors", 1, 4),),
}
"""Kind of source → other tools' converters for it."""
TIME_PICKLE = """
import pickle, sys, time, torch.distributed.checkpoint
data = open(sys.argv[1], "rb").read()
began = time.perf_counter(); pickle.loads(data); print(time.perf_counter() - began)
"""
HEAVY = {"torch", "numpy", "zarr", "tensorstore"}


class Bench(Page):
    """The rows of this bench."""

    @contextmanager
    def tolerant(self, name: str) -> Iterator[None]:
        """As a page's; what a command that failed has left is removed."""
        with super().tolerant(name):
            yield
        for left in ("written", "copied"):
            remove(self.scratch_dir / left)

    @contextmanager
    def source(self, kind: str, n_bytes: int) -> Iterator[Path]:
        """A checkpoint of that kind, removed afterwards."""
        folder = self.scratch_dir / f"{kind}-{n_bytes}"
        print(f"making {kind}, {n_bytes / GIB:.3g} GiB", file=sys.stderr, flush=True)
        try:
            if kind in MADE_BY_US:
                with self.source("megatron-tp8", n_bytes) as ranks:
                    run(ckpt("convert", ranks, folder, "--to", MADE_BY_US[kind], "-q"))
            else:
                maker = Path(__file__).with_name("sources.py")
                run([sys.executable, "-W", "ignore", maker, kind, folder, "--bytes", str(n_bytes)])
            yield folder / "model.pt" if kind == "torch" else folder
        finally:
            remove(folder)

    # ---- the rows of the table

    def convert(self) -> None:
        """Between any two raw formats; once more without fsync on both sides; torch's own
        converters beside ours.
        """
        for kind, format in SOURCES.items():
            names = {
                to: f"convert {kind} → {to}"
                for to in _targets(kind)
                if to != format or kind == "dcp-4"
            }
            peers = [(f"{peer.name}, {kind}", peer) for peer in PEERS.get(kind, ())]
            peers = peers if self.options.peer_runs else []
            if not any(map(self.wants, [*names.values(), *(name for name, _ in peers)])):
                continue
            with (
                self.tolerant(f"source {kind}"),
                self.source(kind, round(self.options.size * GIB)) as src,
            ):
                for to, name in names.items():
                    reach, aim = (None, None) if kind in COMPRESSED else (1.0, 0.75)
                    self._transfer(name, src, ["convert", "--to", to], reach=reach, aim=aim)
                for name, peer in peers:
                    if self.wants(name):
                        with self.tolerant(name):
                            for fsync in (
                                True,
                                False,
                            ):  # of ours; theirs does what it does by default
                                for case in self._peer(
                                    name if fsync else f"{name}, no fsync", peer, src, fsync=fsync
                                ):
                                    self.add(case)

    def reshard(self) -> None:
        """TP8 → TP4 and TP4 → TP8, weights alone and with the optimizer."""
        for old, new, rest, to in (
            (8, 4, "", ()),
            (4, 8, "", ()),
            (8, 4, "-optim", ()),
            (8, 4, "-optim", ("--to", "torch_dist")),
        ):
            name = (
                f"reshard TP{old} → TP{new}"
                + (" with optimizer" if rest else "")
                + (f", {to[-1]}" if to else "")
            )
            if self.wants(name):
                with self.source(f"megatron-tp{old}{rest}", round(self.options.size * GIB)) as src:
                    self._transfer(
                        name, src, ["reshard", "--tp-new", str(new), *to], reach=1.2, aim=0.9
                    )

    def _transfer(
        self, name: str, src: Path, arguments: list[str], *, reach: float | None, aim: float | None
    ) -> None:
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
                self.add(
                    in_turn(
                        case, src, self.scratch_dir, command, n_runs=self.options.runs, fsync=fsync
                    )
                )

    def _peer(self, name: str, peer: Peer, src: Path, *, fsync: bool) -> list[Case]:
        """How many times slower the peer is, and how many times more memory it takes."""
        dst = self.scratch_dir / "written"
        theirs = [sys.executable, "-W", "ignore", "-c", peer.code, src, dst]
        ours = ckpt(
            "convert", src, dst, "--to", peer.target, "-q", *([] if fsync else ["--no-fsync"])
        )
        case = Case(name, peer.reach, peer.aim, unit="× ours", is_lower_better=False)
        their_rss = []
        for _ in range(self.options.peer_runs):
            warm(src)
            done = run(theirs)
            their_rss.append(done.rss_bytes)
            case.copies.append(done.wall_s)
            remove(dst)
            warm(src)
            case.ours.append(run(ours))
            remove(dst)
        case.value = statistics.median(1 / ratio for ratio in case.ratios)
        memory = Case(
            f"{name}: memory", 10, None, ours=case.ours, unit="× ours", is_lower_better=False
        )
        memory.value = min(their_rss) / max(done.rss_bytes for done in case.ours)
        return [case, memory]

    def memory(self) -> None:
        """Peak RSS of converts and of a reshard, at two sizes."""
        for label, kind, arguments in (
            ("dcp-4 → torch", "dcp-4", ["convert", "--to", "torch"]),
            ("torch → dcp", "torch", ["convert", "--to", "dcp"]),
            ("safetensors → zarr3", "safetensors", ["convert", "--to", "zarr3"]),
            ("zarr3-zstd → safetensors", "zarr3-zstd", ["convert", "--to", "safetensors"]),
            ("reshard TP8 → TP4", "megatron-tp8", ["reshard", "--tp-new", "4"]),
            (
                "reshard TP8 → TP4 with optimizer",
                "megatron-tp8-optim",
                ["reshard", "--tp-new", "4"],
            ),
        ):
            for gib in self.options.memory_sizes:
                name = f"peak RSS, {label}, {gib:g} GiB"
                if self.wants(name):
                    with self.tolerant(name), self.source(kind, round(gib * GIB)) as src:
                        done = run(
                            _command(
                                arguments[0],
                                src,
                                [*arguments[1:], "-q"],
                                self.scratch_dir / "written",
                            )
                        )
                        remove(self.scratch_dir / "written")
                        reach, aim = (512.0, None) if kind in COMPRESSED else (128.0, 64.0)
                        self.add(
                            Case(
                                name, reach, aim, ours=[done], value=done.rss_bytes / 1e6, unit="MB"
                            )
                        )

    def inspect(self) -> None:
        """Start-up, and 100 000 chunks against ``pickle.loads`` on their metadata, start-up
        apart.
        """
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
            Case(
                f"{names[0]}: heavy imports",
                0,
                value=len(_imported(commands[0]) & HEAVY),
                unit="modules",
            ),
            Case(names[1], ours=runs[1], value=walls_s[1], unit="s"),
            Case(
                f"{names[1]}: heavy imports",
                0,
                value=len(_imported(commands[1]) & HEAVY),
                unit="modules",
            ),
            Case(
                f"{names[2]}, start-up apart", 1.5, None, runs[2], loads_s, ratio, "× pickle.loads"
            ),
            Case(f"{names[2]}, whole command", None, 0.5, runs[2], value=walls_s[2], unit="s"),
        ]


def _targets(kind: str) -> list[str]:
    """Formats that a kind of source is converted to."""
    return [
        to for to in TARGETS if kind in MEGATRON or to not in ("torch_dist", "megatron", "zarr")
    ]


def _command(verb: str, src: Path, options: Sequence[str], dst: Path) -> list[str | Path]:
    return ckpt(verb, src, dst, *options)


def _imported(command: list[str | Path]) -> set[str]:
    """Top-level names of the modules that a command imports."""
    python, *rest = command
    done: Run = run([python, "-X", "importtime", *rest])
    names = (
        line.rpartition("|")[2].strip()
        for line in done.stdout.splitlines()
        if line.startswith("import time:")
    )
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
        prog="scripts/bench conversions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--size", type=float, default=4.0, metavar="GIB", help="size of a checkpoint [4]"
    )
    parser.add_argument(
        "--runs", type=int, default=3, metavar="N", help="runs of each side of a ratio [3]"
    )
    parser.add_argument(
        "--peer-runs", type=int, default=2, metavar="N", help="runs of torch's own converters [2]"
    )
    parser.add_argument(
        "--memory-sizes",
        type=float,
        nargs="*",
        default=[2.0, 8.0],
        metavar="GIB",
        help="sizes for the peak RSS [2 8]",
    )
    parser.add_argument(
        "--no-unsynced", action="store_true", help="leave out the runs without fsync"
    )
    parser.add_argument("--only", metavar="REGEX", help="measure only the rows whose names match")
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="where to work [build/ of this repository]; needs 4 times the largest size",
    )
    add_result_options(parser)
    return parser.parse_args()


def main() -> int:
    options = _options()
    parent_dir = options.scratch or Path(__file__).resolve().parents[2] / "build"
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
    facts = {
        "machine": machine,
        "size_bytes": round(options.size * GIB),
        "failures": bench.failures,
    }
    write_results(bench.cases, options, facts)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
