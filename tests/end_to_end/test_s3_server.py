"""The S3 server of the tests does what S3 does, as boto3, obstore and s3fs see it."""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import S3Store

from tests.support.certificates import self_signed
from tests.support.s3.client import S3Server, started_server
from tests.support.s3.rules import EXPIRED, RETRY_AFTER, Rule

boto3 = pytest.importorskip("boto3")
CHECKSUMS = ("CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256")
MIB = 1 << 20


def client_of(server: S3Server, **settings: Any) -> Any:
    """Return a boto3 client that repeats nothing."""
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=server.url,
        region_name="us-east-1",
        aws_access_key_id="a",
        aws_secret_access_key="b",
        config=Config(retries={"total_max_attempts": 1}, read_timeout=20),
        **settings,
    )


def store_of(server: S3Server, **settings: Any) -> S3Store:
    return S3Store(
        "runs",
        endpoint=server.url,
        region="us-east-1",
        access_key_id="a",
        secret_access_key="b",
        client_options={"allow_http": True},
        **settings,
    )


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    with started_server() as server:
        yield server


@pytest.fixture
def server(running: S3Server) -> Iterator[S3Server]:
    """Returns the server with an empty bucket, ``runs``."""
    running.create_bucket("runs")
    running.take_log()
    yield running
    running.set_rules()
    running.delete("runs")


@pytest.fixture
def client(server: S3Server) -> Any:
    return client_of(server)


def refusal(call: Any, **arguments: Any) -> tuple[int, str]:
    """Return status and code of a request that is refused."""
    from botocore.exceptions import ClientError

    with pytest.raises(ClientError) as caught:
        call(Bucket="runs", **arguments)
    answer = caught.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]


def test_an_object_is_put_read_copied_and_deleted(client: Any) -> None:
    data, key = os.urandom(1000), "a/b c+ü&<.bin"
    tag = client.put_object(Bucket="runs", Key=key, Body=data, Metadata={"x": "y"})["ETag"]
    assert tag == f'"{hashlib.md5(data).hexdigest()}"'
    client.copy_object(Bucket="runs", Key="copy", CopySource={"Bucket": "runs", "Key": key})
    client.delete_object(Bucket="runs", Key=key)
    assert refusal(client.head_object, Key=key)[0] == 404
    answer = client.get_object(Bucket="runs", Key="copy", IfMatch=tag)
    assert answer["Body"].read() == data and answer["Metadata"] == {"x": "y"}


@pytest.mark.parametrize(
    ("span", "expected"), [("5-9", (5, 10)), ("990-", (990, 1000)), ("-3", (997, 1000))]
)
def test_a_range_is_read(client: Any, span: str, expected: tuple[int, int]) -> None:
    data = os.urandom(1000)
    client.put_object(Bucket="runs", Key="a", Body=data)
    answer = client.get_object(Bucket="runs", Key="a", Range=f"bytes={span}")
    assert answer["Body"].read() == data[slice(*expected)]
    assert answer["ContentRange"] == f"bytes {expected[0]}-{expected[1] - 1}/1000"
    assert refusal(client.get_object, Key="a", Range="bytes=1000-") == (416, "InvalidRange")


def test_conditions_are_kept(client: Any) -> None:
    tag = client.put_object(Bucket="runs", Key="a", Body=b"1", IfNoneMatch="*")["ETag"]
    refused = (412, "PreconditionFailed")
    assert refusal(client.put_object, Key="a", Body=b"2", IfNoneMatch="*") == refused
    assert refusal(client.put_object, Key="a", Body=b"2", IfMatch='"0"') == refused
    assert refusal(client.put_object, Key="b", Body=b"2", IfMatch='"0"') == (404, "NoSuchKey")
    assert refusal(client.get_object, Key="a", IfMatch='"0"') == refused
    client.put_object(Bucket="runs", Key="a", Body=b"2", IfMatch=tag)
    assert client.get_object(Bucket="runs", Key="a")["Body"].read() == b"2"


