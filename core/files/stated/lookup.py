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
from core.files.stated.s3 import ask_s3, list_algorithms, s3_client
from core.files.stated.signed import ask_by_signed_url

_N_ASKED = 2 * N_REQUESTS
"""Up to this number of objects, S3 is not asked first which of them have the needed checksum."""


def look_up_checksums(
    store: RemoteStore, names: Iterable[str], *, needed: str | None = None
) -> StatedChecksums:
    """Ask a store for the checksums of objects, several at a time, without reading any.

    Not being told is no error: ``StatedChecksums.failure`` has the reason.

    Args:
        names: names of existing objects.
        needed: the algorithm that is of use; others may be returned without their checksums.

    Raises:
        SourceChangedError: an object is no longer the one that was listed.
    """
    names = list(names)
    scheme = store.root.scheme
    if scheme in ("http", "https") or not names:
        return StatedChecksums()
    if scheme not in ("s3", "s3a"):
        return _ask_about_all(store, names, ask_by_signed_url)
    if importlib.util.find_spec("boto3") is None:
        return StatedChecksums(failure="boto3 is not installed: pip install boto3")
    try:
        client = s3_client(store.root)
        is_filtered = needed is not None and len(names) > _N_ASKED
        algorithms = list_algorithms(client, store.root) if is_filtered else {}
    except Exception as err:  # of many modules of boto3: settings, profiles, endpoints
        return StatedChecksums(failure=_reason(err))
    # A listing takes one request for 1,000 objects.
    useless = {
        name: tuple(StatedChecksum(algorithm, ()) for algorithm in algorithms.get(name, ()))
        for name in names
        if algorithms and needed not in algorithms.get(name, ())
    }
    answer = _ask_about_all(
        store, [name for name in names if name not in useless], partial(ask_s3, client)
    )
    unneeded = {name: checksums for name, checksums in useless.items() if checksums}
    return StatedChecksums({**unneeded, **answer.by_name}, answer.failure)


def _ask_about_all(
    store: RemoteStore, names: list[str], ask: Callable[..., tuple[StatedChecksum, ...]]
) -> StatedChecksums:
    """Ask a store about objects, one request for each.

    Raises:
        SourceChangedError: an object is no longer the one that was listed.
    """
    if not names:
        return StatedChecksums()

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
