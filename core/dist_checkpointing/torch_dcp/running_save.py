"""A planned save that has begun, on the coordinator: in a staging directory or an object store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from core.dist_checkpointing._directory.bucket_publication import BucketPublication, read_lock_token
from core.dist_checkpointing._directory.sums import SUMS, sums_dir_of
from core.dist_checkpointing._live.destination import (
    BucketDestination,
    DirectoryDestination,
    SaveDestination,
)
from core.dist_checkpointing._live.upload import bytes_of_literals
from core.dist_checkpointing.core import CONFIG_FNAME
from core.dist_checkpointing.torch_dcp.planned_files import lay_out_rest, share_of_rest
from core.dist_checkpointing.torch_dcp.planned_save import (
    PlannedSave,
    RankSave,
    SaveLayout,
    is_finished_by_rank,
)
from core.engine.catalog.file_image import FileImage, no_literals
from core.engine.plan.plan import DEFAULT_THREADS
from core.errors import CorruptError, StorageError, UnsupportedError
from core.files.object_listing import forget_listings
from core.files.remote_path import is_remote
from core.files.source_store import open_store
from core.publish.manifest.file import manifest_name
from core.publish.manifest.partial_sums import write_combined
from core.publish.stage.folder_lock import stage_dir_of
from core.publish.stage.stage import Stage

if TYPE_CHECKING:
    from core.formats.format import Format


class SavePlace(Protocol):
    """The place that a save is written to before it is published.

    Attributes:
        token: identifier of the save, by which ranks recognise it.
        data_dir: directory or prefix of the files.
        destination: writes files there.
    """

    token: str
    data_dir: Path
    destination: SaveDestination

    @staticmethod
    def join(dst: Path, token: str) -> tuple[Path, Path | None]:
        """Return the place for a rank's files, and that for its checksums if they are wanted.

        Args:
            dst: the destination.
            token: identifier of the save.

        Raises:
            StorageError: this rank does not see what the coordinator has begun.
        """

    def begin(self, parts: Sequence[RankSave]) -> None:
        """Prepare the place for the parts of all ranks."""

    def publish(self, images: Sequence[FileImage]) -> None:
        """Write the last files, and publish the checkpoint."""

    def abandon(self) -> None:
        """Remove what was written; do nothing after ``publish``."""


class StagedSave(SavePlace):
    """A save in a staging directory; see ``SavePlace``.

    Args:
        stage: the staging directory, not entered yet.
        token: identifier of the save.
        fsync: wait for the disk.
        manifest: let the ranks compute checksums, and publish the checkpoint with its manifest.
    """

    def __init__(self, stage: Stage, token: str, *, fsync: bool, manifest: bool) -> None:
        _abandon_stale(stage.dst)
        stage.__enter__()
        self.token = token
        self.data_dir = stage.data_dir
        # The stage syncs its files when it is published.
        self.destination = DirectoryDestination(stage.data_dir, fsync=False, store=stage.store)
        self._stage = stage
        self._sums_dir = stage.stage_dir / SUMS if manifest else None
        self._fsync = fsync
        _SAVES[stage.dst] = self

    @staticmethod
    @override
    def join(dst: Path, token: str) -> tuple[Path, Path | None]:
        # On a file system that is not shared, the coordinator's token is missing.
        stage_dir = stage_dir_of(dst)
        if not _token_path(stage_dir, token).exists():
            raise StorageError(
                "the coordinator created this directory, but this rank cannot see it",
                file=str(stage_dir),
                hint="use the same path on all ranks, on a file system that they share",
            )
        sums_dir = stage_dir / SUMS
        return stage_dir / "data", sums_dir if sums_dir.is_dir() else None

    @override
    def begin(self, parts: Sequence[RankSave]) -> None:
        _token_path(self._stage.stage_dir, self.token).touch()
        if self._sums_dir is not None:
            self._sums_dir.mkdir()
        # Create the files that several ranks write to before any of the ranks opens them.
        n_writers = Counter(image.path for part in parts for image in part.images)
        shared = {
            image.path: image.size
            for part in parts
            for image in part.images
            if n_writers[image.path] > 1
        }
        for name, n_bytes in shared.items():
            self._stage.store.create(name, n_bytes)

    @override
    def publish(self, images: Sequence[FileImage]) -> None:
        self.destination.finish(images)
        if self._sums_dir is not None:
            name = manifest_name(self._stage.dst.name if self._stage.is_file else None)
            write_combined(self.data_dir, self._sums_dir, name, fsync=self._fsync)
        self._stage.commit()

    @override
    def abandon(self) -> None:
        if _SAVES.get(self._stage.dst) is self:
            del _SAVES[self._stage.dst]
            self._stage.__exit__(None, None, None)


class UploadedSave(SavePlace):
    """A save to an object store; see ``SavePlace``.

    Args:
        root: URL of the prefix.
        layout: the files.
        overwrite, manifest: as in ``BucketPublication``.

    Raises:
        UnsupportedError: the format has files that several ranks write.
        UsageError, StorageError: the destination cannot be written.
    """

    def __init__(self, root: Path, layout: SaveLayout, *, overwrite: bool, manifest: bool) -> None:
        _abandon_stale(root)
        for image in layout.images:
            has_data = any(placed.array.n_bytes for placed in image.arrays)
            if has_data and not is_finished_by_rank(image):
                name = layout.target.format
                raise UnsupportedError(
                    f"several ranks hold parts of this {name} file, but only one rank can write "
                    "an object",
                    file=str(root / image.path),
                    hint="save as dcp or torch_dist, then convert: ckpt convert URL DST --to "
                    f"{name}",
                )
        self._root = root
        self._publication = BucketPublication(root, overwrite=overwrite, manifest=manifest)
        self.token = self._publication.token
        self.data_dir = self._publication.data_dir
        self.destination = BucketDestination(self._publication.data_dir)
        _SAVES[root] = self

    @staticmethod
    @override
    def join(dst: Path, token: str) -> tuple[Path, Path | None]:
        assert is_remote(dst)
        forget_listings()  # what this rank saw before the save is out of date after it
        if read_lock_token(dst) != token:
            raise StorageError(
                "the coordinator created a lock here, but this rank cannot see it",
                file=str(dst),
                hint="use the same URL, endpoint and credentials on all ranks",
            )
        return dst, sums_dir_of(dst)

    @override
    def begin(self, parts: Sequence[RankSave]) -> None:
        pass  # no object has several writers

    @override
    def publish(self, images: Sequence[FileImage]) -> None:
        # The metadata is put only while the lock is that of this save.
        last = {
            image.path: bytes_of_literals(image)
            for image in sorted(images, key=lambda image: image.path == CONFIG_FNAME)
            if image.is_metadata or image.path == CONFIG_FNAME
        }
        self.destination.finish([image for image in images if image.path not in last])
        self._publication.publish_files(last)

    @override
    def abandon(self) -> None:
        if _SAVES.get(self._root) is self:
            del _SAVES[self._root]
        self._publication.abandon()


def _token_path(stage_dir: Path, token: str) -> Path:
    """Return the path of the file by which ranks recognise the coordinator's staging directory."""
    return stage_dir / f"save-{token}"


