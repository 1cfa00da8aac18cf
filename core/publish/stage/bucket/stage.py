"""Write a destination in an object store so that it appears complete or not at all.

A bucket has neither directories nor a rename, so nothing is staged in it. Every object is an
unfinished upload of the store, which nobody sees, until all of its parts have been sent::

    bucket/.out.ckpt-stage/lock                while a run works, so that no other one does
    bucket/.out.ckpt-stage/publication.json    while the objects become visible
    bucket/out/…                               unfinished uploads, then objects

``BucketStage.commit`` writes the record, then finishes the uploads: data first, then metadata, the
manifest and the tracker file last. With ``force`` the old objects are deleted right before, when
all parts of the new ones are in the store. If the run ends in any other way its uploads are
aborted, except after a failure with ``resume``: then the next run of the same command does not send
again what is there. A run that is killed while it publishes is finished by the next one from the
record, and so is one that a signal ends before the store has said whether an object is visible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from core.errors import AccessDeniedError, CheckpointingException, UnansweredError, UsageError
from core.files.multipart.client import can_continue_uploads, upload_client
from core.files.multipart.ordered import N_IN_FLIGHT
from core.files.multipart.stream import part_bytes_of
from core.files.object_client import put_object
from core.files.object_listing import N_REQUESTS, delete_objects, forget_listings
from core.files.remote_path import RemotePath
from core.files.remote_store import list_objects
from core.files.requests.ending import is_ending
from core.files.store import override
from core.files.store_kinds import WRITABLE_STORES, store_kind
from core.opening.locate import TRACKER
from core.progress import OnProgress, Phase, begin_phase
from core.publish.manifest.of_copy import manifest_name
from core.publish.stage.bucket.destination_lock import DestinationLock, is_of_lock
from core.publish.stage.bucket.literals import EarlyLiterals
from core.publish.stage.bucket.parts import PartStore
from core.publish.stage.bucket.publication import PublicationRecord
from core.publish.stage.bucket.shared import SharedUploads, check_shareable, join_shares
from core.publish.stage.bucket.spool import SpooledFile
from core.publish.stage.folder_lock import stage_dir_of
from core.publish.stage.protocol import (
    DestinationStage,
    OutputDestination,
    ShareResult,
    StageRequest,
)
from core.publish.stage.stale import finish_despite_interrupts
from core.values import dataclass, n_text

if TYPE_CHECKING:
    from core.engine.catalog.file_image import FileImage
    from core.engine.plan.positions import Places
    from core.files.multipart.protocol import ObjectUpload
    from core.files.store import WriteStore

_MAX_THREADS = 8
"""Largest number of parts in flight, unless memory allows only fewer."""
_MEMORY_SHARE = 8
"""The parts in flight may take this fraction of the memory limit."""
_RUN_AGAIN = "run the same command again to finish the publication"
_CLIENT_BYTES = 40 << 20
"""Memory of the clients, measured: RSS of a conversion to S3, less parts and a local one's RSS."""


