"""What is read from an object store takes few requests, and no byte is fetched twice."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_cli.app import main
from core.files.object_listing import forget_listings
from core.files.remote_path import location_of
from core.files.remote_store import PAGE_BYTES, RemoteStore
from tests.support.object_stores import WebServer, web_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebServer]:
    """Returns a web server of five files with metadata at both ends."""
    for number in range(5):
        (tmp_path / f"r{number}.pt").write_bytes(bytes([number]) * 300_000)
    with web_server(tmp_path) as server:
        yield server


def spans_of(server: WebServer) -> list[tuple[str, int, int]]:
    """Return (path, first byte, byte after the last) of every request for a range."""
    spans = []
    for _, path, span in server.asked:
        if span is not None:
            first, _, last = span.removeprefix("bytes=").partition("-")
            spans.append((path, int(first), int(last) + 1))
    return spans


def store_of(server: WebServer) -> RemoteStore:
    return RemoteStore(location_of(server.url))  # type: ignore[arg-type]


def test_announced_metadata_is_asked_for_at_once_and_once(server: WebServer) -> None:
    store = store_of(server)
    names = [f"r{number}.pt" for number in range(5)]
    store.expect_headers(names)
    for number, name in enumerate(names):
        for offset in (0, 300_000 - 65_633, 300_000 - 22, 10):
            assert store.read(name, offset, 22) == bytes([number]) * 22
    n_requests = Counter(path for path, _, _ in spans_of(server))
    assert n_requests == {f"/{name}": 2 for name in names}


def test_data_in_pages_that_were_read_is_not_fetched_again(server: WebServer) -> None:
    store = store_of(server)
    store.expect_headers(["r1.pt"])
    store.read("r1.pt", 0, 8)
    store.expect([("r1.pt", 100, 299_000)])
    for start in range(100, 299_000, 10_000):
        buffer = bytearray(min(10_000, 299_000 - start))
        store.read_into("r1.pt", start, memoryview(buffer))
        assert buffer == bytes([1]) * len(buffer)
    spans = sorted((first, stop) for _, first, stop in spans_of(server))
    last = 300_000 - PAGE_BYTES
    assert spans == [(0, PAGE_BYTES), (PAGE_BYTES, last), (last, 300_000)]


def test_who_reads_two_headers_reads_those_of_the_others(server: WebServer) -> None:
    store = store_of(server)
    for number in range(5):
        assert store.exists(f"r{number}.pt")
    store.read("r0.pt", 0, 8)
    assert {path for path, _, _ in spans_of(server)} == {"/r0.pt"}
    store.read("r1.pt", 0, 8)
    store.read("r4.pt", 299_990, 8)
    store.read("r4.pt", 0, 8)
    assert Counter(path for path, _, _ in spans_of(server))["/r4.pt"] == 2


@pytest.mark.parametrize("limit", ["96MiB", "256MiB"])
def test_a_conversion_fetches_every_byte_once_whatever_the_memory(
    golden: Path, tmp_path: Path, limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = golden / "torch_dcp/fsdp2_dp2"
    with web_server(source) as server:
        forget_listings()
        options = ["--to", "safetensors", "--memory", limit]
        assert main(["convert", server.url, str(tmp_path / "a"), *options, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
    assert report
    fetched: dict[str, list[tuple[int, int]]] = {}
    for path, first, stop in spans_of(server):
        fetched.setdefault(path, []).append((first, stop))
    for spans in fetched.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_memory_for_reading_a_url_counts(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = golden / "torch_dcp/fsdp2_dp2"
    needs = []
    with web_server(source) as server:
        forget_listings()
        for path in (str(source), server.url):
            options = ["--to", "safetensors", "--dry-run", "--json", "--memory", "512MiB"]
            assert main(["convert", path, str(tmp_path / "a"), *options]) == 0
            needs.append(json.loads(capsys.readouterr().out)["memory_bytes"])
    assert needs[1] - needs[0] == (80 + 2 * 4) << 20
