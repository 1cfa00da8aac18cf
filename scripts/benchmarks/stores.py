"""scripts/bench stores: checkpoints in an object store, against a server on this machine.

The server (``store_server``) is a process of its own that logs every request. All ratios are of
runs in turn against it.

* Bytes: what the server sent, over what the plan needs at least.
* Reading: seconds of obstore's own get, 16 objects at a time, over those of ``core.open`` and every
  tensor. Below it, for comparison, the same over a get of ranges whose bytes are thrown away.
* Memory: peak RSS of a reshard from the store, at a small and a large size.
* Inspecting 1,024 rank files: requests; and depth, the number of times that nothing was in flight
  before more was asked for (or, if it is more, the longest chain of requests for one file, in the
  median, after those for the listing), with a server that waits 20 ms.
* torch.distributed.checkpoint through fsspec and s3fs, in an environment of its own (``--s3fs
  PYTHON``: an interpreter that has torch and s3fs).
* Writing: a reshard from the store to the store, beside obstore's get and multipart put, and beside
  download, reshard and upload. Skipped while ``ckpt`` refuses a URL as destination.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.measure import (
    Case,
    CommandError,
    Page,
    Run,
    ckpt,
    page_parser,
    remove,
    run,
    run_page,
    warm,
)

GIB, MIB = 1 << 30, 1 << 20
BYTES, READING, RSS_BYTES, DEPTH = 1.02, 0.9, 256e6, 3
WRITING, RESHARD, THREE_STEPS = 0.9, 0.8, 3.0
DELAY_S = 0.02
BUCKET = "bench"
CONVERSIONS = {
    "reshard TP4 → TP2": ("megatron-tp4", ("reshard", "--tp-new", "2")),
    "rank files → torch_dist": ("megatron-tp4", ("convert", "--to", "torch_dist")),
    "torch_dist → dcp": ("torch_dist", ("convert", "--to", "dcp")),
    "safetensors → dcp": ("safetensors", ("convert", "--to", "dcp")),
}


@dataclass(frozen=True)
class Request:
    """A request as the server logged it."""

    begun: float
    ended: float
    kind: str
    key: str
    n_received: int
    n_sent: int


def chain(requests: Sequence[Request]) -> int:
    """Return the length of the longest chain of requests of which none overlap."""
    length, end = 0, float("-inf")
    for request in sorted(requests, key=lambda request: request.ended):
        if request.begun >= end:
            length, end = length + 1, request.ended
    return length


def depth(requests: Sequence[Request]) -> int:
    """Return how many requests had to wait for others, one after another; see the page's text."""
    n_waves, end = 0, float("-inf")
    for request in sorted(requests, key=lambda request: request.begun):
        if request.begun >= end:
            n_waves += 1
        end = max(end, request.ended)
    lists = [request for request in requests if request.kind == "LIST"]
    by_key: dict[str, list[Request]] = {}
    for request in requests:
        if request.kind != "LIST":
            by_key.setdefault(request.key, []).append(request)
    # In the median: some requests wait only because all slots are taken.
    of_files = [chain(group) for group in by_key.values()] or [0]
    return max(n_waves, chain(lists) + statistics.median_low(of_files))


