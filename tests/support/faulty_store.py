"""An S3 server of a directory that answers chosen requests with a fault."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from core.files.object_client import set_storage_options
from core.files.object_listing import forget_listings

ACCESS_KEY = "AKIA-that-no-message-may-contain"
SECRET = "a-secret-that-no-message-may-contain"
TOKEN = "a-token-that-no-message-may-contain"


@dataclass(frozen=True)
class Fault:
    """What is answered instead of the object.

    Args:
        status: status of the answer; 0 cuts the connection in the middle of the body.
        code: S3's name of the error.
        headers: further headers.
    """

    status: int
    code: str = ""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class FaultyStore:
    """A bucket, ``runs``, of a directory's files, with listings, ranges and ``If-Match``.

    Args:
        port: port on the loopback interface.
        fault_for: called with the operation (``list``, ``head`` or ``get``), the key and the number
            of such requests before; returns the fault to answer with, or None.
        asked: (operation, key) of every request.
    """

    port: int
    fault_for: Callable[[str, str, int], Fault | None] = lambda operation, key, n_before: None
    asked: list[tuple[str, str]] = field(default_factory=list)


@contextmanager
def faulty_store(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, certificate: Path | None = None
) -> Iterator[FaultyStore]:
    """Serve a directory as the bucket ``runs``, and point the environment at the server.

    Args:
        certificate: file with a certificate and its key, for TLS; None for plain HTTP.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.respond("head")

        def do_GET(self) -> None:
            is_object = urlsplit(self.path).path.strip("/") != "runs"
            self.respond("get" if is_object else "list")

        def respond(self, operation: str) -> None:
            url = urlsplit(self.path)
            query = parse_qs(url.query)
            key = unquote(url.path).removeprefix("/runs").strip("/")
            n_before = sum(asked == operation for asked, _ in store.asked)
            store.asked.append((operation, key))
            fault = store.fault_for(operation, key, n_before)
            if fault is not None and fault.status:
                text = f"<Error><Code>{fault.code}</Code><Message>no</Message></Error>"
                self.finish_with(fault.status, text.encode(), fault.headers)
            elif operation == "list":
                self.finish_with(200, listing(query["prefix"][0], "delimiter" in query), {})
            else:
                self.send_object(key, is_cut=fault is not None)

        def send_object(self, key: str, *, is_cut: bool) -> None:
            path = folder / key
            if not path.is_file():
                self.finish_with(404, b"<Error><Code>NoSuchKey</Code></Error>", {})
                return
            data, tag = path.read_bytes(), '"1"'
            if self.headers.get("If-Match", tag) != tag:
                self.finish_with(412, b"<Error><Code>PreconditionFailed</Code></Error>", {})
                return
            first, last = 0, len(data) - 1
            headers = {"ETag": tag, "Last-Modified": "Mon, 02 Nov 2026 10:00:00 GMT"}
            if span := self.headers.get("Range"):
                first, last = map(int, span.removeprefix("bytes=").split("-"))
                last = min(last, len(data) - 1)
                headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            body = data[first : last + 1]
            self.finish_with(206 if span else 200, body, headers, is_cut=is_cut)

        def finish_with(
            self, status: int, data: bytes, headers: dict[str, str], *, is_cut: bool = False
        ) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[: len(data) // 2] if is_cut else data)
            self.close_connection = is_cut

    def listing(prefix: str, is_flat: bool) -> bytes:
        keys = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        entries = []
        for key in sorted(key for key in keys if key.startswith(prefix)):
            head, slash, _ = key.removeprefix(prefix).partition("/")
            if is_flat and slash:
                entries.append(
                    f"<CommonPrefixes><Prefix>{escape(prefix + head)}/</Prefix></CommonPrefixes>"
                )
                continue
            size = (folder / key).stat().st_size
            entries.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>&quot;1&quot;</ETag>"
                "<LastModified>2026-11-02T10:00:00.000Z</LastModified></Contents>"
            )
        found = "".join(dict.fromkeys(entries))
        answer = f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"
        return answer.encode()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    store = FaultyStore(server.server_port)
    scheme = "http" if certificate is None else "https"
    for name in ("AWS_PROFILE", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"{scheme}://127.0.0.1:{store.port}")
    set_storage_options({})
    forget_listings()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
