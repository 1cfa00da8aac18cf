"""Checkpoints are read from object stores and web servers as from a directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_cli.app import main
from core.errors import SourceChangedError, StorageError
from core.files.object_client import put_object, set_storage_options
from core.files.object_listing import forget_listings
from core.files.remote_path import RemotePath, location_of
from core.files.remote_store import PAGE_BYTES, RemoteStore
from tests.support.object_stores import s3_server, spans_of, upload, web_server
from tests.support.s3.client import S3Server
from tests.support.s3.rules import Rule

SOURCES = {
    "mcore_legacy/dense_gqa/tp2_pp1": ["--to", "torch_dist"],
    "mcore_torch_dist/dense_gqa/tp2_pp2": ["--to", "megatron", "--tp-new", "1"],
    "mcore0121_zarr/dense_gqa/tp2_pp2": ["--to", "dcp"],
    "hf/llama/safetensors_single": ["--to", "megatron", "--tp-new", "2"],
    "torch_dcp/fsdp2_dp2": ["--to", "safetensors"],
}
LARGE = {"mcore_legacy/dense_gqa/tp2_pp1", "mcore0121_zarr/dense_gqa/tp2_pp2"}
"""Sources of much data or of many objects; ``test_urls_write`` reads them, too."""
TORCH_DIST = "mcore_torch_dist/dense_gqa/tp2_pp2"
SAFETENSORS = "hf/llama/safetensors_single"


@pytest.fixture(scope="module")
def bucket(golden: Path) -> Iterator[Any]:
    """Returns a client of moto's S3, whose bucket ``runs`` holds ``SOURCES`` save the large."""
    with pytest.MonkeyPatch.context() as monkeypatch, s3_server(monkeypatch) as client:
        client.create_bucket(Bucket="runs")
        for name in SOURCES.keys() - LARGE:
            upload(client, golden / name, "runs", name)
        yield client


