"""scripts/bench stores: checkpoints in an object store, against a server on this machine.

The server (``tests.support.s3``) is a process of its own that logs every request. All ratios are of
runs in turn against it.

* Bytes: what the server sent, over what the plan needs at least.
* Reading: seconds of obstore's own get, 16 objects at a time, over those of ``core.open`` and every
  tensor. Below it, for comparison, the same over a get of ranges whose bytes are thrown away.
* Memory: peak RSS of a reshard from the store, at a small and a large size.
* Inspecting 1,024 rank files: requests; and depth, the longest chain of requests of which none
  overlap, with a server that waits 500 ms: less, and the chain would count what the processors
  can do, not what waits for what.
* torch.distributed.checkpoint through fsspec and s3fs, in an environment of its own (``--s3fs
  PYTHON``: an interpreter that has torch and s3fs).
* Writing: a reshard from files to the store, beside obstore's multipart put of as many bytes; and
  one from the store to the store, beside the slower of obstore's get and put, and beside download,
  reshard and upload. Those of ``ckpt`` count from the start of the process to its end, and stay
  below 240 MiB (``--memory``). The server takes and sends as many bytes per second as a network,
  which is then what all wait for: one pass in both directions cannot be more than twice as fast as
  two, but for what the disk costs. Without a limit, the processors are what all wait for, and the
  server needs more of them than obstore; those ratios have no bound.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scripts.benchmarks.measure import (
    GIB,
    MIB,
    Case,
    Page,
    Run,
    ckpt,
    page_parser,
    remove,
    run,
    run_page,
    warm,
)
from tests.support.s3.client import S3Server, started_server
from tests.support.s3.server import LoggedRequest

BYTES, READING, RSS_BYTES, DEPTH = 1.02, 0.9, 256e6, 3
WRITING, RESHARD, THREE_STEPS = 0.9, 0.8, 3.0
DELAY_S = 0.5
NETWORK_BYTES_PER_S = 300e6
BUCKET = "bench"
CONVERSIONS = {
    "reshard TP4 → TP2": ("megatron-tp4", ("reshard", "--tp-new", "2")),
    "rank files → torch_dist": ("megatron-tp4", ("convert", "--to", "torch_dist")),
    "torch_dist → dcp": ("torch_dist", ("convert", "--to", "dcp")),
    "safetensors → dcp": ("safetensors", ("convert", "--to", "dcp")),
}


def chain(requests: Sequence[LoggedRequest]) -> int:
    """Return the length of the longest chain of requests of which none overlap."""
    length, end = 0, float("-inf")
    for request in sorted(requests, key=lambda request: request.ended):
        if request.begun >= end:
            length, end = length + 1, request.ended
    return length


class Bench:
    """The rows of this bench."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.options = page.options
        self.root = page.scratch_dir / "stores"
        self.written = page.scratch_dir / "written"

    @contextmanager
    def server(self, delay_s: float = 0.0, bytes_per_s: float = 0.0) -> Iterator[S3Server]:
        """Start a server, and point the environment of what is measured at it."""
        with started_server(
            data_dir=self.page.scratch_dir,
            delay_s=delay_s,
            bytes_per_s=bytes_per_s,
            has_opaque_tags=True,
        ) as server:
            server.create_bucket(BUCKET)
            os.environ |= server.environment()
            yield server

    def source(self, server: S3Server, kind: str, n_bytes: int) -> str:
        """Return the URL of a checkpoint, which is made at its first use."""
        folder = self.folder(kind, n_bytes)
        server.mount(BUCKET, folder, f"{folder.name}/")
        return f"s3://{BUCKET}/{folder.name}"

    def folder(self, kind: str, n_bytes: int) -> Path:
        """Return the directory of a checkpoint, which is made at its first use."""
        name = f"{kind}-{n_bytes >> 20}"
        folder = self.root / name
        if not folder.exists():
            print(f"making {name}", file=sys.stderr, flush=True)
            if kind == "torch_dist":
                ranks = self.folder("megatron-tp4", n_bytes)
                run(ckpt("convert", ranks, folder, "--to", "torch_dist", "-q"))
            else:
                maker = [sys.executable, "-m", "scripts.benchmarks.sources", kind, folder]
                run([*maker, "--bytes", str(n_bytes)])
        warm(folder)
        return folder

    def skip(self, name: str, reason: str) -> None:
        """Say why rows are not measured."""
        print(f"{name}: skipped: {reason}", file=sys.stderr, flush=True)
        self.page.skipped[name] = reason

    def bytes_requested(self) -> None:
        """The bytes and requests of conversions, over what their plans need."""
        for label, (kind, (verb, *words)) in CONVERSIONS.items():
            name = f"bytes, {label}"
            if not self.page.wants(name):
                continue
            with self.page.tolerant(name), self.server() as server:
                command = ckpt(
                    verb, self.source(server, kind, self.options.size), self.written, *words
                )
                plan = json.loads(run([*command, "--dry-run", "--json"]).stdout)
                server.take_log()
                done = run([*command, "-q"])
                remove(self.written)
                requests = server.take_log()
                n_sent = sum(request.n_sent for request in requests)
                n_needed = _find_number(plan, "least_read_bytes")
                self.page.add(
                    Case(name, BYTES, 1.0, [done], value=n_sent / n_needed, unit="× needed"),
                    Case(f"requests, {label}", value=len(requests), unit="requests"),
                )

    def reading(self) -> None:
        """The speed of reading every tensor."""
        name = "reading, × obstore's get"
        if not self.page.wants(name):
            return
        with self.page.tolerant(name), self.server() as server:
            url = self.source(server, "safetensors", self.options.size)
            ways: dict[str, list[dict[str, float]]] = {"core": [], "objects": [], "ranges": []}
            for number in range(self.options.runs):
                # In turn, another one first each time.
                order = [*ways][number % 3 :] + [*ways][: number % 3]
                for how in order:
                    ways[how].append(read(how, url))
            for label, how, reach in (
                (name, "objects", READING),
                ("reading, × obstore's get of ranges that are dropped", "ranges", None),
            ):
                ratios = [
                    theirs["seconds"] / ours["seconds"]
                    for theirs, ours in zip(ways[how], ways["core"], strict=True)
                ]
                case = Case(label, reach, value=statistics.median(ratios), unit="× its speed")
                case.is_lower_better = False
                self.page.add(case)
            rates = [ours["bytes"] / ours["seconds"] / 1e9 for ours in ways["core"]]
            self.page.add(Case("reading", value=statistics.median(rates), unit="GB/s"))

    def memory(self) -> None:
        """The peak RSS at two sizes."""
        for n_bytes in sorted({self.options.small, self.options.large}):
            name = f"peak RSS, reshard of {n_bytes / GIB:g} GiB"
            if not self.page.wants(name):
                continue
            with self.page.tolerant(name), self.server() as server:
                url = self.source(server, "megatron-tp4", n_bytes)
                done = run(ckpt("reshard", url, self.written, "--tp-new", "2", "-q"))
                remove(self.written)
                reach = RSS_BYTES / 1e6
                self.page.add(
                    Case(name, reach, None, [done], value=done.rss_bytes / 1e6, unit="MB")
                )

    def inspecting(self) -> None:
        """Requests and depth of inspecting 1,024 rank files."""
        for more, label in (((), "inspect"), (("--all",), "inspect --all")):
            name = f"{label} of {self.options.ranks} rank files"
            if not self.page.wants(name):
                continue
            with self.page.tolerant(name), self.server(DELAY_S) as server:
                url = self.source(server, f"ranks-{self.options.ranks}", MIB)
                server.take_log()
                done = run(ckpt("inspect", f"{url}/iter_0000100", *more))
                requests = server.take_log()
                kinds = ", ".join(
                    f"{n} {kind}"
                    for kind, n in Counter(item.operation for item in requests).items()
                )
                n_sent = sum(request.n_sent for request in requests)
                self.page.add(
                    Case(f"{name}: depth", DEPTH, None, [done], value=chain(requests), unit="deep"),
                    Case(f"{name}: {kinds}", value=len(requests), unit="requests"),
                    Case(f"{name}: bytes", value=n_sent / MIB, unit="MiB"),
                )

    def torch(self) -> None:
        """torch's own reader through fsspec."""
        name = "reading DCP, torch with s3fs"
        if not self.page.wants(name):
            return
        if self.options.s3fs is None:
            self.skip(name, "no interpreter with torch and s3fs: --s3fs PYTHON")
            return
        with self.page.tolerant(name), self.server() as server:
            url = self.source(server, "dcp-1", self.options.size)
            pairs = [
                (read("dcp", url, python=self.options.s3fs), read("core", url))
                for _ in range(self.options.runs)
            ]
            ratios = [theirs["seconds"] / ours["seconds"] for theirs, ours in pairs]
            case = Case(name, 1.0, value=statistics.median(ratios), unit="× ckpt's time")
            case.is_lower_better = False
            self.page.add(case)

    def writing(self) -> None:
        """Resharding to the store, from files and from the store."""
        mb_per_s = f"{NETWORK_BYTES_PER_S / 1e6:.0f} MB/s"
        for label, bytes_per_s in ((mb_per_s, NETWORK_BYTES_PER_S), ("no limit", 0.0)):
            name = f"writing ({label}), reshard TP8 → TP4"
            if not self.page.wants(name):
                continue
            with self.page.tolerant(name), self.server(bytes_per_s=bytes_per_s) as server:
                self._write(server, name, is_bounded=bytes_per_s > 0)

    def _write(self, server: S3Server, name: str, *, is_bounded: bool) -> None:
        """Measure reshards to the store, obstore's get and put, and the three steps by hand."""
        src = self.source(server, "megatron-tp8", self.options.size)
        dst = f"s3://{BUCKET}/written"
        words = ("--tp-new", "4", "--memory", "240MiB", "-q")
        in_store, to_store, by_hand, gets, puts = [], [], [], [], []
        local = self.folder("megatron-tp8", self.options.size)
        for _ in range(self.options.runs):
            for sources, runs in ((src, in_store), (local, to_store)):
                runs.append(run(ckpt("reshard", sources, dst, *words)))
                server.delete(BUCKET, "written")
            gets.append(read("objects", src)["seconds"])
            # As many bytes as the reshard writes, in one object.
            n_bytes = self.options.size
            puts.append(read("put", f"s3://{BUCKET}/put", str(n_bytes))["seconds"])
            server.delete(BUCKET, "put")
            by_hand.append(self._three_steps(server, src, words))
        slower = [max(pair) for pair in zip(gets, puts, strict=True)]
        for label, reach, ours, others in (
            (f"{name} from files, × obstore's multipart put", WRITING, to_store, puts),
            (f"{name} in the store, × the slower of get and put", RESHARD, in_store, slower),
            (f"{name} in the store, × download, reshard, upload", THREE_STEPS, in_store, by_hand),
        ):
            ratios = [other / done.wall_s for other, done in zip(others, ours, strict=True)]
            case = Case(
                label, reach if is_bounded else None, None, ours, value=statistics.median(ratios)
            )
            case.unit, case.is_lower_better = "× its speed", False
            self.page.add(case)
        peak = max(done.rss_bytes for done in in_store)
        name = f"{name} in the store, peak RSS"
        self.page.add(Case(name, RSS_BYTES / 1e6, value=peak / 1e6, unit="MB"))

    def _three_steps(self, server: S3Server, src: str, words: tuple[str, ...]) -> float:
        """Return the seconds of download, reshard and upload, each complete before the next."""
        script = (
            "import sys, obstore, pathlib\n"
            "from obstore.store import from_url\n"
            "verb, prefix, folder = sys.argv[1:]\n"
            f"store = from_url('s3://{BUCKET}', client_options={{'allow_http': True}})\n"
            "folder = pathlib.Path(folder)\n"
            "if verb == 'get':\n"
            "    for batch in obstore.list(store, prefix):\n"
            "        for meta in batch:\n"
            "            path = folder / meta['path'][len(prefix) + 1:]\n"
            "            path.parent.mkdir(parents=True, exist_ok=True)\n"
            "            with path.open('wb') as file:\n"
            "                for chunk in obstore.get(store, meta['path']).stream():\n"
            "                    file.write(chunk)\n"
            "else:\n"
            "    for path in folder.rglob('*'):\n"
            "        if path.is_file():\n"
            "            obstore.put(store, f'{prefix}/{path.relative_to(folder)}', path)\n"
        )
        local, prefix = self.page.scratch_dir / "local", src.removeprefix(f"s3://{BUCKET}/")
        begun = time.perf_counter()
        run([sys.executable, "-c", script, "get", prefix, local])
        run(ckpt("reshard", local, self.written, *words))
        run([sys.executable, "-c", script, "put", "uploaded", self.written])
        seconds = time.perf_counter() - begun
        server.delete(BUCKET, "uploaded")
        for path in (local, self.written):
            remove(path)
        return seconds


