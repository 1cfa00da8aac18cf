"""A small S3 server for multipart uploads that checks what it is sent, and misbehaves on demand."""

from __future__ import annotations

import base64
import hashlib
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree

import pytest

from core.files.object_client import set_storage_options
from core.files.object_listing import forget_listings


@dataclass
class StrictS3:
    """The state of the server, and what it does wrong.

    Args:
        knows_checksums: confirm CRC-32 when an upload begins, and compare it.
        refuses_checksums: answer 501 to their headers.
        knows_conditions: answer to ``If-None-Match``, not with 501.
        failing: statuses and codes to answer with, first; one is used up per request.
        n_damaged: number of parts to change on arrival.
        n_lost: number of finished uploads whose answer is not sent.
        objects, uploads: key → content; upload → part → content.
        asked: number of requests by method and parameter of the query.
        checks: names of the headers with checksums of parts.
    """

    knows_checksums: bool = True
    refuses_checksums: bool = False
    knows_conditions: bool = True
    failing: list[tuple[int, str]] = field(default_factory=list)
    n_damaged: int = 0
    n_lost: int = 0
    objects: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    checks: set[str] = field(default_factory=set)


@contextmanager
def strict_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[StrictS3]:
    """Start the server, and point the environment at it; its only bucket is ``runs``."""
    state = StrictS3()

    class Handler(_Handler):
        store = state

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tests-secret")
    monkeypatch.setenv("AWS_REGION", "eu-west-7")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    set_storage_options({})
    forget_listings()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: StrictS3

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        key = self._key()
        if key not in self.store.objects:
            self._answer(404)
            return
        data, tag = self.store.objects[key]
        self._answer(200, n_bytes=len(data), ETag=tag)

    def do_POST(self) -> None:
        body = self._body()
        if self._fails():
            return
        if "uploads" in self._query():
            has_checksum = "x-amz-checksum-algorithm" in self.headers
            if has_checksum and self.store.refuses_checksums:
                self._refuse(501, "NotImplemented")
                return
            name = f"upload-{len(self.store.uploads)}"
            self.store.uploads[name] = {}
            is_stated = self.store.knows_checksums and has_checksum
            stated = {"x_amz_checksum_algorithm": "CRC32"} if is_stated else {}
            text = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId>"
            self._answer(200, f"{text}</InitiateMultipartUploadResult>", **stated)
        else:
            self._complete(body)

    def _complete(self, body: bytes) -> None:
        name = self._query()["uploadId"][0]
        if name not in self.store.uploads:
            self._refuse(404, "NoSuchUpload")
            return
        if self.headers.get("If-None-Match") == "*":
            if not self.store.knows_conditions:
                self._refuse(501, "NotImplemented")
                return
            if self._key() in self.store.objects:
                self._refuse(412, "PreconditionFailed")
                return
        parts = self.store.uploads.pop(name)
        numbers = [
            int(node.text or 0) for node in ElementTree.fromstring(body).findall(".//{*}PartNumber")
        ]
        digests = b"".join(hashlib.md5(parts[number]).digest() for number in numbers)
        tag = f'"{hashlib.md5(digests).hexdigest()}-{len(numbers)}"'
        self.store.objects[self._key()] = b"".join(parts[n] for n in numbers), tag
        if self.store.n_lost:
            self.store.n_lost -= 1
            self.close_connection = True
            return
        self._answer(
            200,
            f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>",
        )

    def do_PUT(self) -> None:
        body = self._body()
        if self._fails():
            return
        query = self._query()
        if query["uploadId"][0] not in self.store.uploads:
            self._refuse(404, "NoSuchUpload")
            return
        if self.store.n_damaged:
            self.store.n_damaged -= 1
            body = bytes([body[0] ^ 1]) + body[1:]
        digest = hashlib.md5(body).digest()
        sums = {
            "Content-MD5": base64.b64encode(digest).decode(),
            "x-amz-checksum-crc32": base64.b64encode(zlib.crc32(body).to_bytes(4)).decode(),
        }
        stated = {name for name in sums if name in self.headers}
        self.store.checks |= stated
        if any(self.headers[name] != sums[name] for name in stated):
            self._refuse(400, "BadDigest")
            return
        self.store.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
        self._answer(200, ETag=f'"{digest.hex()}"')

    def do_DELETE(self) -> None:
        if self.store.uploads.pop(self._query()["uploadId"][0], None) is None:
            self._refuse(404, "NoSuchUpload")
        else:
            self._answer(204)

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/runs/")

    def _query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query, keep_blank_values=True)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _fails(self) -> bool:
        """Answer with the next failure if there is one."""
        self.store.asked[f"{self.command} {min(self._query(), default='')}"] += 1
        if not self.store.failing:
            return False
        self._refuse(*self.store.failing.pop(0))
        return True

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>no</Message></Error>")

    def _answer(
        self, status: int, text: str = "", *, n_bytes: int | None = None, **headers: str
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text) if n_bytes is None else n_bytes))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(text.encode())
