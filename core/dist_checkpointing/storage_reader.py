"""A storage reader that lets ``torch.distributed.checkpoint.load`` read every supported format.

::

    reader = CkptStorageReader("ckpt/iter_0001000", names="hf")
    dcp.load({"model": model.state_dict()}, storage_reader=reader)

    any checkpoint ── core.opening.open, core.verbs.convert.global_form ──▶ catalog of global
    tensors
                   ── read_metadata ──▶ torch's Metadata: every tensor as one chunk,
                                        every other entry as bytes
                   ── read_data ──────▶ the regions that the planner requests, read directly
                                        into the program's tensors

A key is the name that ``ckpt convert --to dcp`` would give the entry, and that torch gives it in a
nested state dict: its path, joined by dots. Megatron's rank files become global tensors below
``model.``. ``prefix`` and ``root`` adapt the keys to a state dict with one level more or less.

The sharding of the checkpoint does not matter: the engine finds the fragments of the region that a
rank requests, so every mesh, placement and number of ranks can read every checkpoint.

Source: torch 2.13
``torch/distributed/checkpoint/{storage,planner,default_planner,state_dict_loader}.py``.

Objects are rebuilt by the safe table of ``core.dist_checkpointing._values.objects``; an unknown
class becomes a ``StandIn``.

Not supported: casts that would lose integers (``core.arrays.cast``).
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from typing_extensions import override

from core.arrays.box import Box
from core.dist_checkpointing._engine import bridge
from core.dist_checkpointing._engine.torch_dtypes import dtype_name, torch_dtype
from core.dist_checkpointing._live.tensors import Chunk
from core.engine.catalog.catalog import Catalog
from core.errors import MissingShardError, UnsupportedError, UsageError
from core.files.remote_path import is_remote, location_of
from core.files.source_store import SourceStore
from core.files.url import find_location
from core.formats.dcp import format as dcp
from core.formats.dcp.metadata_image import paths_of
from core.formats.dcp.metadata_writer import DCP_VERSION
from core.opening.objects import state_dict
from core.opening.open import open_checkpoint
from core.verbs.convert.global_form.build import global_form
from core.verbs.convert.job import Job

CheckpointId = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class _OpenedCheckpoint:
    """A checkpoint that is being read.

    Args:
        catalog: global tensors, and the other entries with their values.
        store: the checkpoint's files.
        key_of: from the name that torch uses to the key in the catalog.
        paths: from the name that torch uses to the entry's path in a nested state dict.
    """

    catalog: Catalog
    store: SourceStore
    key_of: dict[str, str]
    paths: dict[str, tuple[str | int, ...]]


class CkptStorageReader(StorageReader):
    """A storage reader that reads a checkpoint in any format into a (sharded) state dict.

    Args:
        path: whatever ``ckpt inspect`` accepts: a directory, a file, a training root, or the URL of
            one.
        iteration: iteration of a training root; None for the one that its tracker names, else the
            newest.
        names: naming scheme for the tensors: ``hf``, ``hf:MODEL_TYPE`` or ``megatron``; None keeps
            the stored names.
        rename: (regular expression, replacement) pairs for keys, as in
        ``core.engine.changes.rename``.
        prefix: prefix that the keys of the state dict have and those of the checkpoint lack;
            ``model.`` loads ``{"model": model.state_dict()}`` from a file of
            ``model.state_dict()``.
        root: the entry of the checkpoint whose content is loaded; ``model`` loads
            ``model.state_dict()`` from a file of ``{"model": …, "optimizer": …}``.
        casts: cast to the dtypes of the program's tensors, rounding as torch does; if False, a
            different dtype is an error.
        checks_crc: compare checksums where the checkpoint has them and complete records are read.
        changes: further fields of ``core.verbs.convert.job.Job`` that change what is read, such as
            ``exclude``, ``dequantize``, ``config``, ``vocab_size``, ``unstack_layers`` or
            ``rules``.

    Raises:
        TypeError: a keyword is not a field of Job.
        UsageError: ``path`` is on another host, or an option has an invalid value.
    """

    def __init__(
        self,
        path: CheckpointId,
        *,
        iteration: int | None = None,
        names: str | None = None,
        rename: Sequence[tuple[str, str]] = (),
        prefix: str = "",
        root: str = "",
        casts: bool = True,
        checks_crc: bool = True,
        **changes: Any,
    ) -> None:
        super().__init__()
        self.path = find_location(path)
        self.load_id = str(uuid.uuid4())
        self._prefix = prefix
        self._root = root
        self._casts = casts
        self._checks_crc = checks_crc
        self._options = {"iteration": iteration, "names": names, "rename": tuple(rename), **changes}
        self._opened: _OpenedCheckpoint | None = None
        # Create a job only to check the options.
        Job(src=self.path, to="dcp", **self._options)

    @property
    def checkpoint_id(self) -> CheckpointId:
        """Path or URL of the checkpoint."""
        return str(self.path) if is_remote(self.path) else self.path

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Return whether the id is an existing path, or the URL of an object store."""
        location = location_of(checkpoint_id)
        return is_remote(location) or os.path.lexists(location)

    @override
    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Close the checkpoint and begin a new read, of another checkpoint if an id is given."""
        self._close()
        if checkpoint_id:
            self.path = find_location(checkpoint_id)
        self.load_id = str(uuid.uuid4())

    @override
    def read_metadata(self) -> Metadata:
        """Return the checkpoint's entries: every tensor as one chunk, every other entry as bytes.

        Raises:
            CheckpointingException: the checkpoint cannot be opened, or its shards cannot be
                combined into global tensors with the given options.
        """
        self._close()
        opened = self._opened = self._open()
        catalog = opened.catalog
        metadata = Metadata(
            state_dict_metadata={
                name: _tensor_metadata(catalog, key)
                if key in catalog.tensors
                else BytesStorageMetadata()
                for name, key in opened.key_of.items()
            },
            planner_data=dict(opened.paths),
            storage_data={},
            storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self.load_id),
        )
        # An attribute, because torch 2.4's Metadata takes no such argument.
        metadata.version = DCP_VERSION
        return metadata

    @override
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing, because ``read_metadata`` has opened the checkpoint."""

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything that the plan requests.

        Returns:
            A completed future.

        Raises:
            MissingShardError: an entry is not in the checkpoint; the hint names similar ones.
            CorruptError: bytes are damaged, or shapes differ.
            UnsupportedError: a cast is not supported, or is needed with ``casts=False``.
            UnsafeError: an object refers to something that runs code.
        """
        # Ranks other than the coordinator may not have read the metadata.
        opened = self._opened = self._opened or self._open()
        try:
            # Read the tensors, directly into the program's memory.
            items = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
            targets = [self._target(opened, item, planner) for item in items]
            for group in _group_by_dtype(targets):
                bridge.fill_tensors(
                    group, opened.catalog, opened.store, checks_crc=self._checks_crc
                )
            for item, (_, tensor) in zip(items, targets, strict=True):
                planner.commit_tensor(item, tensor)
            # Pass every other entry to the planner, as a stream.
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._stream(opened, item))
        finally:
            self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _open(self) -> _OpenedCheckpoint:
        """Open the checkpoint, and combine its shards into global tensors under torch's names."""
        job = Job(src=self.path, to="dcp", **self._options)
        source = open_checkpoint(self.path, iteration=job.iteration)
        try:
            catalog = state_dict(global_form(job, source, dcp.FORMAT).catalog)
            key_of, paths = _names_for_torch(catalog, prefix=self._prefix, root=self._root)
            return _OpenedCheckpoint(catalog, source.store, key_of, paths)
        except BaseException:
            source.store.close()
            raise

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.store.close()
            self._opened = None

    def _target(
        self, opened: _OpenedCheckpoint, item: ReadItem, planner: LoadPlanner
    ) -> tuple[Chunk, torch.Tensor]:
        """Return the region that an item requests, and the tensor to read it into.

        Raises:
            MissingShardError: the tensor is not in the checkpoint.
            UsageError: the planner's tensor has another shape than the item.
            UnsupportedError: the dtypes differ, and casts are off.
        """
        # Find the region in the global tensor: an item's offset is relative to its chunk.
        name = item.storage_index.fqn
        key = _key(opened, name)
        meta = opened.catalog.tensor(key)
        chunk_offset = item.storage_index.offset or (0,) * len(meta.shape)
        offset = tuple(
            chunk_start + start
            for chunk_start, start in zip(chunk_offset, item.storage_offsets, strict=True)
        )
        # Check the program's tensor.
        tensor = planner.resolve_tensor(item).detach()
        if tuple(tensor.shape) != tuple(item.lengths):
            raise UsageError(
                f"the planner requests shape {tuple(item.lengths)}, but its tensor has shape "
                f"{tuple(tensor.shape)}",
                key=name,
            )
        dtype = dtype_name(tensor.dtype, key=name)
        if dtype != meta.dtype and not self._casts:
            raise UnsupportedError(
                f"the tensor is {meta.dtype} in the checkpoint, but {dtype} in the state dict",
                key=name,
                hint=f"use a {meta.dtype} tensor, or pass casts=True",
            )
        return Chunk(key, dtype, meta.shape, Box(offset, tuple(item.lengths))), tensor

    def _stream(self, opened: _OpenedCheckpoint, item: ReadItem) -> io.BytesIO:
        """Return an object as a stream of ``torch.save``, for a planner that really unpickles it.

        The stream is written from the safely rebuilt value, so it contains only known classes and
        stand-ins.

        Raises:
            UsageError: the entry is a tensor in the checkpoint.
        """
        name = item.storage_index.fqn
        entry = opened.catalog.objects.get(_key(opened, name))
        if entry is None:
            raise UsageError(
                "the entry is a tensor in the checkpoint, but not in the state dict", key=name
            )
        stream = io.BytesIO()
        torch.save(bridge.live_value(entry.value, opened.catalog, opened.store, key=name), stream)
        stream.seek(0)
        return stream


