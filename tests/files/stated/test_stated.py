"""Checksums are taken from what S3, Google and Azure answer; what is unclear is not compared."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from types import SimpleNamespace
from typing import Any

import pytest

from core.errors import SourceChangedError
from core.files.object_client import put_object, set_storage_options
from core.files.object_listing import forget_listings
from core.files.remote_path import RemotePath, location_of
from core.files.remote_store import RemoteStore
from core.files.stated.checksum import RangeSum, StatedChecksum, StatedChecksums, whole_checksum
from core.files.stated.lookup import ask_by_signed_url, ask_s3, look_up_checksums
from tests.support.object_stores import s3_server

PATH = location_of("s3://bucket/a.bin")
assert isinstance(PATH, RemotePath)


def text(value: str) -> str:
    """Return hexadecimal digits as base64."""
    return base64.b64encode(bytes.fromhex(value)).decode()


class S3:
    """A client whose answers are given, with one page per list of parts."""

    def __init__(self, head: dict[str, Any], *pages: list[tuple[int, str]]) -> None:
        self.head = head
        self.pages = pages
        self.asked: list[dict[str, Any]] = []

    def head_object(self, **request: Any) -> dict[str, Any]:
        self.asked.append(request)
        return self.head

    def get_object_attributes(self, **request: Any) -> dict[str, Any]:
        if not self.pages:
            return {"ObjectSize": 10}
        number = request["PartNumberMarker"]
        parts = self.pages[number]
        return {
            "ObjectParts": {
                "Parts": [{"Size": size, "ChecksumCRC32": value} for size, value in parts],
                "IsTruncated": number + 1 < len(self.pages),
                "NextPartNumberMarker": number + 1,
            }
        }


def ask(client: S3, n_bytes: int = 10) -> tuple[StatedChecksum, ...]:
    return ask_s3(client, PATH, n_bytes=n_bytes, e_tag='"x"')


def test_s3_states_a_checksum_of_the_whole_object() -> None:
    client = S3({"ChecksumCRC64NVME": text("00" * 8), "ChecksumType": "FULL_OBJECT"})
    assert ask(client) == (StatedChecksum("CRC-64/NVME", (RangeSum(0, 10, "00" * 8),)),)
    assert client.asked[0]["ChecksumMode"] == "ENABLED" and client.asked[0]["IfMatch"] == '"x"'
    in_parts = {
        "ChecksumCRC32": text("01020304"),
        "ETag": '"c1f0-3"',
        "ChecksumType": "FULL_OBJECT",
    }
    assert ask(S3(in_parts)) == (StatedChecksum("CRC-32", (RangeSum(0, 10, "01020304"),)),)
    assert ask(S3({})) == ()
    assert ask(S3({"ChecksumCRC32": "no base64"})) == ()


def test_s3_states_a_checksum_of_each_part() -> None:
    head = {"ChecksumCRC32": text("01020304") + "-3", "ChecksumType": "COMPOSITE"}
    values = ["00000001", "00000002", "00000003"]
    pages = [[(4, text(values[0])), (4, text(values[1]))], [(2, text(values[2]))]]
    ranges = (RangeSum(0, 4, values[0]), RangeSum(4, 8, values[1]), RangeSum(8, 10, values[2]))
    assert ask(S3(head, *pages)) == (StatedChecksum("CRC-32", ranges),)


@pytest.mark.parametrize("pages", [[], [[(4, "AAAAAA==")]], [[(10, "")]]])
def test_parts_that_are_not_stated_are_not_made_up(pages: list[list[tuple[int, str]]]) -> None:
    for head in (
        {"ChecksumCRC32": text("01020304") + "-3"},
        {"ChecksumCRC32": text("01020304"), "ChecksumType": "COMPOSITE"},
        {"ChecksumCRC32": text("01020304"), "ETag": '"c1f0-3"'},
    ):
        assert ask(S3(head, *pages)) == (StatedChecksum("CRC-32", ()),)


def test_a_malformed_checksum_is_none() -> None:
    for malformed in ("", "AAAA", "!!!!", "AAAAAAAA"):
        assert whole_checksum("CRC-32", malformed, 4) is None


def test_s3_is_asked_through_boto3() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch, s3_server(monkeypatch) as client:
        client.create_bucket(Bucket="bucket")
        client.put_object(Bucket="bucket", Key="x/a", Body=b"hello", ChecksumAlgorithm="SHA256")
        put_object(PATH.parent / "x/b", b"none", replace=False)
        store = RemoteStore(location_of("s3://bucket/x"))  # type: ignore[arg-type]
        stated = look_up_checksums(store, ["a", "b"])
        assert stated.failure is None and list(stated.by_name) == ["a"]
        assert stated.by_name["a"][0].algorithm == "SHA-256"
        assert store.opened == []
        client.put_object(Bucket="bucket", Key="x/a", Body=b"other", ChecksumAlgorithm="SHA256")
        with pytest.raises(SourceChangedError, match="changed while it was being read"):
            look_up_checksums(store, ["a"])


def test_what_is_of_no_use_is_not_asked_for() -> None:
    names = [f"{number:02}" for number in range(40)]
    with pytest.MonkeyPatch.context() as monkeypatch, s3_server(monkeypatch) as client:
        client.create_bucket(Bucket="bucket")
        for number, name in enumerate(names):
            algorithm = "SHA256" if number % 2 else "CRC32"
            client.put_object(
                Bucket="bucket", Key=f"x/{name}", Body=b"hello", ChecksumAlgorithm=algorithm
            )
        store = RemoteStore(location_of("s3://bucket/x"))  # type: ignore[arg-type]
        stated = look_up_checksums(store, names, needed="CRC-32")
    stated_checksum = StatedChecksum("CRC-32", (RangeSum(0, 5, "3610a686"),))
    assert stated.by_name == {
        name: (StatedChecksum("SHA-256", ()) if number % 2 else stated_checksum,)
        for number, name in enumerate(names)
    }


def test_without_boto3_that_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = lambda name: None if name == "boto3" else object()
    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    store = RemoteStore(PATH.parent)
    failure = look_up_checksums(store, ["a.bin"]).failure
    assert failure == "boto3 is not installed (run pip install boto3)"


def test_a_web_server_is_not_asked() -> None:
    store = RemoteStore(location_of("https://host/x"))  # type: ignore[arg-type]
    assert look_up_checksums(store, ["a"]) == StatedChecksums()


@contextmanager
def answering(
    monkeypatch: pytest.MonkeyPatch, headers: list[tuple[str, str]]
) -> Iterator[list[Any]]:
    """Let the request of a signed URL be answered with headers; yields the requests."""
    requests: list[Any] = []
    message = Message()
    for name, value in headers:
        message[name] = value

    class Answer(SimpleNamespace):
        def __enter__(self) -> Answer:
            return self

        def __exit__(self, *_error: object) -> None:
            pass

    def urlopen(request: Any, timeout: float) -> Answer:
        requests.append(request)
        return Answer(headers=message)

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    set_storage_options(
        {"account_name": "devstoreaccount1", "account_key": base64.b64encode(b"key").decode()}
    )
    forget_listings()
    try:
        yield requests
    finally:
        set_storage_options({})


def test_the_headers_of_google_and_azure(monkeypatch: pytest.MonkeyPatch) -> None:
    path = location_of("az://container/x")
    assert isinstance(path, RemotePath)
    both = [("x-goog-hash", f"crc32c={text('01020304')},md5={text('00' * 16)}")]
    apart = [("x-goog-hash", f"crc32c={text('01020304')}"), ("x-goog-hash", "md5=malformed")]
    azure = [("Content-MD5", text("11" * 16))]
    crc32c = StatedChecksum("CRC-32C", (RangeSum(0, 7, "01020304"),))
    expected = [
        (both, (crc32c, StatedChecksum("MD5", (RangeSum(0, 7, "00" * 16),)))),
        (apart, (crc32c,)),
        (azure, (StatedChecksum("MD5", (RangeSum(0, 7, "11" * 16),)),)),
        ([], ()),
    ]
    for headers, checksums in expected:
        with answering(monkeypatch, headers) as requests:
            assert ask_by_signed_url(path, n_bytes=7, e_tag='"x"') == checksums
        assert requests[0].get_method() == "HEAD" and requests[0].headers["If-match"] == '"x"'
        assert "sig=" in requests[0].full_url
