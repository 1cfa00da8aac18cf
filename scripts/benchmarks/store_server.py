"""An S3 server of a directory, in a process of its own, that logs every request with its times.

    python -m scripts.benchmarks.store_server DIR [--delay SECONDS]

Buckets are the directories in DIR. It prints its port, knows listings, ranges, single and multipart
puts, checks no signature, and is fast: files are sent by the kernel. ``GET /__log`` returns and
empties the log: first and last moment, kind, key, bytes of the request's and of the answer's body.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import threading
import time
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_PAGE = 1000
_BUFFER_BYTES = 1 << 20


class Connection:
    """One connection of a client, in a thread of its own."""

    def __init__(self, connection: socket.socket, server: Server) -> None:
        self._connection = connection
        self._server = server
        self._file = connection.makefile("rb", buffering=64 << 10)

    def serve(self) -> None:
        """Answer requests until the client goes away."""
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while line := self._file.readline():
                method, target, _ = line.decode().split(" ")
                headers = {}
                while (line := self._file.readline()) not in (b"\r\n", b""):
                    name, _, value = line.decode().partition(":")
                    headers[name.lower()] = value.strip()
                self._respond(method, target, headers)
        except OSError:
            pass
        finally:
            self._connection.close()

    def _respond(self, method: str, target: str, headers: dict[str, str]) -> None:
        begun = time.monotonic()
        url = urlsplit(target)
        key, query = unquote(url.path).strip("/"), parse_qs(url.query, keep_blank_values=True)
        if key == "__log":
            self._answer(200, json.dumps(self._server.take_log()).encode())
            return
        time.sleep(self._server.delay_s)
        n_received = n_sent = 0
        kind = method
        if method == "GET" and "/" not in key:
            kind, bucket = "LIST", key
            n_sent = self._answer(200, self._server.listing(bucket, query), "application/xml")
        elif method in ("GET", "HEAD"):
            n_sent = self._send_object(method, key, headers)
        elif method == "PUT":
            n_received = self._receive(key, query, headers)
        elif method == "POST":
            kind, n_received = self._post(key, query, headers)
        else:
            self._server.path(key).unlink(missing_ok=True)
            self._answer(204)
        self._server.log(begun, time.monotonic(), kind, key, n_received, n_sent)

    def _answer(self, status: int, body: bytes = b"", kind: str = "text/plain", **more: str) -> int:
        lines = [
            f"HTTP/1.1 {status} x",
            f"Content-Length: {len(body)}",
            f"Content-Type: {kind}",
            *(f"{name.replace('_', '-')}: {value}" for name, value in more.items()),
        ]
        self._connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        return len(body)

    def _send_object(self, method: str, key: str, headers: dict[str, str]) -> int:
        path = self._server.path(key)
        if not path.is_file():
            body = b"" if method == "HEAD" else b"<Error><Code>NoSuchKey</Code></Error>"
            return self._answer(404, body)
        status = path.stat()
        if headers.get("if-match", e_tag(status)) != e_tag(status):
            return self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        first, stop, code, extra = 0, status.st_size, "200 OK", ""
        if "range" in headers:
            start, _, last = headers["range"].removeprefix("bytes=").partition("-")
            first = int(start) if start else stop - int(last)
            stop = min(stop, int(last) + 1) if start and last else stop
            code = "206 Partial Content"
            extra = f"Content-Range: bytes {first}-{stop - 1}/{status.st_size}\r\n"
        modified = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(status.st_mtime))
        self._connection.sendall(
            f"HTTP/1.1 {code}\r\nContent-Length: {stop - first}\r\nETag: {e_tag(status)}\r\n"
            f"Last-Modified: {modified}\r\n{extra}\r\n".encode()
        )
        if method == "HEAD":
            return 0
        with path.open("rb") as file:
            position = first
            while position < stop:
                fd = self._connection.fileno()
                position += os.sendfile(fd, file.fileno(), position, stop - position)
        return stop - first

    def _receive(self, key: str, query: dict[str, list[str]], headers: dict[str, str]) -> int:
        n_bytes = int(headers.get("content-length", 0))
        if headers.get("expect") == "100-continue":
            self._connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        path = self._server.path(key)
        if "partNumber" in query:
            name = f"{query['uploadId'][0]}.{int(query['partNumber'][0]):05d}"
            path = self._server.root / ".parts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            n_left = n_bytes
            while n_left:
                data = self._file.read(min(_BUFFER_BYTES, n_left))
                if not data:
                    raise ConnectionError
                file.write(data)
                n_left -= len(data)
        self._answer(200, ETag=e_tag(path.stat()))
        return n_bytes

    def _post(
        self, key: str, query: dict[str, list[str]], headers: dict[str, str]
    ) -> tuple[str, int]:
        """Begin or complete a multipart upload."""
        body = self._file.read(int(headers.get("content-length", 0)))
        if "uploads" in query:
            upload = self._server.new_upload()
            xml = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId>"
            self._answer(200, f"{xml}</InitiateMultipartUploadResult>".encode(), "application/xml")
            return "BEGIN", len(body)
        parts = sorted((self._server.root / ".parts").glob(f"{query['uploadId'][0]}.*"))
        path = self._server.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # The first part becomes the object; the others are appended by the kernel.
        parts[0].rename(path)
        with path.open("r+b") as file:
            position = file.seek(0, os.SEEK_END)
            for part in parts[1:]:
                with part.open("rb") as source:
                    n_left = part.stat().st_size
                    while n_left:
                        n = os.copy_file_range(
                            source.fileno(), file.fileno(), n_left, None, position
                        )
                        position, n_left = position + n, n_left - n
                part.unlink()
        xml = f"<CompleteMultipartUploadResult><ETag>{escape(e_tag(path.stat()))}</ETag>"
        self._answer(200, f"{xml}</CompleteMultipartUploadResult>".encode(), "application/xml")
        return "COMPLETE", len(body)


class Server:
    """What the connections share.

    Args:
        root: directory of the buckets.
        delay_s: seconds to wait before each answer.
    """

    def __init__(self, root: Path, delay_s: float) -> None:
        self.root = root
        self.delay_s = delay_s
        self._log: list[tuple[float, float, str, str, int, int]] = []
        self._n_uploads = 0
        self._lock = threading.Lock()

    def path(self, key: str) -> Path:
        """Return the file of an object."""
        return self.root / key

    def new_upload(self) -> str:
        """Return the id of a new multipart upload."""
        with self._lock:
            self._n_uploads += 1
            return f"upload{self._n_uploads}"

    def log(self, *entry: object) -> None:
        """Record a request."""
        with self._lock:
            self._log.append(entry)  # type: ignore[arg-type]

    def take_log(self) -> list[tuple[float, float, str, str, int, int]]:
        """Return and empty the log."""
        with self._lock:
            log, self._log = self._log, []
            return log

    def listing(self, bucket: str, query: dict[str, list[str]]) -> bytes:
        """Return a page of ListObjectsV2."""
        prefix, delimiter, token = (
            query.get(name, [""])[0] for name in ("prefix", "delimiter", "continuation-token")
        )
        token = token or query.get("start-after", [""])[0]
        base = self.root / bucket
        names: dict[str, os.stat_result | None] = {}
        for path in (base / prefix).parent.rglob("*") if prefix else base.rglob("*"):
            key = path.relative_to(base).as_posix()
            if key.startswith(prefix) and path.is_file():
                rest = key[len(prefix) :]
                if delimiter and delimiter in rest:
                    names[prefix + rest.partition(delimiter)[0] + delimiter] = None
                else:
                    names[key] = path.stat()
        wanted = sorted(name for name in names if name > token)
        page = wanted[:_PAGE]
        parts = [f"<IsTruncated>{str(len(wanted) > _PAGE).lower()}</IsTruncated>"]
        if len(wanted) > _PAGE:
            parts.append(f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>")
        for name in page:
            status = names[name]
            if status is None:
                parts.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
                continue
            modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
            parts.append(
                f"<Contents><Key>{escape(name)}</Key><LastModified>{modified}</LastModified>"
                f"<ETag>{escape(e_tag(status))}</ETag><Size>{status.st_size}</Size></Contents>"
            )
        return f"<ListBucketResult>{''.join(parts)}</ListBucketResult>".encode()


def e_tag(status: os.stat_result) -> str:
    """Return the ETag of a file."""
    return f'"{status.st_mtime_ns:x}-{status.st_size:x}"'


def main() -> None:
    """Serve a directory until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("root", type=Path)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each answer [0]")
    options = parser.parse_args()
    server = Server(options.root, options.delay)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listener.getsockname()[1], flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=Connection(connection, server).serve, daemon=True).start()


if __name__ == "__main__":
    main()