class Server:
    """The server, while it runs.

    Args:
        root: directory of the buckets.
        delay_s: seconds that it waits before each answer.
    """

    def __init__(self, root: Path, delay_s: float = 0.0) -> None:
        command = [sys.executable, "-m", "scripts.benchmarks.store_server", str(root)]
        self._process = subprocess.Popen(
            [*command, "--delay", str(delay_s)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def take_log(self) -> list[Request]:
        """Return the requests since the last call."""
        with urllib.request.urlopen(f"{self.url}/__log") as answer:
            return [Request(*entry) for entry in json.load(answer)]

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()


class Bench:
    """The rows of this bench."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.options = page.options
        self.root = page.scratch_dir / "stores"
        self.written = page.scratch_dir / "written"

    @contextmanager
    def server(self, delay_s: float = 0.0) -> Iterator[Server]:
        """Start a server and point the environment of what is measured at it."""
        (self.root / BUCKET).mkdir(parents=True, exist_ok=True)
        server = Server(self.root, delay_s)
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": server.url,
        }
        try:
            yield server
        finally:
            server.stop()

    def source(self, kind: str, n_bytes: int) -> str:
        """Return the URL of a checkpoint, which is made at its first use."""
        name = f"{kind}-{n_bytes >> 20}"
        folder = self.root / BUCKET / name
        if not folder.exists():
            print(f"making {name}", file=sys.stderr, flush=True)
            if kind == "torch_dist":
                self.source("megatron-tp4", n_bytes)
                ranks = folder.with_name(f"megatron-tp4-{n_bytes >> 20}")
                run(ckpt("convert", ranks, folder, "--to", "torch_dist", "-q"))
            else:
                maker = [sys.executable, "-m", "scripts.benchmarks.sources", kind, folder]
                run([*maker, "--bytes", str(n_bytes)])
        warm(folder)
        return f"s3://{BUCKET}/{name}"

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
                command = ckpt(verb, self.source(kind, self.options.size), self.written, *words)
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
        with self.page.tolerant(name), self.server():
            url = self.source("safetensors", self.options.size)
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
            with self.page.tolerant(name), self.server():
                url = self.source("megatron-tp4", n_bytes)
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
                url = self.source(f"ranks-{self.options.ranks}", MIB)
                server.take_log()
                done = run(ckpt("inspect", f"{url}/iter_0000100", *more))
                requests = server.take_log()
                kinds = ", ".join(
                    f"{n} {kind}" for kind, n in Counter(item.kind for item in requests).items()
                )
                n_sent = sum(request.n_sent for request in requests)
                self.page.add(
                    Case(f"{name}: depth", DEPTH, None, [done], value=depth(requests), unit="deep"),
                    Case(f"{name}: {kinds}", value=len(requests), unit="requests"),
                    Case(f"{name}: longest chain", value=chain(requests), unit="requests"),
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
        with self.page.tolerant(name), self.server():
            url = self.source("dcp-1", self.options.size)
            pairs = [
                (read("dcp", url, python=self.options.s3fs), read("core", url))
                for _ in range(self.options.runs)
            ]
            ratios = [theirs["seconds"] / ours["seconds"] for theirs, ours in pairs]
            case = Case(name, 1.0, value=statistics.median(ratios), unit="× ckpt's time")
            case.is_lower_better = False
            self.page.add(case)

    def writing(self) -> None:
        """Resharding from the store to the store."""
        name = "writing, reshard TP8 → TP4 in the store"
        if not self.page.wants(name):
            return
        with self.page.tolerant(name), self.server():
            src = self.source("megatron-tp8", self.options.size)
            dst = f"s3://{BUCKET}/written"
            words = ("--tp-new", "4", "-q")
            try:
                run(ckpt("reshard", src, dst, *words, "--dry-run"))
            except CommandError as err:
                self.skip(name, str(err).partition("error: ")[2].partition("\n")[0] or str(err))
                return
            self._write(name, src, dst, words)

    def _write(self, name: str, src: str, dst: str, words: tuple[str, ...]) -> None:
        """Measure a reshard in the store, obstore's get and put, and the three steps by hand."""
        in_store, by_hand, gets, puts = [], [], [], []
        for _ in range(self.options.runs):
            in_store.append(run(ckpt("reshard", src, dst, *words)))
            shutil.rmtree(self.root / BUCKET / "written")
            gets.append(read("objects", src)["seconds"])
            # As many bytes as the reshard writes, in one object.
            n_bytes = self.options.size
            puts.append(read("put", f"s3://{BUCKET}/put", str(n_bytes))["seconds"])
            (self.root / BUCKET / "put").unlink()
            by_hand.append(self._three_steps(src, words))
        slower = [max(pair) for pair in zip(gets, puts, strict=True)]
        for label, reach, others in (
            (f"{name}, × the slower of get and put", RESHARD, slower),
            (f"{name}, × obstore's multipart put", None, puts),
            (f"{name}, × download, reshard, upload", THREE_STEPS, by_hand),
        ):
            ratios = [other / ours.wall_s for other, ours in zip(others, in_store, strict=True)]
            case = Case(label, reach, None, in_store, value=statistics.median(ratios))
            case.unit, case.is_lower_better = "× its speed", False
            self.page.add(case)
        peak = max(done.rss_bytes for done in in_store)
        self.page.add(Case(f"{name}, peak RSS", RSS_BYTES / 1e6, value=peak / 1e6, unit="MB"))

    def _three_steps(self, src: str, words: tuple[str, ...]) -> float:
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
        for path in (local, self.written, self.root / BUCKET / "uploaded"):
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