class CkptLoadPlanner(DefaultLoadPlanner):
    """Torch's default planner, whose errors about missing keys name similar keys."""

    @override
    def create_local_plan(self) -> LoadPlan:
        """Return torch's own plan for the reads of this rank.

        Raises:
            MissingShardError: the checkpoint lacks a key, and partial loads are not allowed.
        """
        stored = self.metadata.state_dict_metadata
        lacking = [name for name in self.state_dict if name not in stored]
        if lacking and not self.allow_partial_load and not _may_be_of_old_torch(self, stored):
            raise _missing_error(lacking[0], list(stored), n_more=len(lacking) - 1)
        return super().create_local_plan()


def _may_be_of_old_torch(planner: DefaultLoadPlanner, stored: Mapping[str, object]) -> bool:
    """Return whether a missing key contains a list index, which torch < 2.4 named differently.

    torch's own planner handles that case.
    """
    return planner.flatten_state_dict and any(
        name not in stored and any(isinstance(part, int) for part in path)
        for name, path in planner.mappings.items()
    )


def _names_for_torch(
    catalog: Catalog, *, prefix: str, root: str
) -> tuple[dict[str, str], dict[str, tuple[str | int, ...]]]:
    """Return the catalog's keys and their nested paths, both by the names that torch uses.

    Args:
        catalog: tensors and objects.
        prefix: put before every name.
        root: only keys below this entry are named, without it; empty for all keys.

    Raises:
        UsageError: no entry is below ``root``.
    """
    prefix_path = tuple(prefix.removesuffix(".").split(".")) if prefix else ()
    # Name every entry, without the root and with the prefix.
    keys: dict[str, str] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for key, path in paths_of(catalog).items():
        name = key
        if root:
            if not key.startswith(f"{root}."):
                continue
            name = key[len(root) + 1 :]
            # A root with dots is not the first part of the path, nor is one of a flat state dict.
            path = path[1:] if path[0] == root else (name,)
        keys[prefix + name] = key
        paths[prefix + name] = (*prefix_path, *path)
    # List the possible roots if this one does not exist.
    if root and not keys:
        first = dict.fromkeys(key.partition(".")[0] for key in (*catalog.tensors, *catalog.objects))
        raise UsageError(
            f"the checkpoint has no entry {root!r}",
            hint=f"set root= to one of these entries: {', '.join(list(first)[:8])}",
        )
    return keys, paths


