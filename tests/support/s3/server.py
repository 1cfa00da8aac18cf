"""An S3 server in a process of its own: fast, with a log of its requests, and faults by rule.

    python -m tests.support.s3.server [--data DIR] [--delay SECONDS] [--rate BYTES]
        [--opaque-tags] [--certificate FILE]

It prints its port, and serves the loopback interface until its standard input ends. Signatures are
not checked. Paths below ``/.control/`` are for whoever started it; see ``S3Server``.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import signal
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.support.s3.body import read_body
from tests.support.s3.link import Link
from tests.support.s3.objects import Objects, StoredObject
from tests.support.s3.operations import Operations, S3Answer, S3Request, error_answer
from tests.support.s3.rules import Rule, Rules

CONTROL = "/.control/"
_NO_EFFECT = ("error", "cut", "hang", "kill")
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class LoggedRequest:
    """A request that has been answered, or was not.

    Args:
        begun, ended: seconds of the monotonic clock.
        connection: number of the connection.
        operation: S3's name of what was asked for.
        key: bucket and key.
        span: header ``Range``, or "".
        n_received, n_sent: bytes of the bodies.
        status: of the answer; 0 if there was none.
        fault: name of the fault that hit it, or "".
    """

    begun: float
    ended: float
    connection: int
    method: str
    operation: str
    key: str
    query: str
    span: str
    n_received: int
    n_sent: int
    status: int
    fault: str


class Service:
    """What all connections share."""

    def __init__(self, objects: Objects, delay_s: float, bytes_per_s: float) -> None:
        self.objects = objects
        self.operations = Operations(objects)
        self.rules = Rules()
        self.delay_s = delay_s
        self.incoming, self.outgoing = Link(bytes_per_s), Link(bytes_per_s)
        self._log: list[LoggedRequest] = []
        self._changed = threading.Condition()
        self._n_active = 0
        self._n_connections = 0
        self._n_hanging = 0

    def count(self, *, active: int = 0, connections: int = 0, hanging: int = 0) -> None:
        """Change the number of requests that are being answered, of those among them that never
        will be, and of open connections.
        """
        with self._changed:
            self._n_active += active
            self._n_connections += connections
            self._n_hanging += hanging
            self._changed.notify_all()

    def log(self, entry: LoggedRequest) -> None:
        """Record a request that has ended."""
        with self._changed:
            self._log.append(entry)
        self.count(active=-1)

    def control(self, command: str, argument: Any) -> object:
        """Do what the one who started the server asks for."""
        if command in ("log", "keys", "objects", "uploads"):
            # What a client has an answer to is finished, but for what never ends.
            with self._changed:
                self._changed.wait_for(lambda: self._n_active == 0, timeout=5)
        match command:
            case "settle":
                with self._changed:
                    return self._changed.wait_for(lambda: self._n_connections == 1, argument)
            case "hanging":
                return self._n_hanging
            case "log":
                with self._changed:
                    log, self._log = self._log, []
                return [asdict(entry) for entry in log]
            case "rules":
                self.rules.replace([Rule(**rule) for rule in argument])
            case "mount":
                bucket, prefix, folder, is_constant = argument
                self.objects.mount(bucket, prefix, Path(folder), is_constant=is_constant)
            case "reset":
                self.rules.replace([])
                self.objects.clear()
                with self._changed:
                    self._log = []
                    return self._changed.wait_for(lambda: self._n_active == 0, timeout=1)
            case "delete":
                self.objects.delete_below(*argument)
            case "keys":
                with self.objects.lock:
                    return sorted(self.objects.buckets.get(argument, {}))
            case "objects":
                bucket, prefix = argument
                with self.objects.lock:
                    entries = dict(self.objects.buckets.get(bucket, {}))
                return {
                    key: _digest(entry)
                    for key, entry in sorted(entries.items())
                    if key.startswith(prefix)
                }
            case "uploads":
                with self.objects.lock:
                    uploads = self.objects.uploads.values()
                    return [[upload.bucket, upload.key] for upload in uploads]
            case _:
                raise ValueError(command)
        return None


def _digest(entry: StoredObject) -> str:
    digest = hashlib.sha256()
    for blob in entry.blobs:
        for data in blob.reader():
            digest.update(data)
    return digest.hexdigest()


class ClientConnection:
    """A connection of a client, in a thread of its own."""

    def __init__(self, connection: socket.socket, service: Service, number: int) -> None:
        self._connection = connection
        self._service = service
        self._number = number
        self._file = connection.makefile("rb", buffering=64 << 10)
        self._is_open = True
        self._status = 0

    def serve(self) -> None:
        """Answer requests until the client or a fault ends the connection."""
        self._service.count(connections=1)
        try:
            while self._is_open and (line := self._file.readline()):
                method, target, _ = line.decode("latin-1").split(" ")
                headers = {}
                while (line := self._file.readline()) not in (b"\r\n", b""):
                    name, _, value = line.decode("latin-1").partition(":")
                    headers[name.lower()] = value.strip()
                if target.startswith(CONTROL):
                    self._control(target, headers)
                else:
                    self._respond(method, target, headers)
        except (OSError, ValueError):
            return  # the client is gone, or does not speak HTTP
        finally:
            self._service.count(connections=-1)
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._file.close()
            self._connection.close()

    def _control(self, target: str, headers: dict[str, str]) -> None:
        body = io.BytesIO()
        read_body(self._file, headers, body.write)
        argument = json.loads(body.getvalue() or "null")
        result = self._service.control(target.removeprefix(CONTROL), argument)
        self._send(S3Answer(body=json.dumps(result).encode()))

    def _respond(self, method: str, target: str, headers: dict[str, str]) -> None:
        begun = time.monotonic()
        url = urlsplit(target)
        bucket, _, key = unquote(url.path).removeprefix("/").partition("/")
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        request = S3Request(method, bucket, key, query, headers)
        rule = self._service.rules.find(request.operation, key, url.query)
        fault = rule.fault if rule else ""
        n_received = n_sent = 0
        self._status = 0
        self._service.count(active=1)
        try:
            if rule is not None and fault in _NO_EFFECT and fault != "error":
                self._do_nothing(rule)
                return
            if fault == "whole":
                headers.pop("range", None)
            rate = rule.bytes_per_s if rule and fault == "slow" else 0
            n_received, answer = self._perform(request, rule, bytes_per_s=rate)
            if self._service.delay_s:
                time.sleep(self._service.delay_s)
            if rule is not None and fault in ("lost", "kill after"):
                self._do_nothing(rule)
            else:
                n_sent = self._send(answer, fault, is_head=method == "HEAD", bytes_per_s=rate)
        finally:
            self._service.log(
                LoggedRequest(
                    begun,
                    time.monotonic(),
                    self._number,
                    method,
                    request.operation,
                    f"{bucket}/{key}" if key else bucket,
                    url.query,
                    headers.get("range", ""),
                    n_received,
                    n_sent,
                    self._status,
                    fault,
                )
            )

    def _perform(
        self, request: S3Request, rule: Rule | None, *, bytes_per_s: int
    ) -> tuple[int, S3Answer]:
        """Receive the body of a request, and do what it asks for."""
        if request.headers.get("expect", "").lower() == "100-continue":
            self._connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        writer = self._service.operations.new_writer(request)

        def receive(data: memoryview) -> None:
            writer.write(data)
            self._service.incoming.carry(len(data))

        try:
            n_received, trailers = read_body(
                self._file, request.headers, receive, bytes_per_s=bytes_per_s
            )
            if rule is not None and rule.fault == "error":
                answer = error_answer(rule.status, rule.code)
                answer.headers |= rule.headers
                return n_received, answer
            return n_received, self._service.operations.finish(request, writer, trailers)
        finally:
            writer.close()

    def _do_nothing(self, rule: Rule) -> None:
        """Leave a request without an answer."""
        self._is_open = False
        if rule.fault.startswith("kill"):
            with suppress(ProcessLookupError):
                os.kill(rule.pid, signal.SIGKILL)
        elif rule.fault == "hang":
            # Until the client loses patience.
            self._service.count(hanging=1)
            with suppress(OSError):
                while self._file.read(1 << 16):
                    pass
            self._service.count(hanging=-1)

    def _send(
        self,
        answer: S3Answer,
        fault: str = "",
        *,
        is_head: bool = False,
        bytes_per_s: int = 0,
    ) -> int:
        """Send an answer, with the faults that concern it; return the bytes of its body."""
        size = answer.stop - answer.start if answer.content else len(answer.body)
        if fault == "length":
            size //= 2
        lines = [f"HTTP/1.1 {answer.status} {'OK' if answer.status < 300 else 'Error'}"]
        if answer.status not in (204, 304):
            lines.append(f"Content-Length: {size}")
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        is_bare = is_head or size == 0 or answer.status in (204, 304)
        if fault == "truncate":
            self._is_open = False
            if is_bare:
                self._connection.sendall(head[: len("HTTP/1.1")])
                return 0
            size //= 2
        self._status = answer.status
        if is_bare:
            self._connection.sendall(head)
            return 0
        if answer.content is None:
            body = answer.body[:size]
            if fault == "flip":
                body = _flipped(body, size // 2)
            self._connection.sendall(head + body)
            return size
        self._connection.sendall(head)
        flip_at = size // 2 if fault == "flip" else None
        self._send_content(
            answer.content, answer.start, size, flip_at=flip_at, bytes_per_s=bytes_per_s
        )
        return size

    def _send_content(
        self,
        content: StoredObject,
        start: int,
        n_bytes: int,
        *,
        flip_at: int | None,
        bytes_per_s: int,
    ) -> None:
        """Send bytes of an object: by the kernel, unless they are encrypted or disturbed."""
        is_direct = flip_at is None and not bytes_per_s
        is_direct = is_direct and not isinstance(self._connection, ssl.SSLSocket)
        n_sent = 0
        for path, first, stop in _pieces(content, start, start + n_bytes):
            with path.open("rb", buffering=0) as file:
                while first < stop:
                    if is_direct:
                        n_most = min(_PIECE_BYTES, stop - first)
                        n_now = os.sendfile(self._connection.fileno(), file.fileno(), first, n_most)
                    else:
                        file.seek(first)
                        n_most = min(bytes_per_s // 10 or _PIECE_BYTES, _PIECE_BYTES)
                        data = file.read(min(n_most, stop - first))
                        n_now = len(data)
                        if flip_at is not None and 0 <= flip_at - n_sent < n_now:
                            data = _flipped(data, flip_at - n_sent)
                        self._connection.sendall(data)
                        time.sleep(n_now / bytes_per_s if bytes_per_s else 0)
                    self._service.outgoing.carry(n_now)
                    if n_now == 0:
                        raise ConnectionError  # the file of a mounted directory was cut
                    first, n_sent = first + n_now, n_sent + n_now


def _pieces(content: StoredObject, start: int, stop: int) -> Iterator[tuple[Path, int, int]]:
    """Yield (file, first byte, byte after the last) of bytes [start, stop) of an object."""
    position = 0
    for blob in content.blobs:
        first, end = max(start, position), min(stop, position + blob.size)
        if first < end:
            yield blob.path, first - position, end - position
        position += blob.size


def _flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def serve(service: Service, listener: socket.socket, certificate: Path | None) -> None:
    """Accept connections until the process is ended."""
    wrap: Callable[[socket.socket], socket.socket] = lambda connection: connection
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        wrap = lambda connection: context.wrap_socket(connection, server_side=True)

    def work(connection: socket.socket, number: int) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wrapped = wrap(connection)
        except OSError:  # the client does not trust the certificate
            connection.close()
            return
        ClientConnection(wrapped, service, number).serve()

    number = 0
    while True:
        connection, _ = listener.accept()
        number += 1
        threading.Thread(target=work, args=(connection, number), daemon=True).start()


def main() -> None:
    """Serve until the standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="directory for data; else a temporary one")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each answer [0]")
    parser.add_argument(
        "--rate", type=float, default=0.0, help="bytes per second in each direction [no limit]"
    )
    parser.add_argument("--opaque-tags", action="store_true", help="ETags are no MD5 sums")
    parser.add_argument("--min-part", type=int, default=5 << 20, help="smallest part in bytes")
    parser.add_argument("--certificate", type=Path, help="file of a certificate and its key")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.data, prefix="s3-") as folder:
        objects = Objects(
            Path(folder),
            are_tags_opaque=options.opaque_tags,
            min_part_bytes=options.min_part,
        )
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        service = Service(objects, options.delay, options.rate)
        threading.Thread(
            target=serve, args=(service, listener, options.certificate), daemon=True
        ).start()
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        # Ends when the process that started the server ends, whatever way it does.
        while sys.stdin.buffer.read(1 << 16):
            pass


if __name__ == "__main__":
    main()
