"""Servers that stand for object stores, on the loopback interface: moto's S3, and a web server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from core.files.object_client import set_storage_options
from core.files.object_listing import forget_listings


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start moto's S3 server, point the environment at it, and yield a boto3 client."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tests")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    set_storage_options({})
    forget_listings()
    try:
        yield boto3.client("s3", region_name="us-east-1")
    finally:
        server.stop()


def upload(client: Any, folder: Path, bucket: str, prefix: str) -> None:
    """Copy a directory into a bucket."""
    for path in folder.rglob("*"):
        if path.is_file():
            key = f"{prefix}/{path.relative_to(folder).as_posix()}"
            client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())


@dataclass
class WebServer:
    """A web server of a directory, with ranges, ETags and ``If-Match``.

    Args:
        url: address of the directory.
        asked: (method, path, range) of every request.
        failing: path → statuses to answer with, first; one is used up per request.
        has_ranges: whether requests for a part are answered with that part.
    """

    url: str
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    failing: dict[str, list[int]] = field(default_factory=dict)
    has_ranges: bool = True


@contextmanager
def web_server(folder: Path) -> Iterator[WebServer]:
    """Serve a directory."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.respond(is_head=True)

        def do_GET(self) -> None:
            self.respond(is_head=False)

        def respond(self, *, is_head: bool) -> None:
            span = self.headers.get("Range")
            described.asked.append((self.command, self.path, span))
            path = folder / self.path.lstrip("/")
            failures = described.failing.get(self.path)
            if failures:
                self.finish_with(failures.pop(0), b"")
                return
            if not path.is_file():
                self.finish_with(404, b"")
                return
            data = path.read_bytes()
            tag = f'"{hash(data) & (2**63 - 1):x}"'
            if self.headers.get("If-Match", tag) != tag:
                self.finish_with(412, b"")
            elif span and described.has_ranges:
                first, _, last = span.removeprefix("bytes=").partition("-")
                start, end = int(first), min(int(last) + 1, len(data))
                extra = {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
                self.finish_with(206, data[start:end], {"ETag": tag, **extra})
            else:
                self.finish_with(200, data, {"ETag": tag}, is_head=is_head)

        def finish_with(
            self,
            status: int,
            data: bytes,
            headers: dict[str, str] | None = None,
            *,
            is_head: bool = False,
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            if not is_head:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    described = WebServer(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    set_storage_options({})
    forget_listings()
    try:
        yield described
    finally:
        server.shutdown()
        server.server_close()
