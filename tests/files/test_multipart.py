"""Multipart uploads: sent in parts, invisible until they are finished."""

from __future__ import annotations

import base64
import datetime
import os
import threading
import traceback
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import obstore
import pytest
from botocore.exceptions import ClientError

from core.errors import AccessDeniedError, StorageError, UsageError
from core.files.multipart import ordered as ordered_module
from core.files.multipart import s3
from core.files.multipart import s3_client as s3_client_module
from core.files.multipart.client import upload_client
from core.files.multipart.ordered import OrderedUploads
from core.files.multipart.protocol import ObjectUpload
from core.files.multipart.s3_client import RetryDeadline, s3_client
from core.files.object_client import client_of, no_credentials, put_object, set_storage_options
from core.files.object_listing import find_object
from core.files.remote_path import RemotePath, location_of
from tests.support.emulators import azurite
from tests.support.object_stores import mounted_store, s3_server
from tests.support.s3.rules import SLOW_DOWN
from tests.support.strict_s3 import StrictS3, strict_s3

MIB = 1 << 20
PART = 5 * MIB
"""S3's smallest part but the last one; moto checks that."""


def remote(url: str) -> RemotePath:
    path = location_of(url)
    assert isinstance(path, RemotePath)
    return path


@pytest.fixture(scope="module")
def module_patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def server(module_patch: pytest.MonkeyPatch) -> Iterator[Any]:
    with s3_server(module_patch) as client:
        client.create_bucket(Bucket="runs")
        yield client


@pytest.fixture(scope="module")
def data() -> memoryview:
    return memoryview(os.urandom(2 * PART + 1000))


def keys(server: Any) -> list[str]:
    return [entry["Key"] for entry in server.list_objects_v2(Bucket="runs").get("Contents", ())]


def content(server: Any, key: str) -> bytes:
    body: bytes = server.get_object(Bucket="runs", Key=key)["Body"].read()
    return body


def read_object(path: RemotePath) -> bytes:
    return bytes(obstore.get(client_of(path), path.key).bytes())


def send_all(upload: ObjectUpload, data: memoryview, numbers: tuple[int, ...] = (3, 1, 2)) -> None:
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda n: upload.send(n, data[(n - 1) * PART : n * PART]), numbers))


def test_parts_are_sent_in_any_order_and_seen_only_after_the_end(
    server: Any, data: memoryview
) -> None:
    path = remote("s3://runs/order/model.safetensors")
    client = upload_client(path)
    assert client.takes_any_order
    upload = client.begin(path, len(data), PART)
    send_all(upload, data)
    assert path.key not in keys(server)
    upload.finish(replaces=False)
    assert content(server, path.key) == data


