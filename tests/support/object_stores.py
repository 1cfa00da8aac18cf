"""Servers that stand for object stores, on the loopback interface: moto's S3, and our own.

Our own (``tests.support.s3``) is fast, can be told to fail, and logs its requests; moto's knows
more of S3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from core.files.object_client import set_storage_options
from core.files.object_listing import forget_listings
from tests.support.s3.client import S3Server, shared_server, started_server
from tests.support.s3.server import LoggedRequest


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


@contextmanager
def mounted_store(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    certificate: Path | None = None,
    is_constant: bool = False,
) -> Iterator[S3Server]:
    """Serve a directory as the bucket ``runs``, and point the environment at the server.

    Args:
        is_constant: the directory never changes, as ``S3Server.mount`` has it.
        certificate: file with a certificate and its key, for TLS; None for plain HTTP.
    """
    lent = started_server(certificate=certificate) if certificate else shared_server()
    with lent as server:
        server.mount("runs", folder, is_constant=is_constant)
        for name in ("AWS_PROFILE", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        set_storage_options({})
        forget_listings()
        yield server


@contextmanager
def web_server(folder: Path) -> Iterator[S3Server]:
    """Serve a directory as ``/files`` to whoever asks as of a web server: nothing is listed."""
    with shared_server() as server:
        server.mount("files", folder)
        set_storage_options({})
        forget_listings()
        yield server


def spans_of(log: Sequence[LoggedRequest]) -> list[tuple[str, int, int]]:
    """Return (key, first byte, byte after the last) of every request for a range."""
    spans = []
    for entry in log:
        if entry.span:
            first, _, last = entry.span.removeprefix("bytes=").partition("-")
            spans.append((entry.key, int(first), int(last) + 1))
    return spans