@pytest.fixture
def server(golden: Path) -> Iterator[S3Server]:
    """Returns a web server of tests/golden."""
    with web_server(golden) as server:
        yield server


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith("ckpt-manifest.json")
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in LARGE else ()) for name in SOURCES],
)
def test_what_is_read_from_s3_equals_what_is_read_from_a_directory(
    bucket: Any, golden: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = SOURCES[name]
    if name in LARGE:
        upload(bucket, golden / name, "runs", name)
    assert main(["convert", f"s3://runs/{name}", str(tmp_path / "a"), *options, "-q"]) == 0
    assert main(["convert", str(golden / name), str(tmp_path / "b"), *options, "-q"]) == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert main(["diff", f"s3://runs/{name}", str(golden / name), "-q"]) == 0
    capsys.readouterr()
    results = []
    for path in (f"s3://runs/{name}", str(golden / name)):
        code = main(["validate", "--deep", path, "--json"])
        verdict = json.loads(capsys.readouterr().out)["checkpoints"][0]
        # What the store has checksums of is covered, and noted.
        findings = [
            item for item in verdict["findings"] if item["code"] not in ("CK704", "CK832", "CK833")
        ]
        assert main(["inspect", path, "--json"]) == 0
        page = json.loads(capsys.readouterr().out)
        results.append((code, findings, {key: page[key] for key in page.keys() - {"path"}}))
    assert results[0] == results[1]


@pytest.mark.first(1)
@pytest.mark.parametrize("name", [SAFETENSORS, TORCH_DIST])
def test_a_web_server_has_no_listing_and_is_read_all_the_same(
    server: S3Server, golden: Path, tmp_path: Path, name: str
) -> None:
    options = ["--to", "dcp", "-q"]
    assert main(["convert", f"{server.url}/files/{name}", str(tmp_path / "a"), *options]) == 0
    assert main(["convert", str(golden / name), str(tmp_path / "b"), *options]) == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_single_file_is_read_by_its_header_alone(server: S3Server) -> None:
    assert main(["inspect", f"{server.url}/files/{SAFETENSORS}/model.safetensors"]) == 0
    gets = [entry.span for entry in server.take_log() if entry.method == "GET"]
    assert gets == [f"bytes=0-{PAGE_BYTES - 1}"]


def test_failed_requests_are_repeated(server: S3Server) -> None:
    path = f"/{SAFETENSORS}/model.safetensors"
    server.set_rules(Rule(key=f"{path}$", status=503), Rule(key=f"{path}$", first=2, status=500))
    assert main(["inspect", f"{server.url}/files{path}"]) == 0


def test_a_server_without_ranges_is_named(
    server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.set_rules(Rule("whole", times=None))
    assert main(["inspect", f"{server.url}/files/{SAFETENSORS}/model.safetensors"]) == 6
    assert "does not support HTTP range requests" in capsys.readouterr().err


def test_an_object_that_changes_meanwhile_is_an_error(
    bucket: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.put_object(Bucket="runs", Key="changing/a.dat", Body=b"1" * 200_000)
    store = RemoteStore(location_of("s3://runs/changing"))  # type: ignore[arg-type]
    assert store.read("a.dat", 0, 4) == b"1111"
    bucket.put_object(Bucket="runs", Key="changing/a.dat", Body=b"2" * 200_000)
    with pytest.raises(SourceChangedError, match="changed while it was being read"):
        store.read("a.dat", 150_000, 4)
    with pytest.raises(SourceChangedError, match="changed while it was being read"):
        store.verify_unchanged()


def test_a_listing_tells_of_the_directories_in_it(bucket: Any) -> None:
    bucket.put_object(Bucket="runs", Key="parent/iter_1/a.dat", Body=b"1")
    forget_listings()
    assert [path.name for path in location_of("s3://runs/parent").iterdir()] == ["iter_1"]
    # No request: the store would not name the object any more.
    bucket.delete_object(Bucket="runs", Key="parent/iter_1/a.dat")
    bucket.put_object(Bucket="runs", Key="parent/iter_2/b.dat", Body=b"2")
    assert RemoteStore(location_of("s3://runs/parent/iter_1")).files() == ["a.dat"]  # type: ignore[arg-type]
    # It does not tell what is missing now.
    assert RemoteStore(location_of("s3://runs/parent/iter_2")).files() == ["b.dat"]  # type: ignore[arg-type]


def test_ranges_are_read_by_few_requests(tmp_path: Path) -> None:
    data = bytes(range(256)) * 80_000
    (tmp_path / "a.bin").write_bytes(data)
    spans = [(19_000_000, 100), (10, 5), (1_000, 2), (0, 12_000_000), (19_000_200, 1)]
    buffers = [memoryview(bytearray(n)) for n in (1, 9_000_000, 7)]
    with web_server(tmp_path) as server:
        store = RemoteStore(location_of(f"{server.url}/files"))  # type: ignore[arg-type]
        parts = store.read_spans("a.bin", spans)
        store.read_vector("a.bin", 3, buffers, 9_000_008)
        asked = spans_of(server.take_log())
    assert parts == [data[offset : offset + n_bytes] for offset, n_bytes in spans]
    assert b"".join(buffers) == data[3 : 3 + 9_000_008]
    n_bytes = sum(stop - first for _, first, stop in asked)
    assert n_bytes < 1.02 * (12_000_000 + 9_000_008) + 2 * 65_536
    assert len(asked) == 3 + 3 + 2  # parts of 4 MiB of the long span and of the vector; the groups


def test_who_reads_one_header_reads_those_of_its_siblings(golden: Path) -> None:
    with web_server(golden) as server:
        url = f"{server.url}/files/hf/llama/safetensors_sharded"
        store = RemoteStore(location_of(url))  # type: ignore[arg-type]
        shards = [name for name in store.files() if name.endswith(".safetensors")]
        assert len(shards) > 1
        for name in shards:
            store.read(name, 0, 8)
            store.read(name, 8, 100)
        asked = [path for path, _, _ in spans_of(server.take_log())]
    assert len(asked) == len(set(asked)) == len(shards)


def test_asking_for_the_time_of_a_file_is_not_reading_it(server: S3Server) -> None:
    store = RemoteStore(location_of(f"{server.url}/files/{SAFETENSORS}"))  # type: ignore[arg-type]
    store.modified_ns("model.safetensors")
    assert store.disk_bytes("model.safetensors") > 0
    assert store.opened == []


def test_a_bucket_is_listed_like_a_directory(
    bucket: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "s3://runs/hf", "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert [item["path"] for item in page["checkpoints"]] == [f"s3://runs/{SAFETENSORS}"]
    assert page["checkpoints"][0]["bytes"] > 80_000
    assert main(["validate", "s3://runs/hf"]) == 1
    assert f"ckpt validate s3://runs/{SAFETENSORS}" in capsys.readouterr().out
    assert main(["inspect", "s3://runs"]) == 0
    assert "s3://runs/torch_dcp/fsdp2_dp2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["inspect", "s3://runs/nothing"], 2, "no such object"),
        (["inspect", "s3://nowhere/x"], 6, "no such bucket: nowhere"),
        (["inspect", "s3://runs/x", "--storage-option", "color=red"], 2, "no such option"),
        (["inspect", "s3://runs/x", "--storage-option", "region"], 2, "expects KEY=VALUE"),
        (
            ["convert", "a", "b", "--to", "dcp", "--config", "s3://runs/c"],
            2,
            "a local path is needed",
        ),
        (["inspect", "hdfs://runs/x"], 2, "ckpt cannot read"),
    ],
)
def test_requests_that_cannot_be_met_say_why(
    bucket: Any, words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    assert message in capsys.readouterr().err


def test_a_manifest_is_written_beside_the_data(
    bucket: Any, golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(golden / TORCH_DIST, tmp_path / "a")
    assert main(["manifest", "-q", str(tmp_path / "a")]) == 0
    upload(bucket, golden / TORCH_DIST, "runs", "listed")
    assert main(["manifest", "s3://runs/listed"]) == 0
    assert "s3://runs/listed/iter_0000010/ckpt-manifest.json" in capsys.readouterr().out
    content = bucket.get_object(Bucket="runs", Key="listed/iter_0000010/ckpt-manifest.json")[
        "Body"
    ].read()
    assert content == (tmp_path / "a/iter_0000010/ckpt-manifest.json").read_bytes()
    assert main(["manifest", "s3://runs/listed"]) == 2
    assert "the manifest already exists" in capsys.readouterr().err
    bucket.put_object(Bucket="runs", Key="listed/iter_0000010/ckpt-manifest.json", Body=b"{}")
    assert main(["manifest", "s3://runs/listed", "--force", "-q"]) == 0
    assert main(["validate", "--deep", "s3://runs/listed", "-q"]) == 0


def test_a_manifest_of_one_file_is_named_after_it(bucket: Any) -> None:
    assert main(["manifest", "-q", f"s3://runs/{SAFETENSORS}/model.safetensors"]) == 0
    name = f"{SAFETENSORS}/model.safetensors.ckpt-manifest.json"
    assert bucket.head_object(Bucket="runs", Key=name)["ContentLength"] > 0
    bucket.delete_object(Bucket="runs", Key=name)


def test_a_web_server_takes_no_manifest(
    server: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{server.url}/files/{SAFETENSORS}"
    assert main(["manifest", url]) == 2
    assert "--output FILE" in capsys.readouterr().err
    assert main(["manifest", url, "-q", "-o", str(tmp_path / "m.json")]) == 0


def test_an_object_is_only_replaced_on_request(bucket: Any) -> None:
    path = location_of("s3://runs/put/x")
    assert isinstance(path, RemotePath)
    put_object(path, b"a", replace=False)
    put_object(path, b"a", replace=False)  # the repetition of a request whose answer was lost
    with pytest.raises(FileExistsError):
        put_object(path, b"b", replace=False)
    put_object(path, b"b", replace=True)
    assert bucket.get_object(Bucket="runs", Key="put/x")["Body"].read() == b"b"


def test_a_write_that_cannot_be_done_says_why(bucket: Any) -> None:
    for url, options, message in (
        ("s3://nowhere/x", {}, "no such bucket: nowhere"),
        ("s3://runs/y", {"conditional_put": "disabled"}, "does not support conditional writes"),
    ):
        set_storage_options(options)
        with pytest.raises(StorageError, match=message):
            put_object(location_of(url), b"a", replace=False)  # type: ignore[arg-type]
    set_storage_options({})


def test_a_server_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forget_listings()
    options = ["endpoint=http://127.0.0.1:9", "access_key_id=a", "secret_access_key=hidden"]
    words = [word for option in options for word in ("--storage-option", option)]
    assert main(["inspect", "s3://runs/x", *words, "--debug"]) == 6
    err = capsys.readouterr().err
    assert "it refused the connection" in err
    assert "hidden" not in err
