"""A planned save to an object store: every rank uploads the files that it fills alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from core.dist_checkpointing._directory.bucket_publication import BucketPublication, read_lock_token
from core.dist_checkpointing._directory.sums import sums_dir_of
from core.dist_checkpointing._engine import bridge
from core.dist_checkpointing._live.destination import ArrayBytes, manifest_entries
from core.dist_checkpointing._live.share import ProcessShare
from core.dist_checkpointing._live.tensors import live_source
from core.dist_checkpointing._live.upload import bytes_of_literals, upload_files, upload_object
from core.dist_checkpointing.core import CONFIG_FNAME
from core.dist_checkpointing.torch_dcp.planned_files import (
    lay_out_rest,
    resolve_tensor,
    share_of_rest,
)
from core.dist_checkpointing.torch_dcp.planned_save import (
    PlannedSave,
    RankSave,
    SaveLayout,
    build_item_chunk,
    is_finished_by_rank,
    is_tensor,
    lay_out,
)
from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.catalog.stored import PlannedArray
from core.engine.catalog.tensor import TargetFragment
from core.errors import CorruptError, StorageError, UnsupportedError
from core.files.multipart.stream import Piece
from core.files.object_listing import forget_listings
from core.files.remote_path import RemotePath
from core.files.remote_store import RemoteStore
from core.publish.manifest.partial_sums import write_sums

if TYPE_CHECKING:
    from core.formats.format import Format


@dataclass(slots=True)
class BucketSave:
    """A save to an object store that has begun; on the coordinator.

    Args:
        save: the combined plans of all ranks.
        layout: the files, and the positions of tensors in them.
        format: the format.
        root: URL of the destination.
        max_file_bytes: maximum size of the files.
        publication: the objects that have been written.
    """

    save: PlannedSave
    layout: SaveLayout
    format: Format
    root: RemotePath
    max_file_bytes: int | None
    publication: BucketPublication

    def finish(self, streams: Mapping[str, bytes]) -> None:
        """Upload what the ranks have not written, and put the metadata last.

        Args:
            streams: the entries that are not tensors as streams of ``torch.save``, by key.

        Raises:
            CheckpointingException: an object is missing, an entry is not supported, or the store
                refuses; all objects are deleted.
        """
        try:
            # Check what the ranks have uploaded.
            finished = {
                image.path: image.size for image in self.layout.images if is_finished_by_rank(image)
            }
            forget_listings()
            store = RemoteStore(self.root)
            for name, n_bytes in finished.items():
                if store.size(name) != n_bytes:
                    raise CorruptError(
                        f"the object has {store.size(name)} bytes after the save, "
                        f"expected {n_bytes}",
                        file=name,
                    )
            # Upload the files with the other entries, and those without data.
            layout = self.layout
            if streams:
                layout, memory = lay_out_rest(
                    self.save,
                    layout,
                    streams,
                    format=self.format,
                    dst=self.root,
                    max_file_bytes=self.max_file_bytes,
                )
                share = share_of_rest(layout)
                arrays = ArrayBytes(share, layout.source, memory)
                upload_files(self.root, share.images, arrays.pieces, threads=1)
                finished |= {image.path: image.size for image in share.images}
            rest = [image for image in layout.images if image.path not in finished]
            last: dict[str, bytes] = {}
            for image in sorted(rest, key=lambda image: image.path == CONFIG_FNAME):
                if image.is_metadata or image.path == CONFIG_FNAME:
                    last[image.path] = bytes_of_literals(image)
                else:
                    upload_object(self.root / image.path, bytes_of_literals(image))
        except BaseException:
            self.publication.abandon()
            raise
        self.publication.publish_files(last)


def begin_bucket_save(
    save: PlannedSave,
    format: Format,
    root: RemotePath,
    *,
    overwrite: bool,
    manifest: bool,
    max_file_bytes: int | None,
) -> BucketSave:
    """Lay out a save to an object store, and lock its prefix.

    Args:
        save: the combined plans.
        format: a writable format.
        root: URL of the destination.
        overwrite, manifest: as in ``BucketPublication``.
        max_file_bytes: maximum size of a file.

    Raises:
        UnsupportedError: the format has files that several ranks write.
        UsageError, StorageError: the destination cannot be written.
    """
    layout = lay_out(save, format, root, max_file_bytes=max_file_bytes)
    for image in layout.images:
        has_data = any(placed.array.n_bytes for placed in image.arrays)
        if has_data and not is_finished_by_rank(image):
            raise UnsupportedError(
                f"ranks share the files of {format.name}, but only one can write an object",
                file=str(root / image.path),
                hint="save as dcp or torch_dist, and convert: ckpt convert URL DST --to "
                f"{format.name}",
            )
    publication = BucketPublication(root, overwrite=overwrite, manifest=manifest)
    return BucketSave(save, layout, format, root, max_file_bytes, publication)


def upload_part(
    plan: SavePlan, planner: SavePlanner, part: RankSave, root: RemotePath, *, threads: int
) -> list[WriteResult]:
    """Upload the files of a rank, with one tensor at a time in host memory for each thread.

    Args:
        plan, planner: the plan and the planner of this rank.
        part: the part of the save that this rank writes.
        root: URL of the destination.
        threads: number of files at the same time.

    Returns:
        The size of every item. The result for an entry that is not a tensor also contains its
        stream, which the coordinator uploads.

    Raises:
        StorageError: this rank does not see the coordinator's lock, or the store refuses.
        UsageError: a tensor from the planner does not have the planned dtype or shape.
    """
    if read_lock_token(root) != part.token:
        raise StorageError(
            "the coordinator put a lock here, but this rank does not see it",
            file=str(root),
            hint="use the same URL, endpoint and credentials on all ranks",
        )
    # Which item fills which array; of several items for one region, any.
    items = {
        (item.index.fqn, build_item_chunk(item).box): item for item in plan.items if is_tensor(item)
    }
    fragments: dict[str, tuple[str, TargetFragment]] = {
        fragment.array.name: (key, fragment)
        for key, of_key in part.fragments.items()
        for fragment in of_key
        if fragment.array is not None
    }

    def pieces_of(array: PlannedArray) -> Iterator[Piece]:
        key, fragment = fragments[array.name]
        item = items[key, fragment.box]
        # The tensor has to outlive the reads of its memory.
        tensor = resolve_tensor(item, planner)
        source, memory = live_source([bridge.live_tensor(build_item_chunk(item), tensor)])
        tensor_of_item = replace(part.tensors[key], tiling=lambda: (fragment,))
        target: TargetCatalog = Catalog("live", None, {key: tensor_of_item})
        yield from ArrayBytes(ProcessShare(target, ()), source, memory).pieces(array)
        del tensor

    share = ProcessShare(part.catalog(), part.images)
    sums_dir = sums_dir_of(root)
    uploaded = upload_files(
        root, part.images, pieces_of, threads=threads, with_digests=sums_dir is not None
    )
    if sums_dir is not None:
        write_sums(sums_dir, part.number, uploaded.files, manifest_entries(share, uploaded))
    # Return every other entry, which torch sends to the coordinator with the results.
    results = []
    for item in plan.items:
        stream = None if is_tensor(item) else planner.resolve_data(item).getvalue()
        n_bytes = build_item_chunk(item).n_bytes if stream is None else len(stream)
        results.append(WriteResult(index=item.index, size_in_bytes=n_bytes, storage_data=stream))
    return results
