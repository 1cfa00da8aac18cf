"""scripts/bench diff: `ckpt diff` against reading both checkpoints with ``cat``, and against torch
with all in memory.

Every ratio is the wall time of the whole command, start-up included, by that of the other, in turn
on a warm page cache; the median of the ratios counts. "torch" loads both safetensors directories,
compares every pair of tensors, and takes the greatest difference and the cosine of those that
differ. Sources are of scripts.benchmarks.sources.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from scripts.benchmarks.measure import Case, Run, ckpt, files_of, run, table, warm

GIB = 1 << 30
_TORCH = """
import sys, torch
from pathlib import Path
from safetensors.torch import load_file
a, b = ({key: t for path in sorted(Path(name).glob("*.safetensors"))
         for key, t in load_file(path).items()}
        for name in sys.argv[1:3])
for key, x in a.items():
    y = b[key]
    if not torch.equal(x, y):
        x, y = x.flatten().float(), y.flatten().float()
        print(key, int((x != y).sum()), float((x - y).abs().max()),
              float(torch.cosine_similarity(x, y, dim=0)))
"""
_CHANGE = """
import sys, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
every = sys.argv[3] == "all"
Path(sys.argv[2]).mkdir()
for number, path in enumerate(sorted(Path(sys.argv[1]).glob("*.safetensors"))):
    tensors = load_file(path)
    for place, (key, t) in enumerate(tensors.items()):
        if every:
            tensors[key] = (t.float() * 1.01).to(t.dtype)
        elif place == 0 and number == 0:
            t.view(-1)[t.numel() // 2] += 1
    save_file(tensors, Path(sys.argv[2]) / path.name, metadata={"format": "pt"})
for path in Path(sys.argv[1]).glob("*.json"):
    (Path(sys.argv[2]) / path.name).write_bytes(path.read_bytes())
"""


def cat(*paths: Path) -> Run:
    """Reads all files."""
    files = [str(found) for path in paths for found in files_of(path)]
    return run(["sh", "-c", 'cat "$@" > /dev/null', "sh", *files])


def differing(*command: str | Path) -> Run:
    """Runs a comparison whose exit code may be 1."""
    return run(["sh", "-c", '"$@" || [ $? = 1 ]', "sh", *command])


def measured(case: Case, a: Path, b: Path, other: Callable[[], Run], *, n_runs: int) -> list[Run]:
    """Fills a case with runs of ``ckpt diff`` and of something else, in turn; returns the
    latter.
    """
    others: list[Run] = []
    warm(a)
    warm(b)
    for number in range(n_runs):
        for is_ours in (number % 2 == 0, number % 2 == 1):
            if is_ours:
                case.ours.append(differing(*ckpt("diff", a, b)))
            else:
                others.append(other())
                case.copies.append(others[-1].wall_s)
    return others


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=2, help="size of the weights")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where the checkpoints are made")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        cases = _cases(Path(name), round(options.gib * GIB), options.runs)
        print(table(cases))
        rss = max(one.rss_bytes or 0 for one in cases)
        print(
            f"peak RSS of ckpt diff: {rss / 1e6:.0f} MB, whatever the size ({options.gib:g} "
            "GiB each)"
        )
    failed = [case.name for case in cases if case.is_met is False]
    if failed:
        sys.exit(f"not met: {', '.join(failed)}")


def _made(folder: Path, kind: str, n_bytes: int) -> Path:
    script = Path(__file__).with_name("sources.py")
    run([sys.executable, script, kind, folder / kind, "--bytes", str(n_bytes)])
    return folder / kind


def _cases(folder: Path, n_bytes: int, n_runs: int) -> list[Case]:
    ranks, flat = _made(folder, "megatron-tp8", n_bytes), _made(folder, "safetensors", n_bytes)
    dist = folder / "torch_dist"
    run(ckpt("convert", ranks, dist, "--to", "torch_dist", "--quiet"))
    one_bit, every = folder / "one", folder / "all"
    for changed, what in ((one_bit, "one"), (every, "all")):
        run([sys.executable, "-c", _CHANGE, flat, changed, what])
    same = folder / "same"
    run(["cp", "-r", flat, same])
    torch = folder / "compare.py"
    torch.write_text(_TORCH)

    def in_memory(a: Path, b: Path) -> Callable[[], Run]:
        return lambda: run([sys.executable, torch, a, b])

    def reading(a: Path, b: Path) -> Callable[[], Run]:
        return lambda: cat(a, b)

    rows: list[tuple[Case, Path, Path, Callable[[], Run]]] = [
        (
            Case("equal: safetensors, a copy", 2.5, 1.5, unit="× cat"),
            flat,
            same,
            reading(flat, same),
        ),
        (
            Case("equal: 8 rank files, torch_dist", 3, 2, unit="× cat"),
            ranks,
            dist,
            reading(ranks, dist),
        ),
        (Case("one element differs", 3, 2, unit="× cat"), flat, one_bit, reading(flat, one_bit)),
        (
            Case("equal: safetensors, a copy", 0.5, unit="× torch"),
            flat,
            same,
            in_memory(flat, same),
        ),
        (Case("one element differs", 0.5, unit="× torch"), flat, one_bit, in_memory(flat, one_bit)),
        (Case("every element differs", 1, unit="× torch"), flat, every, in_memory(flat, every)),
    ]
    cases = []
    for case, a, b, other in rows:
        others = measured(case, a, b, other, n_runs=n_runs)
        cases.append(case)
        ours_cpu, other_cpu = (
            statistics.median(one.cpu_s for one in some) for some in (case.ours, others)
        )
        rss = max(one.rss_bytes for one in others)
        print(
            f"{case.name} ({case.unit}): CPU {ours_cpu:.2f} s, other {other_cpu:.2f} s and "
            f"{rss / 1e6:.0f} MB",
            flush=True,
        )
    return cases


if __name__ == "__main__":
    main()