def _tensor_metadata(catalog: Catalog, key: str) -> TensorStorageMetadata:
    """Return torch's metadata for a tensor, as if it were stored in one chunk."""
    tensor = catalog.tensor(key)
    size = torch.Size(tensor.shape)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=torch_dtype(tensor.dtype)),
        size=size,
        chunks=[ChunkStorageMetadata(offsets=torch.Size((0,) * len(size)), sizes=size)],
    )


def _key(opened: _OpenedCheckpoint, name: str) -> str:
    """Return the catalog's key for a name that torch requests.

    Raises:
        MissingShardError: the checkpoint does not contain the entry.
    """
    key = opened.key_of.get(name)
    if key is None:
        raise _missing_error(name, list(opened.key_of))
    return key


def _missing_error(name: str, stored: Sequence[str], *, n_more: int = 0) -> MissingShardError:
    """Return the error about a missing key, with a hint that names similar keys."""
    similar = get_close_matches(name, stored, n=3, cutoff=0.7)
    tail = name.partition(".")[2]
    # Also name keys that differ by their first part only, which prefix= or root= can mend.
    similar += [key for key in stored if key.endswith(f".{name}") or (tail and key == tail)][:3]
    hint = (
        f"similar keys: {', '.join(dict.fromkeys(similar))}"
        if similar
        else f"the checkpoint contains {', '.join(stored[:5])}"
    )
    more = f" ({n_more} more missing)" if n_more else ""
    return MissingShardError(
        f"the entry was not found in the checkpoint{more}",
        key=name,
        hint=f"{hint}; adapt the names with prefix=, root= or names=",
    )


def _group_by_dtype(
    targets: Sequence[tuple[Chunk, torch.Tensor]],
) -> Iterator[list[tuple[Chunk, torch.Tensor]]]:
    """Yield all targets in one group, or one group per dtype if a tensor is read into several.

    The engine reads the regions of one tensor only into memory of one dtype.
    """
    dtypes: dict[str, set[str]] = {}
    for chunk, _ in targets:
        dtypes.setdefault(chunk.key, set()).add(chunk.dtype)
    if all(len(dtypes_of_key) == 1 for dtypes_of_key in dtypes.values()):
        yield list(targets)
        return
    for dtype in dict.fromkeys(chunk.dtype for chunk, _ in targets):
        yield [(chunk, tensor) for chunk, tensor in targets if chunk.dtype == dtype]
