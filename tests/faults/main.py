"""scripts/faults: kills, fills, denies and interrupts ckpt at each of its file operations, and
looks for anything lost.

With ``--golden DIR`` for the golden checkpoints; without it they are unpacked. Prints a Markdown
table of targets and faults; exits with 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import gc
import io
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ckpt_cli.app import main as main_of_ckpt
from tests.faults.case import Case, Cases, sampled
from tests.faults.saved import SAVE, SavedTarget, preload_saving
from tests.faults.store_cases import StoreCases
from tests.faults.store_target import STORE_KINDS, StoreKind, StoreTarget, preload_store_clients
from tests.faults.target import KINDS, WORKERS_KINDS, Kind, Target
from tests.faults.worker_cases import WorkerCases

ALL = (*WORKERS_KINDS, SAVE, *STORE_KINDS)
MODES = {
    "new": (*KINDS, SAVE),
    "force": (*KINDS, SAVE),
    "workers": WORKERS_KINDS,
    "workers-force": WORKERS_KINDS,
    "s3": STORE_KINDS,
}
"""What is written in which: a new destination or one in place of an old one, by one process or by
several; or read from, or written to, an object store, with faults at its requests.
"""
STORE_SAMPLE = 4
"""Number of cases of each fault in mode s3, unless ``--all`` or ``--sample`` asks for others."""
Counts = Counter[tuple[str, str]]
"""Of cases, by target and fault."""

ARCHIVE = Path(__file__).resolve().parents[2] / "tests" / "golden" / "golden.tar.xz"


def main() -> int:
    """Parses the command line, runs, prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--golden", type=Path, help="the golden checkpoints, unpacked")
    parser.add_argument(
        "--targets", nargs="+", choices=[kind.name for kind in ALL], help="only these"
    )
    parser.add_argument(
        "--faults", nargs="+", metavar="TEXT", help="only faults whose name holds one of these"
    )
    parser.add_argument(
        "--sample", type=int, metavar="N", help="only N cases of each target, fault and mode"
    )
    parser.add_argument(
        "--all", action="store_true", help="all requests in mode s3 (default there: --sample 4)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument(
        "--jobs",
        type=int,
        default=2,
        metavar="N",
        help="processes; each takes a target in one mode",
    )
    parser.add_argument("--work", type=Path, help="where to write; else a temporary directory")
    options = parser.parse_args()
    begun = time.monotonic()
    tried: Counts = Counter()
    failed: Counts = Counter()
    kinds = [kind for kind in ALL if not options.targets or kind.name in options.targets]
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        options.golden = options.golden or _unpacked(Path(folder) / "golden")
        preload(kinds, options.golden, Path(folder))
        work = [
            (kind, mode, Path(folder) / f"{kind.name}-{mode}")
            for kind in kinds
            for mode in options.modes
            if kind in MODES[mode]
        ]
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("fork")) as pool:
            for kind_tried, kind_failed in pool.map(partial(of_kind, options), work):
                tried += kind_tried
                failed += kind_failed
    print_table(tried, failed)
    print(f"\n{tried.total()} cases, {failed.total()} failures, {time.monotonic() - begun:.0f} s")
    return 1 if failed.total() else 0


def of_kind(
    options: argparse.Namespace, work: tuple[Kind | StoreKind, str, Path]
) -> tuple[Counts, Counts]:
    """Runs the cases of one target in one mode; how many were tried, and how many failed, by target
    and fault.
    """
    kind, mode, work_dir = work
    work_dir.mkdir()
    force = mode.endswith("force")
    if isinstance(kind, StoreKind):
        return of_store_kind(options, kind, work_dir)
    if kind == SAVE:
        cases = list(Cases(SavedTarget(work_dir, force=force)).all())
    else:
        target = Target(kind, options.golden, work_dir, force=force)
        cases = list((WorkerCases(target) if mode.startswith("workers") else Cases(target)).all())
    return of_cases(options, cases, kind.name, mode, options.sample)


def of_store_kind(
    options: argparse.Namespace, kind: StoreKind, work_dir: Path
) -> tuple[Counts, Counts]:
    """Runs the cases of one target with an object store, as ``of_kind``."""
    target = StoreTarget(kind, options.golden, work_dir)
    try:
        sample = None if options.all else (options.sample or STORE_SAMPLE)
        return of_cases(options, [*StoreCases(target).all()], kind.name, "s3", sample)
    finally:
        target.stop()


def of_cases(
    options: argparse.Namespace, cases: list[Case], kind: str, mode: str, sample: int | None
) -> tuple[Counts, Counts]:
    """Runs those of the cases that were asked for; what ``of_kind`` returns."""
    if options.faults:
        cases = [case for case in cases if any(text in case.fault for text in options.faults)]
    if sample is not None:
        cases = sampled(cases, sample, seed=options.seed)
    tried, failed = Counter(), Counter()
    print(f"{kind}, {mode}: {len(cases)} cases", file=sys.stderr, flush=True)
    for case in cases:
        tried[kind, case.fault] += 1
        if report(case, f"{kind}, {mode}"):
            failed[kind, case.fault] += 1
    return tried, failed


def report(case: Case, target: str) -> bool:
    """Runs a case; tells on stderr what was wrong, and whether anything was."""
    wrong = list(case.check())
    if wrong:
        print(
            f"{target}: {case.fault}: {case.name}",
            *wrong,
            sep="\n    ",
            file=sys.stderr,
            flush=True,
        )
    return bool(wrong)


def print_table(tried: Counter[tuple[str, str]], failed: Counter[tuple[str, str]]) -> None:
    """Cases tried by target and fault; failures, where there are any, after a slash."""
    targets = list(dict.fromkeys(target for target, _ in tried))
    faults = list(dict.fromkeys(fault for _, fault in tried))
    print(f"| fault | {' | '.join(targets)} | failures |")
    print(f"| --- |{' ---: |' * (len(targets) + 1)}")
    for fault in faults:
        cells = [f"{tried[target, fault]:,}" for target in targets]
        n_failed = sum(failed[target, fault] for target in targets)
        print(f"| {fault} | {' | '.join(cells)} | {n_failed} |")
    sums = [f"{sum(n for (name, _), n in tried.items() if name == target):,}" for target in targets]
    print(f"| all | {' | '.join(sums)} | {failed.total()} |")


def preload(kinds: Sequence[Kind | StoreKind], golden_dir: Path, work_dir: Path) -> None:
    """Imports what the forks would import one by one, by doing everything once."""
    for kind in kinds:
        if kind == SAVE:
            preload_saving(work_dir / "preloaded" / "save")
            continue
        if isinstance(kind, StoreKind):
            preload_store_clients()
            if not kind.source:
                preload_saving(work_dir / "preloaded" / kind.name)
                continue
        verb, *rest = kind.arguments
        dst = work_dir / "preloaded" / kind.name / kind.dst
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            assert (
                main_of_ckpt([verb, str(golden_dir / kind.source), str(dst), *rest, "--quiet"]) == 0
            )
    gc.collect()
    gc.freeze()  # so that forks do not copy pages for the sake of the collector


def _unpacked(folder: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data") if hasattr(
            tarfile, "data_filter"
        ) else archive.extractall(folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