_SAVES: dict[Path, SavePlace] = {}
"""The saves that this process has begun and not ended, by destination."""


def _abandon_stale(dst: Path) -> None:
    """Abandon a failed save to the same destination.

    Torch has no hook for a failed save, so its writer may still be alive and hold the lock.
    """
    stale = _SAVES.get(dst)
    if stale is not None:
        stale.abandon()


@dataclass(slots=True)
class RunningSave:
    """A save that has begun, on the coordinator.

    Args:
        save: the combined plans of all ranks.
        layout: the files, and the positions of tensors in them.
        format: the format that ranks write.
        dst: the directory, file or prefix that is published.
        max_file_bytes: maximum size of the files that ranks write.
        place: the place that the files are written to.
        end: abandons the save; called when the writer is garbage-collected or the process exits, if
            not before.
    """

    save: PlannedSave
    layout: SaveLayout
    format: Format
    dst: Path
    max_file_bytes: int | None
    place: SavePlace
    end: Callable[[], object]

    @property
    def is_replaced(self) -> bool:
        """True if another save to the same destination has begun, and abandoned this one."""
        return _SAVES.get(self.dst) is not self.place

    def finish(self, streams: Mapping[str, bytes]) -> None:
        """Write what the ranks have not written, and publish the checkpoint.

        Args:
            streams: the entries that are not tensors as streams of ``torch.save``, by key.

        Raises:
            CorruptError: a file that a rank has finished has the wrong size.
            UnsupportedError: an entry is not supported, or moves the tensors.
            CheckpointingException: a file is missing or cannot be written.
        """
        # Check the files that ranks have finished: they must exist and have the planned sizes.
        finished = {image.path for image in self.layout.images if is_finished_by_rank(image)}
        forget_listings()
        with closing(open_store(self.place.data_dir)) as store:
            for image in self.layout.images:
                if image.path in finished and store.size(image.path) != image.size:
                    raise CorruptError(
                        f"the file is {store.size(image.path)} bytes long after the save, expected "
                        f"{image.size}",
                        file=image.path,
                    )
        # Write the other entries, whose sizes were not known before.
        layout = self.layout
        if streams:
            layout, memory = lay_out_rest(
                self.save,
                layout,
                streams,
                format=self.format,
                dst=self.dst,
                max_file_bytes=self.max_file_bytes,
            )
            share = share_of_rest(layout)
            self.place.destination.write(
                share,
                layout.source,
                memory,
                images=layout.images,
                threads=DEFAULT_THREADS,
                with_sums=False,
            )
            # A share has the literals of those files that no other process writes to.
            finished |= {image.path for image in share.images if image.literals is not no_literals}
        self.place.publish([image for image in layout.images if image.path not in finished])