@dataclass(frozen=True, slots=True)
class StoreDestination(OutputDestination):
    """A prefix or an object of an object store.

    Args:
        dst: its URL.
    """

    dst: RemotePath
    is_on_disk = False

    @override
    def check_writable(self, *, needs_links: bool) -> None:
        dst = self.dst
        if not store_kind(dst.scheme).is_writable:
            raise UsageError(
                "ckpt cannot write to a web server",
                file=f"{dst.scheme}://{dst.bucket}",  # its path may end with a signature
                hint=f"write to a local directory, or to {WRITABLE_STORES}",
            )
        if not dst.key:
            raise UsageError(
                "the destination is an entire bucket",
                file=str(dst),
                hint=f"specify a prefix: {dst}/NAME",
            )
        if needs_links:
            raise UsageError(
                "--metadata-only makes hard links, which object stores do not support",
                file=str(dst),
                hint="omit --metadata-only, or write to the source's file system",
            )

    @override
    def check_may_replace(self, *, is_file: bool, keep: Sequence[Path]) -> None:
        for path in keep:
            if path.is_relative_to(self.dst) or self.dst.is_relative_to(path):
                raise UsageError(
                    f"replacing the destination would remove {path}", file=str(self.dst)
                )

    @override
    def estimate_sending(self, images: Sequence[FileImage], memory_bytes: int) -> int:
        n_threads = _choose_threads(images, memory_bytes)
        return _CLIENT_BYTES + n_threads * _longest_part(images)

    @override
    def open_stage(self, request: StageRequest) -> BucketStage:
        return BucketStage(self.dst, request)

    @override
    def find_space(self, request: StageRequest) -> None:
        """Return None: a store tells neither its space nor its speed."""

    @override
    def describe_remains(
        self, *, has_begun: bool, inode: int | None, keeps_partial: bool, command: str | None
    ) -> str:
        if inode is not None:
            return f"{self.dst} was already complete"
        if not has_begun:
            return "nothing was written (rerun the same command)"
        if keeps_partial and can_continue_uploads(self.dst):
            again = (
                "rerun the same command to continue" if command is None else f"continue: {command}"
            )
            return (
                f"the data sent to {self.dst} is kept as unfinished uploads, for which the store "
                f"charges ({again}; to remove the uploads, abort them: aws s3api "
                f"list-multipart-uploads --bucket {quote(self.dst.bucket)} "
                f"--prefix {quote(self.dst.key)} lists them)"
            )
        if not can_continue_uploads(self.dst):
            return (
                f"if {self.dst} was just being published, some of its objects may be in the "
                "bucket; rerun the command with --force to replace them"
            )
        return (
            f"rerun the same command: if {self.dst} was just being published, some of its objects "
            "may be in the bucket, and the command finishes publishing; otherwise, it starts over "
            "(--resume keeps the data already sent, for which the store charges)"
        )

    @override
    def finish_publication(self) -> None:
        """Do nothing: the report of a run is known when everything is published."""


