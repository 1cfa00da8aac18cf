"""Look up the checksums that a store states about its objects."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from functools import partial

from core.errors import SourceChangedError, StorageError
from core.files.multipart.s3_client import s3_client
from core.files.object_client import limiter_of
from core.files.object_listing import N_REQUESTS
from core.files.remote_store import RemoteStore
from core.files.requests.daemon_threads import DaemonThreads
from core.files.requests.repeat import with_retries
from core.files.requests.waiting import call_interruptibly, map_in
from core.files.stated.checksum import StatedChecksum, StatedChecksums
from core.files.stated.s3 import ask_s3, list_algorithms
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
        client = call_interruptibly(lambda: s3_client(store.root, n_connections=N_REQUESTS))
        is_filtered = needed is not None and len(names) > _N_ASKED
        algorithms = (
            with_retries(
                limiter_of(store.root),
                lambda: list_algorithms(client, store.root),
                is_counted=False,
            )
            if is_filtered
            else {}
        )
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
            path, n_bytes, e_tag = store.path(name), store.disk_bytes(name), store.e_tag(name)
            # boto3 repeats and counts requests itself.
            return with_retries(
                limiter_of(path),
                lambda: ask(path, n_bytes=n_bytes, e_tag=e_tag),
                is_counted=path.scheme not in ("s3", "s3a"),
            )
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
    threads = DaemonThreads(N_REQUESTS, "ckpt-sums")
    answers = [first, *map_in(threads, ask_about, names[1:])]
    threads.shutdown()
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