def test_more_parts_than_an_answer_lists(
    server: Any, data: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_PAGE_PARTS", 2)
    path = remote("s3://runs/pages/a")
    upload = upload_client(path).begin(path, len(data), PART)
    sent = [upload.send(n, data[(n - 1) * PART : n * PART]) for n in (2, 3, 1)]
    assert upload.sent() == {part.number: part for part in sent}
    assert upload.sent()[3].crc == zlib.crc32(data[2 * PART :])
    upload.abort()


def test_another_process_continues_an_upload(server: Any, data: memoryview) -> None:
    path = remote("s3://runs/resume/deep/a")
    begun = upload_client(path).begin(path, len(data), PART)
    begun.send(3, data[2 * PART :])

    client = upload_client(path)
    (upload,) = client.unfinished(remote("s3://runs/resume"))
    assert (upload.path, upload.upload_id) == (path, begun.upload_id)
    assert client.unfinished(remote("s3://runs/resume/dee")) == []
    assert {n: part.n_bytes for n, part in upload.sent().items()} == {3: 1000}
    for number in (1, 2):
        upload.send(number, data[(number - 1) * PART : number * PART])
    # The first one finishes what both have sent.
    begun.finish(replaces=False)
    assert content(server, path.key) == data
    assert client.unfinished(remote("s3://runs")) == []


def test_an_upload_without_all_parts_is_not_finished(server: Any, data: memoryview) -> None:
    path = remote("s3://runs/incomplete/a")
    client = upload_client(path)
    upload = client.begin(path, len(data), PART)
    upload.send(1, data[:PART])
    upload.send(3, data[2 * PART :])
    for candidate in (upload, client.attach(path, upload.upload_id)):
        with pytest.raises(StorageError, match="part 2 of 3 is missing"):
            candidate.finish(replaces=False)
    upload.send(2, data[: PART - 1])
    with pytest.raises(
        StorageError, match=r"add up to 10,486,759 bytes, but the object is 10,486,760 bytes long"
    ):
        upload.finish(replaces=False)
    upload.abort()


def test_an_aborted_upload_leaves_nothing(server: Any, data: memoryview) -> None:
    path = remote("s3://runs/aborted/a")
    client = upload_client(path)
    upload = client.begin(path, len(data), PART)
    upload.send(1, data[:PART])
    upload.abort()
    upload.abort()
    assert client.unfinished(remote("s3://runs/aborted")) == []


@pytest.mark.parametrize("n_bytes", [0, 1, 3 * MIB])
def test_an_existing_object_is_replaced_only_on_request(server: Any, n_bytes: int) -> None:
    path = remote(f"s3://runs/exists/{n_bytes}")
    put_object(path, b"old", replace=True)
    upload = upload_client(path).begin(path, n_bytes, PART)
    data = os.urandom(n_bytes)
    if n_bytes:
        upload.send(1, memoryview(data))
    with pytest.raises(FileExistsError):
        upload.finish(replaces=False)
    assert content(server, path.key) == b"old"
    upload.finish(replaces=True)
    assert content(server, path.key) == data


def test_the_store_states_the_checksum_of_the_whole_object(server: Any, data: memoryview) -> None:
    path = remote("s3://runs/stated/a")
    upload = upload_client(path).begin(path, len(data), PART)
    send_all(upload, data)
    upload.finish(replaces=False)
    answer = server.head_object(Bucket="runs", Key=path.key, ChecksumMode="ENABLED")
    assert base64.b64decode(answer["ChecksumCRC32"]) == zlib.crc32(data).to_bytes(4)


def test_errors_have_the_words_of_every_other_request(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = remote("s3://missing/a")
    with pytest.raises(StorageError, match="no such bucket: missing"):
        upload_client(path).begin(path, 1, PART)
    with pytest.raises(StorageError, match="no such bucket: missing"):
        upload_client(path).unfinished(path)
    with pytest.raises(UsageError, match="cannot write to a web server"):
        upload_client(remote("https://host/a"))

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(StorageError, match="no credentials found") as info:
        upload_client(path).begin(path, 1, PART)
    assert "AWS_ACCESS_KEY_ID" in (info.value.hint or "")


@pytest.mark.parametrize("has_boto3", [True, False])
def test_a_profile_that_nothing_reads_is_not_blamed(
    has_boto3: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = object() if has_boto3 else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    hint = no_credentials(location_of("s3://runs/a")).hint or ""
    assert ("or AWS_PROFILE" in hint) == has_boto3
    assert ("pip install 'ckpt-toolkit[s3]'" in hint) != has_boto3


def test_options_are_those_of_the_other_client(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    options = {"aws_endpoint": endpoint, "region": "eu-south-9", "access_key_id": "a"}
    set_storage_options({**options, "AWS_SECRET_ACCESS_KEY": "b", "request_payer": "true"})
    try:
        path = remote("s3://runs/options/a")
        client = s3_client(path, n_connections=1)
        assert client.meta.region_name == "eu-south-9"
        upload = upload_client(path).begin(path, 1, PART)
        upload.send(1, memoryview(b"x"))
        upload.finish(replaces=False)
        assert content(server, path.key) == b"x"
    finally:
        set_storage_options({})


@pytest.fixture
def strict() -> Iterator[StrictS3]:
    with pytest.MonkeyPatch.context() as patch, strict_s3(patch) as state:
        yield state
    set_storage_options({})  # forget the clients of this server


def test_parts_are_signed_by_boto3_as_awscrt_would(monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.auth import AUTH_TYPE_MAPS
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    now = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    for module in ("botocore.auth", "botocore.crt.auth"):
        monkeypatch.setattr(f"{module}.get_current_datetime", lambda **_: now)
    signed = {}
    for name in ("s3v4", s3._signer_of_parts("s3v4")):
        request = AWSRequest(
            "PUT", "http://127.0.0.1:1/runs/a?partNumber=1&uploadId=b", data=b"abc"
        )
        signer = AUTH_TYPE_MAPS[name](Credentials("id", "secret", "token"), "s3", "eu-west-1")
        signer.add_auth(request)
        signed[type(signer).__module__] = request.headers["Authorization"]
    assert len(signed) == 2
    assert len({*signed.values()}) == 1
    assert s3._signer_of_parts("v4-s3express") is None


def test_a_part_that_arrives_damaged_is_sent_again(strict: StrictS3) -> None:
    path = remote("s3://runs/a")
    upload = upload_client(path).begin(path, 4, 2)
    strict.n_damaged = 2
    upload.send(2, memoryview(b"cd"))
    upload.send(1, memoryview(b"ab"))
    upload.finish(replaces=False)
    assert strict.objects["a"][0] == b"abcd"
    assert strict.checks == {"x-amz-checksum-crc32"}


def test_damage_that_stays_is_an_error(strict: StrictS3) -> None:
    path = remote("s3://runs/a")
    upload = upload_client(path).begin(path, 2, 2)
    strict.n_damaged = 99
    with pytest.raises(StorageError, match=r"different bytes than were sent \(400 BadDigest\)"):
        upload.send(1, memoryview(b"ab"))


@pytest.mark.parametrize("refuses", [True, False])
def test_a_store_without_checksums_compares_md5(strict: StrictS3, refuses: bool) -> None:
    strict.refuses_checksums, strict.knows_checksums = refuses, False
    path = remote("s3://runs/a")
    client = upload_client(path)
    for name in ("a", "b"):
        upload = client.begin(remote(f"s3://runs/{name}"), 2, 2)
        strict.n_damaged = 1
        part = upload.send(1, memoryview(b"ab"))
        assert part.crc == zlib.crc32(b"ab")
        upload.finish(replaces=False)
    assert strict.objects["a"][0] == strict.objects["b"][0] == b"ab"
    assert strict.checks == {"Content-MD5"}
    # A store that refuses is asked only once.
    assert strict.asked["POST uploads"] == (4 if refuses else 2)


def test_an_end_whose_answer_is_lost_is_recognised(strict: StrictS3) -> None:
    path = remote("s3://runs/a")
    upload = upload_client(path).begin(path, 2, 2)
    upload.send(1, memoryview(b"ab"))
    strict.n_lost = 1
    upload.finish(replaces=False)
    assert strict.asked["POST uploadId"] == 2
    with pytest.raises(StorageError, match="the upload no longer exists"):
        upload.send(1, memoryview(b"ab"))


def test_an_upload_that_another_process_replaced_is_not_taken_for_finished(
    strict: StrictS3,
) -> None:
    path = remote("s3://runs/a")
    upload = upload_client(path).begin(path, 2, 2)
    upload.send(1, memoryview(b"ab"))
    strict.uploads.clear()
    strict.objects["a"] = b"xy", '"0123-1"'
    with pytest.raises(StorageError, match="the upload no longer exists"):
        upload.finish(replaces=True)
    with pytest.raises(FileExistsError):
        upload.finish(replaces=False)


def test_a_store_without_conditional_writes_is_not_trusted(strict: StrictS3) -> None:
    strict.knows_conditions = False
    path = remote("s3://runs/a")
    upload = upload_client(path).begin(path, 2, 2)
    upload.send(1, memoryview(b"ab"))
    with pytest.raises(StorageError, match="does not support conditional writes"):
        upload.finish(replaces=False)
    upload.finish(replaces=True)


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "AccessDenied", r"no permission to write this path \(403 AccessDenied\)"),
        (403, "SignatureDoesNotMatch", r"access denied \(403 SignatureDoesNotMatch\)"),
        (400, "ExpiredToken", r"the credentials have expired \(400 ExpiredToken\)"),
        (403, "RequestTimeTooSkewed", "this machine's clock is wrong"),
        (400, "IllegalLocationConstraintException", r"the request failed \(400 IllegalLoc"),
    ],
)
def test_refusals_in_the_middle(strict: StrictS3, status: int, code: str, message: str) -> None:
    path = remote("s3://runs/a")
    upload = upload_client(path).begin(path, 2, 2)
    strict.failing = [(status, code)] * 20
    with pytest.raises(StorageError, match=message) as info:
        upload.send(1, memoryview(b"ab"))
    assert isinstance(info.value, AccessDeniedError) is ("denied" in message or "perm" in message)
    assert "tests-secret" not in "".join(traceback.format_exception(info.value))


def test_failures_of_the_store_are_repeated(strict: StrictS3) -> None:
    path = remote("s3://runs/a")
    upload = upload_client(path).begin(path, 2, 2)
    strict.failing = [(503, "SlowDown"), (500, "InternalError")]
    upload.send(1, memoryview(b"ab"))
    assert strict.failing == []


def ordered(path: RemotePath, n_bytes: int) -> ObjectUpload:
    client = OrderedUploads(path)
    assert not client.takes_any_order
    assert client.unfinished(path.parent) == []
    upload = client.begin(path, n_bytes, PART)
    assert upload.upload_id == ""
    return upload


def send_in_order(upload: ObjectUpload, data: memoryview) -> None:
    for start in range(0, len(data), PART):
        buffer = bytearray(data[start : start + PART])
        part = upload.send(start // PART + 1, memoryview(buffer))
        assert part.crc == zlib.crc32(buffer)
        buffer[:] = bytes(len(buffer))  # the caller may use it again


def send_and_finish(upload: ObjectUpload, data: memoryview) -> None:
    send_in_order(upload, data)
    upload.finish(replaces=False)


@pytest.mark.parametrize("n_bytes", [0, 5, MIB + 1, 2 * PART, 2 * PART + 1000])
def test_an_object_sent_in_order_is_seen_only_after_the_end(
    server: Any, data: memoryview, n_bytes: int
) -> None:
    path = remote(f"s3://runs/ordered/{n_bytes}")
    upload = ordered(path, n_bytes)
    send_in_order(upload, data[:n_bytes])
    assert upload.sent() == {}
    assert path.key not in keys(server)
    upload.finish(replaces=False)
    assert content(server, path.key) == data[:n_bytes]
    upload.abort()  # does nothing any more
    assert path.key in keys(server)


@pytest.mark.parametrize("n_bytes", [5, 2 * PART])
def test_an_object_sent_in_order_is_replaced_only_on_request(
    server: Any, data: memoryview, n_bytes: int
) -> None:
    path = remote(f"s3://runs/ordered-exists/{n_bytes}")
    put_object(path, b"old", replace=True)
    upload = ordered(path, n_bytes)
    send_in_order(upload, data[:n_bytes])
    with pytest.raises(FileExistsError):
        upload.finish(replaces=False)
    assert content(server, path.key) == b"old"
    upload.finish(replaces=True)
    assert content(server, path.key) == data[:n_bytes]


@pytest.mark.parametrize("n_bytes", [5, 2 * PART])
def test_an_aborted_object_sent_in_order_leaves_nothing(
    server: Any, data: memoryview, n_bytes: int
) -> None:
    path = remote(f"s3://runs/ordered-aborted/{n_bytes}")
    upload = ordered(path, n_bytes)
    upload.send(1, data[: n_bytes // 2])
    with pytest.raises(StorageError, match="incomplete"):
        upload.finish(replaces=False)
    upload.abort()
    upload.abort()
    assert path.key not in keys(server)
    assert upload_client(path).unfinished(path.parent) == []


def test_errors_reach_who_sends_in_order(server: Any, data: memoryview) -> None:
    path = remote("s3://missing/a")
    for n_bytes in (5, 2 * PART):
        upload = ordered(path, n_bytes)
        with pytest.raises(StorageError, match="no such bucket: missing"):
            send_and_finish(upload, data[:n_bytes])
        upload.abort()
    with pytest.raises(UsageError, match="cannot be resumed"):
        OrderedUploads(path).attach(path, "name")


def test_many_uploads_wait_in_one_thread(server: Any, data: memoryview) -> None:
    paths = [remote(f"s3://runs/many/{number}") for number in range(10)]
    uploads = [ordered(path, 2 * MIB) for path in paths]
    for upload in uploads:
        upload.send(1, data[:MIB])
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("ckpt-uploads") == 1
    for upload in uploads:
        upload.send(2, data[MIB : 2 * MIB])
        upload.finish(replaces=False)
    assert all(content(server, path.key) == data[: 2 * MIB] for path in paths)


def test_azure_keeps_a_blob_invisible_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: memoryview
) -> None:
    with azurite(monkeypatch, tmp_path):
        for n_bytes in (5, 2 * PART + 1000):
            path = remote(f"az://runs/a/{n_bytes}")
            client = upload_client(path)
            aborted, upload = (client.begin(path, n_bytes, PART) for _ in range(2))
            send_in_order(aborted, data[:n_bytes])
            aborted.abort()
            send_in_order(upload, data[:n_bytes])
            assert find_object(path) is None
            upload.finish(replaces=False)
            assert read_object(path) == data[:n_bytes]
            other = memoryview(bytes(n_bytes))
            with pytest.raises(FileExistsError):
                send_and_finish(client.begin(path, n_bytes, PART), other)


class _Answer:
    """An answer as botocore passes it on, with its status only."""

    def __init__(self, status_code: int) -> None:
        self.status_code = status_code
        self.name = "UploadPart"

    def pass_to(self, deadline: RetryDeadline) -> None:
        parsed = {"Error": {"Code": "SlowDown"}}
        deadline.check(response=(self, parsed), caught_exception=None, operation=self)


def test_requests_are_repeated_until_none_has_succeeded_for_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(s3_client_module, "monotonic", lambda: now[0])
    deadline = RetryDeadline()
    for seconds, status in ((0, 503), (50, 500), (55, 200), (70, 429), (130, 503)):
        now[0] = seconds
        _Answer(status).pass_to(deadline)
    now[0] = 131
    with pytest.raises(ClientError, match="SlowDown"):
        _Answer(503).pass_to(deadline)
    # A success ends the count, and a connection that breaks is one more failure.
    _Answer(404).pass_to(deadline)
    deadline.check(response=None, caught_exception=OSError("cut"), operation=None)
    now[0] = 192
    with pytest.raises(OSError, match="cut"):
        deadline.check(response=None, caught_exception=OSError("cut"), operation=None)


def test_a_store_that_throttles_everything_is_given_up_soon(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(s3_client_module, "PATIENCE_S", 0.2)
    with mounted_store(tmp_path, monkeypatch) as server:
        client = upload_client(remote("s3://runs/a"))
        server.take_log()
        server.set_rules(replace(SLOW_DOWN, times=None))
        with pytest.raises(StorageError, match="throttling"):
            client.begin(remote("s3://runs/a"), 5, PART)
        assert 1 < len(server.take_log()) < s3_client_module._N_ATTEMPTS


def test_all_threads_share_one_loop() -> None:
    ordered_module._begin_loop.cache_clear()
    barrier = threading.Barrier(8)

    def ask(_: int) -> object:
        barrier.wait()
        return ordered_module._loop(os.getpid())

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(8)))) == 1