def _choose_threads(images: Sequence[FileImage], memory_bytes: int) -> int:
    """Return the number of parts in flight, which the memory limit of the process allows."""
    share = memory_bytes // _MEMORY_SHARE
    return max(1, min(_MAX_THREADS, share // _longest_part(images)))


def _longest_part(images: Sequence[FileImage]) -> int:
    return part_bytes_of(max((image.size for image in images), default=0))


@dataclass(slots=True)
class _State:
    """The progress of the publication.

    Args:
        visible: names of the objects that this run has made visible.
        is_uncertain: the wait for an object ended without an answer (a signal, a broken
            connection); the store may yet make it visible.
        has_record: the record is in the store.
        is_final: the record is that of the complete publication, so another run can finish it.
        has_replaced: the deletion of the old objects has at least begun.
        is_committed: everything is published.
    """

    visible: list[str] = field(default_factory=list)
    is_uncertain: bool = False
    has_record: bool = False
    is_final: bool = False
    has_replaced: bool = False
    is_committed: bool = False


class BucketStage(DestinationStage):
    """An unfinished destination in an object store; a context manager.

    Objects become visible in this order: data, the metadata that make them a checkpoint, and, when
    that was verified, the manifest and the tracker file.

    Args:
        dst: the destination.
        request: what is written.
    """

    journal = None  # the store knows what was sent
    store: PartStore

    def __init__(self, dst: RemotePath, request: StageRequest) -> None:
        self.dst = dst
        self.notes: list[str] = []
        self.published: Mapping[str, Any] | None = None
        self._is_file = request.is_file
        self._base = dst.parent if self._is_file else dst
        metadata = [image.path for image in request.images if image.is_metadata]
        self._metadata = [name for name in metadata if name != TRACKER]
        trackers = [name for name in metadata if name == TRACKER]
        self._last = [manifest_name(dst.name if self._is_file else None), *trackers]
        self._resume = request.resume
        self._force = request.force
        self._reads_back = request.reads_back
        self._identity = request.identify()
        self._keep = request.keep
        self._check_replaced = request.check_replaced
        self._n_threads = n_threads = _choose_threads(request.images, request.memory_bytes)
        self._client = upload_client(dst)
        self._lock = DestinationLock(dst, stage_dir_of(dst))
        self._old: list[str] = []
        self._earlier: dict[str, ObjectUpload] = {}
        self._state = _State()
        if not self._client.takes_any_order:  # it has several parts in flight by itself
            n_threads = max(1, n_threads // N_IN_FLIGHT)
        self.store = PartStore(self._base, self._client, n_threads=n_threads)

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self.store.close()
            self._lock.release()
            raise
        return self

    def _begin(self) -> None:
        """Finish the publication of an earlier run, or look at what is at the destination."""
        self._lock.take()
        forget_listings()
        record = PublicationRecord.read(self.dst)
        uploads = self._unfinished_uploads()
        self._old = self._names_at_destination()
        if record is not None and record.identity == self._identity:
            # Several uploads may have one name: the record says which of them is complete.
            unfinished = {
                name: upload
                for name, upload in uploads
                if record.uploads.get(name) == upload.upload_id
            }
            if not record.report:
                self._delete_unverified(record, unfinished)
            elif record.can_be_finished(present=self._old, unfinished=unfinished):
                self._finish_earlier(record, unfinished)
                return
        self._check_destination(is_interrupted=record is not None)

        # Continue the uploads of an earlier run, or abort them.
        if self._resume:
            for name, upload in uploads:
                self._earlier.setdefault(name, upload)
            self.store.continue_uploads(self._earlier)
        dropped = [upload for name, upload in uploads if self._earlier.get(name) is not upload]
        _abort(dropped)
        if self._earlier:
            self.notes.append("continuing an interrupted run")
        elif dropped:
            self.notes.append(
                f"aborted {n_text(len(dropped), 'unfinished upload')} of an earlier run"
            )

    def _check_destination(self, *, is_interrupted: bool) -> None:
        """Raise if the destination exists and must not be replaced.

        Raises:
            UsageError: it exists, or replacing it would remove a path that must be kept.
        """
        if self._old and not self._force:
            part = "; an interrupted run has published part of it" if is_interrupted else ""
            raise UsageError(
                "the destination already exists" + part,
                file=str(self.dst),
                hint="choose another destination, or pass --force",
            )
        if self._old and self._reads_back:
            raise UsageError(
                "--verify and --fingerprint cannot be combined with --force to replace a "
                "checkpoint, because the new objects can be read back only after they have "
                "replaced the old ones",
                file=str(self.dst),
                hint="write to a different URL, or run ckpt validate --against SRC afterwards",
            )
        if self._old:
            StoreDestination(self.dst).check_may_replace(is_file=self._is_file, keep=self._keep)
            # Objects that are added later are not in the list of those to replace.
            self._check_replaced()

    def _names_at_destination(self) -> list[str]:
        """Return the names of the objects that would be replaced, relative to the base.

        Raises:
            UsageError: there is an object where the output would be a prefix.
        """
        if self._is_file:
            names = (self.dst.name, manifest_name(self.dst.name))
            return [name for name in names if (self._base / name).is_file()]
        if self.dst.is_file():
            raise UsageError(
                "the destination is an object, but the output would be a prefix",
                file=str(self.dst),
                hint="choose another destination",
            )
        return [*list_objects(self.dst)]

    def _unfinished_uploads(self) -> list[tuple[str, ObjectUpload]]:
        """Return the unfinished uploads at the destination by name; a name may have several."""
        try:
            uploads = self._client.unfinished(self.dst.parent if self._is_file else self.dst)
        except AccessDeniedError:
            note = (
                "ckpt has no permission to list unfinished uploads, so uploads of earlier runs may "
                "remain"
            )
            if note not in self.notes:
                self.notes.append(note)
            return []
        of_file = {self.dst.name, manifest_name(self.dst.name)}
        named = [(upload.path.relative_to(self._base).as_posix(), upload) for upload in uploads]
        return [(name, upload) for name, upload in named if not self._is_file or name in of_file]

    def _delete_unverified(
        self, record: PublicationRecord, unfinished: Mapping[str, ObjectUpload]
    ) -> None:
        """Delete the objects that a killed run of the same job has made visible to verify them."""
        if record.replaced:  # none of them was visible yet
            return
        published = {*record.uploads, *record.empty} - unfinished.keys()
        delete_objects([self._base / name for name in self._old if name in published])
        self._old = [name for name in self._old if name not in published]

    def _finish_earlier(
        self, record: PublicationRecord, unfinished: dict[str, ObjectUpload]
    ) -> None:
        """Finish the publication of an earlier run of the same job."""
        self._publish(
            record,
            {name: partial(unfinished[name].finish, replaces=False) for name in unfinished},
        )
        self._state.is_committed = True
        self._tidy_up()
        self.published = record.report

    @override
    def begin_literals(self, images: Sequence[FileImage], places: Places) -> EarlyLiterals:
        for image in images:
            self.store.create(image.path, image.size)
        return EarlyLiterals(images, places, self.store)

    @override
    def link_file(self, name: str, path: Path) -> None:
        raise AssertionError("check_writable has refused hard links")

    @override
    def write_manifest(self, name: str, write: Callable[[WriteStore], None]) -> None:
        with SpooledFile() as file:
            write(file)
            file.copy_to(self.store, name)

    @override
    def share(self) -> SharedUploads:
        check_shareable(self.dst)
        uploads = self.store.begin_uploads()
        return SharedUploads(self._base, uploads, self._n_threads, self.stage_dir)

    @override
    def take_shares(self, shares: Sequence[ShareResult], places: Places) -> None:
        # Arrays whose bytes were not summed will be read again: keep them until then.
        for number in {n for share in shares for n in share.state.unsummed_arrays}:
            self.store.hold(
                places.file_of(number), places.offset_of(number), places.bytes_of(number)
            )
        join_shares(self.store, [share.sent for share in shares if share.sent is not None])

    @property
    def stage_dir(self) -> RemotePath:
        """Prefix of what runs note beside the destination."""
        return stage_dir_of(self.dst)

    @property
    @override
    def resumed_bytes(self) -> int:
        return self.store.resumed_bytes

    @property
    @override
    def written_path(self) -> RemotePath:
        return self.dst

    @property
    @override
    def inode(self) -> int:
        return 0  # a publication is recognised by its record

    @override
    def make_readable(self, *, from_disk: bool = False, progress: OnProgress | None = None) -> None:
        """Make data and metadata visible, to read them back; manifest and tracker file follow."""
        begin_phase(progress, Phase.PUBLISHING)
        self._make_visible(self._metadata, report=None)

    @override
    def commit(self, report: Mapping[str, Any], *, progress: OnProgress | None = None) -> None:
        begin_phase(progress, Phase.PUBLISHING)
        self._make_visible((*self._metadata, *self._last), report=report)
        self._state.is_committed = True
        self._tidy_up()

    def _tidy_up(self) -> None:
        """After the commit, remove what was needed for it; what cannot be removed does no harm."""
        with suppress(CheckpointingException):
            # If an answer was lost, the client may have begun an upload twice.
            _abort([upload for _, upload in self._unfinished_uploads()])
        try:
            self._delete_notes()
        except CheckpointingException as err:
            self.notes.append(f"{self.stage_dir} could not be deleted: {err.message}")

    def _delete_notes(self) -> None:
        """Delete the record, and what workers have noted beside it."""
        names = [name for name in list_objects(self.stage_dir) if not is_of_lock(name)]
        delete_objects([self.stage_dir / name for name in names])

    def _make_visible(self, metadata: Sequence[str], *, report: Mapping[str, Any] | None) -> None:
        """Wait for all parts, write the record, and make objects visible."""
        self.store.finish()
        self._lock.check()
        uploads, state = self.store.uploads, self._state
        held_back = {*self._metadata, *self._last}
        record = PublicationRecord(
            self._identity,
            {name: upload.upload_id for name, upload in uploads.items() if name not in held_back},
            {name: uploads[name].upload_id for name in metadata if name in uploads},
            tuple(self.store.empty_names()),
            () if state.has_replaced else tuple(self._old),
            report or {},
        )
        record.write(self.dst)
        state.has_record, state.is_final = True, report is not None
        self._publish(
            record,
            {
                name: partial(self.store.publish, name)
                for name in record.uploads
                if name not in state.visible
            },
        )

    def _publish(
        self, record: PublicationRecord, finish_upload: Mapping[str, Callable[[], None]]
    ) -> None:
        """Delete what is replaced, then finish uploads: data at the same time, metadata in order.

        Args:
            record: the record, which is in the store.
            finish_upload: name → finishes the upload, of every object that is not visible.

        Raises:
            UsageError: another process has written to the destination in the meantime.
            StorageError: the store refuses, or cannot be reached.
        """
        # Delete the old checkpoint, its last objects first: without them it is none. The record
        # says that this was done before new objects have the old names.
        self._state.has_replaced = True
        if record.replaced:
            last = (*self._last, *self._metadata)
            old = sorted(record.replaced, key=lambda name: name not in last)
            delete_objects([self._base / name for name in old])
            record = replace(record, replaced=())
            record.write(self.dst)

        def finish(name: str) -> None:
            try:
                unseen[name]()
                self._state.visible.append(name)
            except FileExistsError:
                raise UsageError(
                    "another process has created the object in the meantime",
                    file=str(self._base / name),
                ) from None
            except UnansweredError as err:
                self._state.is_uncertain = True
                if self._client.takes_any_order:
                    err.hint = _RUN_AGAIN
                raise
            except BaseException as err:
                self._state.is_uncertain |= is_ending() or isinstance(err, KeyboardInterrupt)
                raise

        unseen = {**finish_upload}
        for name in record.empty:  # without bytes there is no upload
            if name not in self._state.visible:
                unseen[name] = partial(put_object, self._base / name, b"", replace=False)
        with ThreadPoolExecutor(N_REQUESTS) as pool:
            list(pool.map(finish, [n for n in (*record.data, *record.empty) if n in unseen]))
        for name in record.metadata:
            if name in unseen:
                finish(name)
        forget_listings()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        finish_despite_interrupts(self._leave)

    def _leave(self) -> None:
        """Close everything and clean up; can be repeated if interrupted."""
        self.store.close()
        if not self._state.is_committed:
            self._clean_up()
        self._lock.release()

    def _clean_up(self) -> None:
        """Abort the uploads and delete the objects of a failed run, as far as the store lets."""
        state = self._state
        # What another run that has taken over the lock has made visible is not deleted.
        with suppress(CheckpointingException):
            if not self._lock.is_own():
                _abort([*self.store.uploads.values()])
                return
        # What another run can finish stays if it has replaced something, or is to be resumed. No
        # other run can continue uploads that are sent in order.
        keeps = self._resume and self._client.takes_any_order
        # Without the record, an object that the store makes visible later would be nobody's.
        if state.is_uncertain and self._client.takes_any_order:
            return
        has_replaced = bool(self._old) and state.has_replaced
        if state.is_final and self._client.takes_any_order and (keeps or has_replaced):
            return
        with suppress(CheckpointingException):
            # The record goes first: what it lists must exist.
            if state.has_record:
                self._delete_notes()
            delete_objects([self._base / name for name in state.visible])
            if not keeps:
                _abort([*self.store.uploads.values(), *self._earlier.values()])


def _abort(uploads: Sequence[ObjectUpload]) -> None:
    """Abort uploads; the error of a run matters more than one of its end."""

    def abort(upload: ObjectUpload) -> None:
        with suppress(CheckpointingException):
            upload.abort()

    with ThreadPoolExecutor(N_REQUESTS) as pool:
        list(pool.map(abort, uploads))