def read(how: str, url: str, *more: str, python: Path | None = None) -> dict[str, float]:
    """Run ``store_reader``; return its figures."""
    reader = Path(__file__).with_name("store_reader.py")
    done: Run = run([python or sys.executable, reader, how, url, *more])
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _find_number(plan: object, name: str) -> float:
    """Return a number by name, wherever it is in a JSON object."""
    if isinstance(plan, dict):
        if name in plan:
            return float(plan[name])
        for value in plan.values():
            if isinstance(value, dict) and (number := _find_number(value, name)):
                return number
    return 0.0


def main() -> int:
    """Measure, and print the table."""
    parser = page_parser("bench stores", __doc__, runs=3)
    sizes = {
        "size": (2.0, "of what is converted and read"),
        "small": (1.0, "of the smaller source of which memory is measured"),
        "large": (4.0, "of the larger one"),
    }
    for option, (default, text) in sizes.items():
        parser.add_argument(
            f"--{option}",
            type=lambda text: int(float(text) * GIB),
            default=int(default * GIB),
            metavar="GIB",
            help=f"GiB {text} [{default:g}]",
        )
    parser.add_argument("--ranks", type=int, default=1024, help="number of rank files [1024]")
    parser.add_argument(
        "--s3fs", type=Path, metavar="PYTHON", help="an interpreter with torch and s3fs"
    )
    options = parser.parse_args()

    def measure(page: Page) -> None:
        bench = Bench(page)
        bench.bytes_requested()
        bench.reading()
        bench.memory()
        bench.inspecting()
        bench.torch()
        bench.writing()

    return run_page(options, measure)


if __name__ == "__main__":
    sys.exit(main())
