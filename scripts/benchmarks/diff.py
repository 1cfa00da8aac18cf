"""scripts/bench diff: `ckpt diff` against reading both checkpoints with ``cat``, and against torch
with all in memory.

Every ratio is the wall time of the whole command, start-up included, by that of the other, in turn
on a warm page cache; the median of the ratios counts. "torch" loads both safetensors directories,
compares every pair of tensors, and takes the greatest difference and the cosine of those that
differ. Sources are of scripts.benchmarks.sources.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from scripts.benchmarks.measure import (
    GIB,
    Case,
    Page,
    Run,
    ckpt,
    files_of,
    page_parser,
    run,
    run_page,
    warm,
)

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


def main() -> int:
    parser = page_parser("bench diff", __doc__, runs=3)
    parser.add_argument("--gib", type=float, default=2, help="size of the weights [2]")
    return run_page(parser.parse_args(), measure)


def _made(folder: Path, kind: str, n_bytes: int) -> Path:
    script = Path(__file__).with_name("sources.py")
    run([sys.executable, script, kind, folder / kind, "--bytes", str(n_bytes)])
    return folder / kind


def measure(page: Page) -> None:
    """Make the checkpoints and compare them in each way."""
    folder, n_bytes = page.scratch_dir, round(page.options.gib * GIB)
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

    def in_memory(a: Path, b: Path) -> Run:
        return run([sys.executable, torch, a, b])

    equal, ranks_equal = "diff, equal: safetensors, a copy", "diff, equal: 8 rank files, torch_dist"
    one_differs, all_differ = "diff, one element differs", "diff, every element differs"
    for name, (reach, aim), unit, a, b in (
        (equal, (2.5, 1.5), "cat", flat, same),
        (ranks_equal, (3, 2), "cat", ranks, dist),
        (one_differs, (3, 2), "cat", flat, one_bit),
        (equal, (0.5, None), "torch", flat, same),
        (one_differs, (0.5, None), "torch", flat, one_bit),
        (all_differ, (1, None), "torch", flat, every),
    ):
        case = Case(f"{name}, against {unit}", reach, aim, unit=f"× {unit}")
        if not page.wants(case.name):
            continue
        others = measured(
            case, a, b, partial(cat if unit == "cat" else in_memory, a, b), n_runs=page.options.runs
        )
        page.add(case)
        cpu_s = statistics.median(other.cpu_s for other in others)
        rss_bytes = max(other.rss_bytes for other in others)
        print(f"{unit}: CPU {cpu_s:.2f} s, {rss_bytes / 1e6:.0f} MB", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
