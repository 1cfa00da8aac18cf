"""Start the S3 server, and say what it does."""

from __future__ import annotations

import atexit
import json
import os
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.s3.rules import Rule
from tests.support.s3.server import CONTROL, LoggedRequest

ROOT = Path(__file__).resolve().parents[3]
ACCESS_KEY = "AKIA-that-no-message-may-contain"
SECRET = "a-secret-that-no-message-may-contain"
TOKEN = "a-token-that-no-message-may-contain"


class S3Server:
    """The server, while it runs.

    Args:
        data_dir: directory for its data; None for a temporary one.
        delay_s: seconds that it waits before each answer.
        bytes_per_s: what all connections together receive, and what they send; 0 for no limit.
        certificate: file with a certificate and its key, for TLS; None for plain HTTP.
        has_opaque_tags: its ETags are no MD5 sums, which costs less.
        min_part_bytes: smallest part of an upload, but the last.

    Attributes:
        url: its endpoint.
        port: its port on the loopback interface.
        pid: its process.
    """

    def __init__(
        self,
        *,
        data_dir: Path | None = None,
        delay_s: float = 0.0,
        bytes_per_s: float = 0.0,
        certificate: Path | None = None,
        has_opaque_tags: bool = False,
        min_part_bytes: int = 5 << 20,
    ) -> None:
        words = [sys.executable, "-m", "tests.support.s3.server", "--delay", str(delay_s)]
        words += ["--min-part", str(min_part_bytes), "--rate", str(bytes_per_s)]
        words += ["--data", str(data_dir)] if data_dir else []
        words += ["--certificate", str(certificate)] if certificate else []
        words += ["--opaque-tags"] if has_opaque_tags else []
        self._process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self.port = int(self._process.stdout.readline())
        self.url = f"{'https' if certificate else 'http'}://127.0.0.1:{self.port}"
        self._context = ssl._create_unverified_context() if certificate else None
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._context)
        )

    def set_rules(self, *rules: Rule) -> None:
        """Replace the rules for faults; requests are counted from now on."""
        self._control("rules", [asdict(rule) for rule in rules])

    def take_log(self) -> list[LoggedRequest]:
        """Return the requests since the last call, in the order in which they began."""
        entries = [LoggedRequest(**entry) for entry in self._control("log", None)]
        return sorted(entries, key=lambda entry: entry.begun)

    def n_hanging(self) -> int:
        """Return the number of requests that are without an answer by a rule."""
        return int(self._control("hanging", None))

    def mount(
        self, bucket: str, folder: Path, prefix: str = "", *, is_constant: bool = False
    ) -> None:
        """Make the files of a directory objects of a bucket; the server never changes them.

        Args:
            is_constant: nor does anybody else: mounted again, they are not looked at again.
        """
        self._control("mount", [bucket, prefix, str(folder), is_constant])

    def create_bucket(self, bucket: str) -> None:
        """Make an empty bucket."""
        request = urllib.request.Request(f"{self.url}/{bucket}", method="PUT")
        self._opener.open(request).close()

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Put an object."""
        request = urllib.request.Request(f"{self.url}/{bucket}/{key}", data, method="PUT")
        self._opener.open(request).close()

    def objects(self, bucket: str, prefix: str = "") -> dict[str, str]:
        """Return key → SHA-256 of the objects of a bucket, each of which is read."""
        digests: dict[str, str] = self._control("objects", [bucket, prefix])
        return digests

    def keys(self, bucket: str) -> list[str]:
        """Return the keys of a bucket, in order."""
        keys: list[str] = self._control("keys", bucket)
        return keys

    def uploads(self) -> list[tuple[str, str]]:
        """Return (bucket, key) of every unfinished multipart upload."""
        return [(bucket, key) for bucket, key in self._control("uploads", None)]

    def delete(self, bucket: str, prefix: str = "") -> None:
        """Delete the objects and unfinished uploads below a prefix."""
        self._control("delete", [bucket, prefix])

    def reset(self) -> bool:
        """Forget all buckets, rules and requests.

        Returns:
            Whether every request has an answer; one that never gets any would disturb others.
        """
        return bool(self._control("reset", None))

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Wait until all clients are gone, and what they asked for has been done.

        Returns:
            Whether this was so within the time.
        """
        return bool(self._control("settle", timeout_s))

    def environment(self) -> dict[str, str]:
        """Return the variables by which clients find the server."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_SESSION_TOKEN": TOKEN,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
        }

    def stop(self) -> None:
        """End the process, and delete its data."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def _control(self, command: str, argument: object) -> Any:
        data = json.dumps(argument).encode()
        request = urllib.request.Request(f"{self.url}{CONTROL}{command}", data)
        with self._opener.open(request) as answer:
            return json.load(answer)


@contextmanager
def started_server(**settings: Any) -> Iterator[S3Server]:
    """Start the server with the settings of ``S3Server``, and stop it in the end."""
    server = S3Server(**settings)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def shared_server() -> Iterator[S3Server]:
    """Lend the server with the usual settings of this process, empty."""
    server = _server_of(os.getpid())
    try:
        yield server
    finally:
        if not server.reset():
            _server_of.cache_clear()
            server.stop()


@cache
def _server_of(owner: int) -> S3Server:
    """Start the server of a process, which ends with it; a fork has one of its own."""
    server = S3Server()

    @atexit.register
    def stop() -> None:
        if os.getpid() == owner:
            server.stop()

    return server
