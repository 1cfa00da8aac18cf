"""Reject URLs where a local path is expected: only checkpoints may be URLs.

Used as a path, a URL is a relative one: writing to ``s3:/bucket/out`` would fill a local directory
called ``s3:``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote

from core.errors import UsageError
from core.files.remote_path import is_known_scheme, is_remote, location_of

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)
"""A scheme has at least two characters, unlike ``C:/``; ``pathlib`` reduces ``//`` to ``/``."""
_REMOTE = re.compile(r"[\w.-]+@[\w.-]+:")
"""The syntax of scp and rsync: user@host:path."""
_HUB_URL = re.compile(r"(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)")
_AZURE = "copy it with azcopy copy --recursive, and pass the local path"
_COPYING = {
    "s3": "copy it with aws s3 sync, and pass the local path",
    "gs": "copy it with gcloud storage rsync --recursive, and pass the local path",
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "wasb": _AZURE,
    "wasbs": _AZURE,
    "hdfs": "copy it with hdfs dfs -get or hdfs dfs -put, and pass the local path",
}
_COPYING |= {"gcs": _COPYING["gs"], "s3a": _COPYING["s3"], "s3n": _COPYING["s3"]}


def find_location(path: str | os.PathLike[str]) -> Path:
    """Return where a checkpoint is: the URL of an object store or web server, or a local path.

    Raises:
        UsageError: the path is on another host, or the URL of something else.
    """
    location = location_of(path)
    if not is_remote(location):
        refuse_url(location)
    return location


def refuse_url(path: str | os.PathLike[str]) -> None:
    """Raise if a path is a URL or is on another host (``user@host:path``).

    URLs are also recognised after ``pathlib`` has reduced their ``//`` to ``/``.

    Raises:
        UsageError: the path is not local; the hint describes how to get a local copy.
    """
    text = str(path)
    match = _URL.fullmatch(text)
    if match is None:
        # An existing file may have such a name.
        if _REMOTE.match(text) and not os.path.lexists(text):
            raise UsageError(
                f"{text} is a path on another host; only local paths can be read and written",
                hint="copy it with scp -r or rsync -a, and pass the local path",
            )
        return
    scheme, location = match[1].lower(), match[2]
    if scheme == "file":
        from shlex import quote  # every command imports this module

        plain = unquote("/" + location.removeprefix("localhost/"))
        raise UsageError(
            f"file:///{location} is a URL, not a path", hint=f"pass the plain path: {quote(plain)}"
        )
    readable = "s3://, gs://, az:// and https://"
    if is_known_scheme(scheme):
        message = (
            "is a URL, but a local path is needed here; only checkpoints can be read "
            f"from {readable}"
        )
    else:
        message = f"is a URL that ckpt cannot read; it reads checkpoints from {readable}"
    raise UsageError(f"{match[1]}://{location} {message}", hint=_copy_hint(scheme, location))


def is_hub_page(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is the address of a model's page on the Hugging Face Hub."""
    match = _URL.fullmatch(str(path))
    return match is not None and "/resolve/" not in match[2] and bool(_HUB_URL.match(match[2]))


def hub_download(model_id: str) -> str:
    """Return the command that copies a model from the Hugging Face Hub into a local directory."""
    return f"hf download {model_id} --local-dir {model_id.rpartition('/')[2]}"


def _copy_hint(scheme: str, location: str) -> str:
    """Return a hint how to get a local copy of a URL."""
    hub_page = _HUB_URL.match(location) if scheme in ("http", "https") else None
    if hub_page is not None:
        return f"download the model, and pass the local path: {hub_download(hub_page[1])}"
    if scheme in ("http", "https"):
        return "download it with curl -LO or wget, and pass the local path"
    if scheme == "hf" and location.count("/") >= 1:
        model_id = "/".join(location.split("/")[:2])
        return f"download the model, and pass the local path: {hub_download(model_id)}"
    return _COPYING.get(
        scheme, "copy it to or from a local disk, or mount it, and pass the local path"
    )
