"""Look up the checksums that a store states about its objects."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from core.errors import SourceChangedError, StorageError
from core.files.object_listing import N_REQUESTS
from core.files.remote_store import RemoteStore
from core.files.stated.checksum import StatedChecksum, StatedChecksums
from core.files.stated.s3 import ask_s3, s3_client
from core.files.stated.signed import ask_by_signed_url


def look_up_checksums(store: RemoteStore, names: Iterable[str]) -> StatedChecksums:
    """Ask a store for the checksums of objects, several at a time, without reading any.

    Not being told is no error: ``StatedChecksums.failure`` has the reason.

    Args:
        names: names of existing objects.

    Raises:
        SourceChangedError: an object is no longer the one that was listed.
    """
    names = list(names)
    scheme = store.root.scheme
    if scheme in ("http", "https") or not names:
        return StatedChecksums()
    ask: Callable[..., tuple[StatedChecksum, ...]] = ask_by_signed_url
    if scheme in ("s3", "s3a"):
        if importlib.util.find_spec("boto3") is None:
            return StatedChecksums(failure="boto3 is not installed: pip install boto3")
        try:
            ask = partial(ask_s3, s3_client(store.root))
        except Exception as err:  # of many modules of boto3: settings, profiles, endpoints
            return StatedChecksums(failure=_reason(err))

    def ask_about(name: str) -> tuple[StatedChecksum, ...] | str:
        try:
            return ask(store.path(name), n_bytes=store.disk_bytes(name), e_tag=store.e_tag(name))
        except SourceChangedError:
            raise
        except Exception as err:
            if not _is_of_client(err):
                raise
            return _reason(err)

    # A store that does not tell of the first object is not asked about the others.
    first = ask_about(names[0])
    if isinstance(first, str):
        return StatedChecksums(failure=first)
    with ThreadPoolExecutor(N_REQUESTS, "ckpt-sums") as threads:
        answers = [first, *threads.map(ask_about, names[1:])]
    failures = [answer for answer in answers if isinstance(answer, str)]
    return StatedChecksums(
        {
            name: answer
            for name, answer in zip(names, answers, strict=True)
            if answer and not isinstance(answer, str)
        },
        failures[0] if failures else None,
    )


def _is_of_client(err: Exception) -> bool:
    """Return whether an error is one of the store's client: boto3, obstore or the system."""
    return isinstance(err, (StorageError, OSError)) or type(err).__module__.startswith(
        ("botocore.", "boto3.")
    )


def _reason(err: Exception) -> str:
    """Return the reason of an error in one line."""
    if isinstance(err, StorageError):
        return err.message
    status = getattr(err, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
    if status is not None:
        return (
            f"access denied ({status})" if status in (401, 403) else f"the store answered {status}"
        )
    return str(err).partition("\n")[0]