@pytest.mark.parametrize("name", CHECKSUMS)
def test_checksums_are_compared_and_returned(client: Any, name: str) -> None:
    data = os.urandom(10_000)
    stated = client.put_object(Bucket="runs", Key="a", Body=data, ChecksumAlgorithm=name)
    answer = client.get_object(Bucket="runs", Key="a", ChecksumMode="ENABLED")
    assert answer["Body"].read() == data
    assert answer[f"Checksum{name}"] == stated[f"Checksum{name}"]
    wrong = {f"Checksum{name}": stated[f"Checksum{name}"]}
    assert refusal(client.put_object, Key="b", Body=b"another", **wrong)[0] == 400
    assert refusal(client.put_object, Key="b", Body=b"x", ContentMD5="A" * 22 + "==")[0] == 400
    assert refusal(client.head_object, Key="b")[0] == 404


def test_listings_have_pages_and_common_prefixes(server: S3Server, client: Any) -> None:
    for key in ["a/1", "a/2", "a!", "b", "c/d/1", "c/e"]:
        client.put_object(Bucket="runs", Key=key, Body=b"1")
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket="runs", Delimiter="/", PaginationConfig={"PageSize": 1}
    )
    names = [
        [entry["Key"] for entry in page.get("Contents", [])]
        + [entry["Prefix"] for entry in page.get("CommonPrefixes", [])]
        for page in pages
    ]
    assert names == [["a!"], ["a/"], ["b"], ["c/"]]
    store = store_of(server)
    listed = obstore.list_with_delimiter(store, "c")
    assert [entry["path"] for entry in listed["objects"]] == ["c/e"]
    assert listed["common_prefixes"] == ["c/d"]
    assert [entry["path"] for batch in obstore.list(store, "a/") for entry in batch] == [
        "a/1",
        "a/2",
    ]


def test_many_objects_are_deleted_at_once(server: S3Server, client: Any) -> None:
    for number in range(5):
        client.put_object(Bucket="runs", Key=f"a/{number}", Body=b"1")
    obstore.delete(store_of(server), ["a/0", "a/1", "missing"])
    client.delete_objects(Bucket="runs", Delete={"Objects": [{"Key": "a/2"}], "Quiet": True})
    assert [*server.objects("runs")] == ["a/3", "a/4"]


def test_an_upload_of_parts_in_any_order_becomes_an_object(server: S3Server, client: Any) -> None:
    parts = {1: os.urandom(5 * MIB), 2: os.urandom(5 * MIB), 3: b"end"}
    place = {
        "Key": "a",
        "UploadId": client.create_multipart_upload(Bucket="runs", Key="a")["UploadId"],
    }
    tags = {
        number: client.upload_part(Bucket="runs", PartNumber=number, Body=parts[number], **place)
        for number in (3, 1, 2)
    }
    listed = client.list_parts(Bucket="runs", MaxParts=2, **place)
    assert [part["PartNumber"] for part in listed["Parts"]] == [1, 2] and listed["IsTruncated"]
    assert server.uploads() == [("runs", "a")]
    uploads = client.list_multipart_uploads(Bucket="runs", Prefix="a")["Uploads"]
    assert [upload["UploadId"] for upload in uploads] == [place["UploadId"]]

    def asked(*numbers: int) -> dict[str, Any]:
        entries = [{"PartNumber": n, "ETag": tags[n]["ETag"]} for n in numbers]
        return {**place, "MultipartUpload": {"Parts": entries}}

    complete = client.complete_multipart_upload
    assert refusal(complete, **asked(2, 1)) == (400, "InvalidPartOrder")
    assert refusal(complete, **asked(3, 1)) == (400, "InvalidPartOrder")
    wrong = {**place, "MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": '"0"'}]}}
    assert refusal(complete, **wrong) == (400, "InvalidPart")
    tag = complete(Bucket="runs", IfNoneMatch="*", **asked(1, 2, 3))["ETag"]
    joined = b"".join(hashlib.md5(part).digest() for part in parts.values())
    assert tag == f'"{hashlib.md5(joined).hexdigest()}-3"'
    content = b"".join(parts.values())
    near = client.get_object(Bucket="runs", Key="a", Range=f"bytes={5 * MIB - 9}-{10 * MIB}")
    assert near["Body"].read() == content[5 * MIB - 9 : 10 * MIB + 1]
    assert server.objects("runs") == {"a": hashlib.sha256(content).hexdigest()}
    assert refusal(complete, **asked(1, 2, 3)) == (404, "NoSuchUpload")


