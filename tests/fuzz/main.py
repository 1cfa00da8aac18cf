"""Fuzzes every target of ``tests/fuzz`` with atheris, one process each, and prints a table of what
came of it.

    scripts/fuzz                        a minute a target
    scripts/fuzz --seconds 600 zip      ten minutes for one
    scripts/fuzz --runs 100000          so many executions a target
    scripts/fuzz --replay FILE zip      one input again, without instrumentation

An input is a finding if anything but the project's errors comes out, if it takes more than a second
of processor time, or if the process grows by more than 500 MB. Time and memory are judged again
without instrumentation, in a child of its own with limits, before they count. Findings are kept
below ``--out``; the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

MAX_SECONDS = 1.0
MAX_BYTES = 500 << 20


def main() -> int:
    """Parses the command line and runs all targets, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("targets", nargs="*", help="names of targets; all of them by default")
    parser.add_argument("--seconds", type=int, default=60, help="wall time a target (default: 60)")
    parser.add_argument(
        "--runs", type=int, default=-1, help="executions a target; ends before --seconds if reached"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(tempfile.gettempdir()) / "ckpt-fuzz",
        help="corpus, findings",
    )
    parser.add_argument(
        "--golden", type=Path, help="directory of real checkpoints; default: tests/golden, unpacked"
    )
    parser.add_argument(
        "--max-len", type=int, default=16384, help="bytes of an input (default: 16384)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of libFuzzer's random numbers; 0: another one every time",
    )
    parser.add_argument(
        "--replay", type=Path, help="run one input through a target, plainly, and say what it cost"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one is not None:
        return _fuzz(asked)
    from tests.fuzz.targets import TARGETS

    unknown = set(asked.targets) - set(TARGETS)
    if unknown:
        parser.error(f"unknown targets {sorted(unknown)}; there are {', '.join(TARGETS)}")
    if asked.replay is not None:
        print(_judged(asked.targets[0], asked.replay) or "within the limits")
        return 0
    golden = asked.golden or _unpacked(asked.out / "golden")
    rows = [_run(asked, name, golden) for name in asked.targets or TARGETS]
    _print(rows)
    return 1 if any(row["findings"] for row in rows) else 0


def _unpacked(folder: Path) -> Path:
    if not folder.exists():
        with tarfile.open(ROOT / "tests/golden/golden.tar.xz") as archive:
            archive.extractall(folder, filter="data")
    return folder


def _run(asked: argparse.Namespace, name: str, golden: Path) -> dict[str, object]:
    """One target in a process of its own; what it is written on stderr tells how it went."""
    from tests.fuzz.seeds import seeds_of, words_of

    corpus, findings = asked.out / name / "corpus", asked.out / name / "findings"
    for folder in (corpus, findings):
        folder.mkdir(parents=True, exist_ok=True)
    seeds = seeds_of(name, golden)
    words = "".join(f'"{word.decode()}"\n' for word in words_of(seeds))
    (asked.out / name / "words").write_text(words)
    for seed in seeds:
        (corpus / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.main",
        "--one",
        name,
        "--seconds",
        str(asked.seconds),
        "--runs",
        str(asked.runs),
    ]
    command += ["--out", str(asked.out), "--max-len", str(asked.max_len), "--seed", str(asked.seed)]
    begun = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, check=False
    )
    text = done.stderr.decode("utf-8", "replace")
    (asked.out / name / "log").write_text(text)
    n_runs = [
        int(number) for number in re.findall(r"stat::number_of_executed_units:\s*(\d+)", text)
    ]
    covered = re.findall(r"cov: (\d+) ft: (\d+)", text)
    verdicts = {path.name: _judged(name, path) for path in sorted(findings.iterdir())}
    row = {
        "target": name,
        "executions": n_runs[-1] if n_runs else 0,
        "seconds": round(time.monotonic() - begun),
        "coverage": int(covered[-1][0]) if covered else 0,
        "findings": {path: verdict for path, verdict in verdicts.items() if verdict is not None},
        "exit": done.returncode,
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def _fuzz(asked: argparse.Namespace) -> int:
    """Fuzzes one target; libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["core"]):
        from tests.fuzz.targets import TARGETS, survives
    target, findings = TARGETS[asked.one], asked.out / asked.one / "findings"
    kinds: set[str] = set()

    def keep(kind: str, data: bytes) -> None:
        if kind not in kinds:
            kinds.add(kind)
            (findings / f"{kind}-{hashlib.sha256(data).hexdigest()[:12]}").write_bytes(data)

    def once(data: bytes) -> None:
        begun, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            survives(target, data)
        except Exception as err:
            frame = traceback.extract_tb(err.__traceback__)[-1]
            keep(f"{type(err).__name__}-{Path(frame.filename).stem}-{frame.lineno}", data)
        if time.process_time() - begun > MAX_SECONDS:
            keep(f"slow{len(kinds)}", data)
        if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 > MAX_BYTES // 2:
            keep(f"large{len(kinds)}", data)

    options = [
        f"-max_total_time={asked.seconds}",
        f"-runs={asked.runs}",
        f"-max_len={asked.max_len}",
    ]
    options += [
        "-print_final_stats=1",
        "-timeout=60",
        "-rss_limit_mb=3000",
        f"-artifact_prefix={findings}/libfuzzer-",
    ]
    words = asked.out / asked.one / "words"
    options += [f"-dict={words}"] if words.stat().st_size else []
    options += [f"-seed={asked.seed}"] if asked.seed else []
    atheris.Setup([sys.argv[0], *options, str(asked.out / asked.one / "corpus")], once)
    atheris.Fuzz()
    return 0


def _judged(name: str, path: Path) -> str | None:
    """What is wrong with an input, run plainly in a child with limits; None if nothing is."""
    from tests.fuzz.targets import TARGETS, survives

    data = path.read_bytes()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = ""
        try:
            signal.alarm(60)
            before = resource.getrusage(resource.RUSAGE_SELF)
            try:
                survives(TARGETS[name], data)
            except BaseException as err:
                text = "".join(traceback.format_exception(err))[-1500:]
            after = resource.getrusage(resource.RUSAGE_SELF)
            used_s, grown = (
                after.ru_utime - before.ru_utime,
                (after.ru_maxrss - before.ru_maxrss) << 10,
            )
            if not text and (used_s > MAX_SECONDS or grown > MAX_BYTES):
                text = f"{used_s:.1f} s, {grown >> 20} MiB for {len(data)} bytes"
            os.write(writer, text.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode("utf-8", "replace")
    _, status = os.waitpid(pid, 0)
    return text or (None if status == 0 else f"ended by {status}")


def _print(rows: list[dict[str, object]]) -> None:
    print("| target | executions | seconds | covered edges | findings |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for row in rows:
        n = len(row["findings"])  # type: ignore[arg-type]
        print(
            f"| {row['target']} | {row['executions']:,} | {row['seconds']} | {row['coverage']} "
            f"| {n} |"
        )
    n_runs = sum(int(row["executions"]) for row in rows)  # type: ignore[call-overload]
    n_all = sum(len(row["findings"]) for row in rows)  # type: ignore[arg-type]
    print(f"| all | {n_runs:,} | {sum(int(row['seconds']) for row in rows)} |  | {n_all} |")  # type: ignore[call-overload]
    for row in rows:
        for path, verdict in row["findings"].items():  # type: ignore[attr-defined]
            print(f"\n{row['target']}/findings/{path}:\n{verdict}")


if __name__ == "__main__":
    sys.exit(main())
