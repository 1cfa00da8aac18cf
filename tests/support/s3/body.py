"""Read the body of a request: of a known length, chunked, and in AWS's own chunks with trailers."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from typing import Any

BUFFER_BYTES = 1 << 20


class UnchunkedBody(io.RawIOBase):
    """The content of a body with ``Transfer-Encoding: chunked``."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream
        self._n_left = 0
        self._is_at_end = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._n_left == 0 and not self._is_at_end:
            self._n_left = int(_line(self._stream).partition(b";")[0], 16)
            if self._n_left == 0:
                self._is_at_end = True
                while _line(self._stream):
                    pass
        if self._is_at_end:
            return 0
        n_bytes = self._stream.readinto(memoryview(buffer)[: self._n_left])
        if not n_bytes:
            raise ConnectionError
        self._n_left -= n_bytes
        if self._n_left == 0:
            _line(self._stream)
        return n_bytes


class BoundedBody(io.RawIOBase):
    """The content of a body with ``Content-Length``."""

    def __init__(self, stream: io.BufferedReader, n_bytes: int) -> None:
        self._stream = stream
        self._n_left = n_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: self._n_left]
        n_bytes = self._stream.readinto(view) if len(view) else 0
        if not n_bytes and len(view):
            raise ConnectionError
        self._n_left -= n_bytes or 0
        return n_bytes or 0


def read_body(
    stream: io.BufferedReader,
    headers: Mapping[str, str],
    sink: Callable[[memoryview], object],
    *,
    bytes_per_s: int = 0,
) -> tuple[int, dict[str, str]]:
    """Read a body to its end.

    Args:
        stream: the connection.
        headers: of the request, in lower case.
        sink: called with the content, piece by piece; each piece is valid during the call.
        bytes_per_s: rate at which it is read; 0 as fast as it comes.

    Returns:
        The number of bytes of the content, and the trailers.

    Raises:
        ConnectionError: the client went away before the end.
    """
    if "chunked" in headers.get("transfer-encoding", ""):
        raw: io.RawIOBase = UnchunkedBody(stream)
    else:
        raw = BoundedBody(stream, int(headers.get("content-length", 0)))
    buffer = memoryview(bytearray(min(BUFFER_BYTES, bytes_per_s // 10 or BUFFER_BYTES)))
    n_bytes = 0

    def copy(source: Any, n_left: int) -> None:
        nonlocal n_bytes
        while n_left and (n_read := source.readinto(buffer[: min(len(buffer), n_left)])):
            sink(buffer[:n_read])
            n_bytes, n_left = n_bytes + n_read, n_left - n_read
            if bytes_per_s:
                time.sleep(n_read / bytes_per_s)

    trailers: dict[str, str] = {}
    if "aws-chunked" not in headers.get("content-encoding", ""):
        copy(raw, 1 << 62)
        return n_bytes, trailers
    inner = io.BufferedReader(raw, 64 << 10)
    while n_chunk := int(_line(inner).partition(b";")[0], 16):
        copy(inner, n_chunk)
        _line(inner)
    while line := inner.readline().strip():
        name, _, value = line.decode().partition(":")
        trailers[name.lower()] = value.strip()
    inner.read()
    return n_bytes, trailers


def _line(stream: io.BufferedReader) -> bytes:
    """Return a line without its end."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError
    return line.strip()