def test_an_upload_is_refused_or_aborted(server: S3Server, client: Any) -> None:
    client.put_object(Bucket="runs", Key="a", Body=b"1")
    place = {
        "Key": "a",
        "UploadId": client.create_multipart_upload(Bucket="runs", Key="a")["UploadId"],
    }
    entries = [
        {
            "PartNumber": number,
            "ETag": client.upload_part(Bucket="runs", PartNumber=number, Body=b"x", **place)[
                "ETag"
            ],
        }
        for number in (1, 2)
    ]
    complete = client.complete_multipart_upload
    both = {**place, "MultipartUpload": {"Parts": entries}}
    assert refusal(complete, **both) == (400, "EntityTooSmall")
    first = {**place, "MultipartUpload": {"Parts": entries[:1]}}
    assert refusal(complete, IfNoneMatch="*", **first) == (412, "PreconditionFailed")
    client.abort_multipart_upload(Bucket="runs", **place)
    assert server.uploads() == []
    assert refusal(client.list_parts, **place) == (404, "NoSuchUpload")


def test_bodies_in_chunks_of_aws_are_decoded_and_compared(tmp_path: Path) -> None:
    # Over TLS, boto3 sends the checksum behind the body.
    certificate = self_signed(tmp_path / "server.pem")
    path = tmp_path / "data"
    path.write_bytes(data := os.urandom(3 * MIB + 5))
    with started_server(certificate=certificate) as server:
        client = client_of(server, verify=str(certificate))
        client.create_bucket(Bucket="runs")
        with path.open("rb") as file:
            client.put_object(Bucket="runs", Key="a", Body=file, ChecksumAlgorithm="CRC32")
        client.upload_file(str(path), "runs", "b")
        digest = hashlib.sha256(data).hexdigest()
        assert server.objects("runs") == {"a": digest, "b": digest}
        assert client.get_object(Bucket="runs", Key="a")["Body"].read() == data


def test_obstore_puts_by_parts_and_gets(server: S3Server) -> None:
    store, data = store_of(server), os.urandom(12 * MIB)
    obstore.put(store, "a", data, use_multipart=True, chunk_size=5 * MIB)
    assert bytes(obstore.get(store, "a").bytes()) == data
    ranges = obstore.get_ranges(store, "a", starts=[0, 9 * MIB], ends=[10, 9 * MIB + 10])
    assert [bytes(part) for part in ranges] == [data[:10], data[9 * MIB : 9 * MIB + 10]]
    operations = [entry.operation for entry in server.take_log()]
    assert operations.count("UploadPart") == 3
    assert server.uploads() == []


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is None, reason="s3fs is not installed")
def test_s3fs_writes_and_reads(server: S3Server) -> None:
    script = (
        "import os, fsspec; fs = fsspec.filesystem('s3'); data = os.urandom(6 << 20)\n"
        "with fs.open('runs/d/a', 'wb', block_size=5 << 20) as file: file.write(data)\n"
        "assert fs.cat('runs/d/a') == data and fs.ls('runs/d') == ['runs/d/a']\n"
        "fs.rm('runs/d', recursive=True); assert not fs.exists('runs/d/a')\n"
    )
    variables = {**os.environ, **server.environment()}
    subprocess.run([sys.executable, "-c", script], env=variables, check=True, timeout=120)


