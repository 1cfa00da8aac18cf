"""Emulators of Google's and Azure's stores, on the loopback interface, where they are installed.

``azurite-blob`` is Microsoft's (``npm install azurite``), ``fake-gcs-server`` is fsouza's. They are
found on PATH, or by the variables ``CKPT_AZURITE`` and ``CKPT_FAKE_GCS``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import pytest

from core.files.object_client import put_object, set_storage_options
from core.files.object_listing import forget_listings
from core.files.remote_path import RemotePath, location_of

_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's account and key, which are the same everywhere."""
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")


class Upload(Protocol):
    """Writes an object into the container of an emulator."""

    def __call__(self, key: str, data: bytes) -> None: ...


@contextmanager
def azurite(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Upload]:
    """Start Azurite with a container ``runs``, and point the environment at it."""
    program = _find("azurite-blob", "CKPT_AZURITE")
    port = _free_port()
    # Azurite knows the versions of the API up to its own release.
    words = [program, "--blobPort", str(port), "--silent", "--skipApiVersionCheck"]
    words += ["--inMemoryPersistence", "--disableTelemetry"]
    with _started(words, port, folder):
        endpoint = f"http://127.0.0.1:{port}/{_ACCOUNT}"
        _point_at(
            monkeypatch,
            AZURE_STORAGE_ACCOUNT_NAME=_ACCOUNT,
            AZURE_STORAGE_ACCOUNT_KEY=_KEY,
            AZURE_STORAGE_ENDPOINT=endpoint,
        )
        _create_container(f"{endpoint}/runs")

        def upload(key: str, data: bytes) -> None:
            path = location_of(f"az://runs/{key}")
            assert isinstance(path, RemotePath)
            put_object(path, data, replace=True)

        yield upload


def _create_container(url: str) -> None:
    """Create a container by a request that is signed with the account's key."""
    date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    version = "2021-08-06"
    resource = f"/{_ACCOUNT}/{_ACCOUNT}/{url.rpartition('/')[2]}\nrestype:container"
    signed = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n{resource}"
    digest = hmac.new(base64.b64decode(_KEY), signed.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}",
        "Content-Length": "0",
    }
    request = urllib.request.Request(f"{url}?restype=container", method="PUT", headers=headers)
    urllib.request.urlopen(request, timeout=60).close()


@contextmanager
def fake_gcs(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Upload]:
    """Start fake-gcs-server with a bucket ``runs``, and point the environment at it."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    program = _find("fake-gcs-server", "CKPT_FAKE_GCS")
    port = _free_port()
    address = f"127.0.0.1:{port}"
    words = [program, "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1"]
    words += ["-port", str(port), "-public-host", address, "-log-level", "error"]
    with _started(words, port, folder):
        # A service account with a key of its own signs tokens and URLs without asking anybody.
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        account = {
            "type": "service_account",
            "gcs_base_url": f"http://{address}",
            "client_email": "tests@example.iam.gserviceaccount.com",
            "private_key_id": "1",
            "private_key": key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ).decode(),
        }
        path = folder / "account.json"
        path.write_text(json.dumps(account))
        _point_at(monkeypatch, GOOGLE_SERVICE_ACCOUNT=str(path))

        def post(url: str, data: bytes, content_type: str) -> None:
            request = urllib.request.Request(
                f"http://{address}/{url}", data, {"Content-Type": content_type}
            )
            urllib.request.urlopen(request, timeout=60).close()

        def upload(key: str, data: bytes) -> None:
            # The server has only the JSON API for writing; the client writes by the XML API.
            url = f"upload/storage/v1/b/runs/o?uploadType=media&name={quote(key, safe='')}"
            post(url, data, "application/octet-stream")

        post("storage/v1/b?project=tests", b'{"name": "runs"}', "application/json")
        yield upload


def _find(program: str, variable: str) -> str:
    """Return the path of a program; skip the test if it is not installed."""
    path = os.environ.get(variable) or shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not on PATH; {variable} may name it")
    return path


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def _started(words: list[str], port: int, folder: Path) -> Iterator[None]:
    """Run a server in a directory; the block begins when its port answers."""
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(words, cwd=folder, stdout=nothing, stderr=nothing)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"{words[0]} does not start")
                time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


def _point_at(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Set the environment of the store, without proxies."""
    for name in _PROXIES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    set_storage_options({})
    forget_listings()
