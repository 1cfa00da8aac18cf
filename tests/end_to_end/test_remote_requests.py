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
from tests.support.object_stores import spans_of, web_server
from tests.support.s3.client import S3Server, started_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    """Returns a web server of five files with metadata at both ends."""
    for number in range(5):
        (tmp_path / f"r{number}.pt").write_bytes(bytes([number]) * 300_000)
    with web_server(tmp_path) as server:
        yield server


def store_of(server: S3Server) -> RemoteStore:
    return RemoteStore(location_of(f"{server.url}/files"))  # type: ignore[arg-type]


def test_announced_metadata_is_asked_for_at_once_and_once(server: S3Server) -> None:
    store = store_of(server)
    names = [f"r{number}.pt" for number in range(5)]
    store.expect_headers(names)
    for number, name in enumerate(names):
        for offset in (0, 300_000 - 65_633, 300_000 - 22, 10):
            assert store.read(name, offset, 22) == bytes([number]) * 22
    n_requests = Counter(path for path, _, _ in spans_of(server.take_log()))
    assert n_requests == {f"files/{name}": 2 for name in names}


def test_data_in_pages_that_were_read_is_not_fetched_again(server: S3Server) -> None:
    store = store_of(server)
    store.expect_headers(["r1.pt"])
    store.read("r1.pt", 0, 8)
    store.expect_ranges([("r1.pt", 100, 299_000)])
    for start in range(100, 299_000, 10_000):
        buffer = bytearray(min(10_000, 299_000 - start))
        store.read_into("r1.pt", start, memoryview(buffer))
        assert buffer == bytes([1]) * len(buffer)
    spans = sorted((first, stop) for _, first, stop in spans_of(server.take_log()))
    last = 300_000 - PAGE_BYTES
    assert spans == [(0, PAGE_BYTES), (PAGE_BYTES, last), (last, 300_000)]


def test_who_reads_two_headers_reads_those_of_the_others(server: S3Server) -> None:
    store = store_of(server)
    for number in range(5):
        assert store.exists(f"r{number}.pt")
    store.read("r0.pt", 0, 8)
    assert {path for path, _, _ in spans_of(server.take_log())} == {"files/r0.pt"}
    store.read("r1.pt", 0, 8)
    store.read("r4.pt", 299_990, 8)
    store.read("r4.pt", 0, 8)
    assert Counter(path for path, _, _ in spans_of(server.take_log()))["files/r4.pt"] == 2


def test_a_small_object_is_fetched_once_for_all_stores(server: S3Server, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}" * 100)
    server.mount("files", tmp_path)
    for _ in range(2):
        assert store_of(server).read("config.json", 0, 200) == b"{}" * 100
    assert [path for path, _, _ in spans_of(server.take_log())] == ["files/config.json"]
    # Another content has another ETag.
    (tmp_path / "config.json").write_bytes(b"[]" * 90)
    server.mount("files", tmp_path)
    forget_listings()
    assert store_of(server).read("config.json", 0, 180) == b"[]" * 90


def test_announced_streams_are_asked_for_once_although_they_are_read_in_pieces(
    server: S3Server,
) -> None:
    store = store_of(server)
    store.expect_ranges([(f"r{number}.pt", 5_000, 40_000) for number in range(5)])
    for number in range(5):
        for offset in (5_000, 39_000, 20_000):
            assert store.read(f"r{number}.pt", offset, 1_000) == bytes([number]) * 1_000
    assert sorted(spans_of(server.take_log())) == [
        (f"files/r{number}.pt", 5_000, 40_000) for number in range(5)
    ]


@pytest.mark.parametrize("limit", ["96MiB", "256MiB"])
def test_a_conversion_fetches_every_byte_once_whatever_the_memory(
    golden: Path, tmp_path: Path, limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = golden / "torch_dcp/fsdp2_dp2"
    with web_server(source) as server:
        forget_listings()
        options = ["--to", "safetensors", "--memory", limit]
        assert (
            main(["convert", f"{server.url}/files", str(tmp_path / "a"), *options, "--json"]) == 0
        )
        report = json.loads(capsys.readouterr().out)
        asked = spans_of(server.take_log())
    assert report
    fetched: dict[str, list[tuple[int, int]]] = {}
    for path, first, stop in asked:
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
        for path in (str(source), f"{server.url}/files"):
            options = ["--to", "safetensors", "--dry-run", "--json", "--memory", "512MiB"]
            assert main(["convert", path, str(tmp_path / "a"), *options]) == 0
            needs.append(json.loads(capsys.readouterr().out)["memory_bytes"])
    assert needs[1] - needs[0] == (80 + 2 * 4) << 20


@pytest.mark.parametrize("n_requests", [1, 3])
def test_no_more_requests_are_in_flight_than_j_allows(
    golden: Path, tmp_path: Path, n_requests: int
) -> None:
    with started_server(delay_s=0.02) as server:
        server.mount("files", golden / "torch_dcp/fsdp2_dp2")
        forget_listings()
        options = ["--to", "safetensors", "-q", "-j", str(n_requests)]
        assert main(["convert", f"{server.url}/files", str(tmp_path / "a"), *options]) == 0
        log = server.take_log()
    # Each is in flight for as long as the server waits, and longer.
    in_flight = [sum(a.begun <= b.begun < a.begun + 0.02 for a in log) for b in log]
    assert max(in_flight) <= n_requests