def test_mounted_files_are_read_and_never_changed(server: S3Server, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    server.mount("runs", tmp_path, "below/")
    store = store_of(server)
    assert bytes(obstore.get(store, "below/a").bytes()) == b"old"
    obstore.put(store, "below/a", b"new")
    assert bytes(obstore.get(store, "below/a").bytes()) == b"new"
    obstore.delete(store, "below/a")
    assert (tmp_path / "a").read_bytes() == b"old"


def test_the_log_has_every_request(server: S3Server, client: Any) -> None:
    client.put_object(Bucket="runs", Key="a", Body=b"12345")
    client.get_object(Bucket="runs", Key="a", Range="bytes=1-2")["Body"].read()
    client.list_objects_v2(Bucket="runs", Prefix="a")
    put, get, listing = server.take_log()
    assert (put.operation, put.key, put.n_received, put.status) == ("PutObject", "runs/a", 5, 200)
    assert (get.span, get.n_sent, get.status) == ("bytes=1-2", 2, 206)
    assert put.begun <= put.ended <= get.begun and put.connection == get.connection
    assert listing.operation == "ListObjectsV2" and "prefix=a" in listing.query
    assert server.take_log() == []


@pytest.mark.parametrize("rule", [Rule(status=500), EXPIRED, RETRY_AFTER])
def test_a_rule_answers_with_an_error(server: S3Server, client: Any, rule: Rule) -> None:
    server.set_rules(rule)
    refused = refusal(client.put_object, Key="a", Body=b"1")
    assert refused == (rule.status, rule.code)
    assert server.objects("runs") == {}
    client.put_object(Bucket="runs", Key="a", Body=b"1")
    assert [entry.fault for entry in server.take_log()] == ["error", ""]


def test_a_rule_counts_the_requests_that_it_concerns(server: S3Server, client: Any) -> None:
    server.set_rules(Rule(operation="PutObject", key="^b", first=2, times=None))
    for key in ("a", "b1", "a2"):
        client.put_object(Bucket="runs", Key=key, Body=b"1")
    for key in ("b2", "b3"):
        assert refusal(client.put_object, Key=key, Body=b"1") == (500, "InternalError")
    assert [*server.objects("runs")] == ["a", "a2", "b1"]


@pytest.mark.parametrize(("fault", "is_done"), [("cut", False), ("lost", True), ("truncate", True)])
def test_a_connection_is_cut_before_or_after_the_effect(
    server: S3Server, client: Any, fault: str, is_done: bool
) -> None:
    from botocore.exceptions import BotoCoreError

    server.set_rules(Rule(fault))
    with pytest.raises(BotoCoreError):
        client.put_object(Bucket="runs", Key="a", Body=b"1")
    assert ("a" in server.objects("runs")) == is_done


def test_bodies_are_cut_shortened_damaged_and_slow(server: S3Server, client: Any) -> None:
    from botocore.exceptions import BotoCoreError

    data, store = os.urandom(100_000), store_of(server)
    obstore.put(store, "a", data)  # states no checksum, which boto3 would compare

    def get(**arguments: str) -> bytes:
        body: bytes = client.get_object(Bucket="runs", Key="a", **arguments)["Body"].read()
        return body

    server.set_rules(
        Rule("length"), Rule("truncate", first=2), Rule("slow", first=3, bytes_per_s=500_000)
    )
    assert get() == data[:50_000]
    with pytest.raises(BotoCoreError):
        get()
    server.take_log()
    assert get() == data
    (entry,) = server.take_log()
    assert entry.ended - entry.begun >= 0.1
    server.set_rules(Rule("whole"))
    assert get(Range="bytes=0-3") == data
    server.set_rules(Rule("flip"))
    flipped = bytes(obstore.get(store, "a").bytes())
    assert [i for i in range(len(data)) if flipped[i] != data[i]] == [50_000]


def test_a_request_is_never_answered(server: S3Server) -> None:
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    server.set_rules(Rule("hang"))
    client = boto3.client(
        "s3",
        endpoint_url=server.url,
        region_name="us-east-1",
        aws_access_key_id="a",
        aws_secret_access_key="b",
        config=Config(retries={"total_max_attempts": 1}, read_timeout=1),
    )
    with pytest.raises(BotoCoreError):
        client.put_object(Bucket="runs", Key="a", Body=b"1")
    assert server.objects("runs") == {}


@pytest.mark.first(1)
@pytest.mark.parametrize(("fault", "is_done"), [("kill", False), ("kill after", True)])
def test_a_process_is_killed_at_a_request(server: S3Server, fault: str, is_done: bool) -> None:
    script = (
        "import os, sys, urllib.request; sys.stdin.readline()\n"
        f"urllib.request.urlopen(urllib.request.Request('{server.url}/runs/a', b'1', method='PUT'))"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    server.set_rules(Rule(fault, pid=process.pid))
    process.communicate(b"\n", timeout=60)
    assert process.returncode == -9
    gc.collect()  # clients of other tests keep their connections until then
    assert server.settle()
    assert ("a" in server.objects("runs")) == is_done
