"""Lets ``torch.distributed.checkpoint.load`` read every format that this project reads.

::

    dcp.load({"model": model.state_dict()}, storage_reader=CkptStorageReader("ckpt/iter_0001000", names="hf"))

    any checkpoint ── core.opening.open, core.convert.global_form ──▶ catalog of global tensors
                      read_metadata ──▶ torch's Metadata: every tensor as one chunk, every other entry as bytes
                      read_data ──▶ the regions that the planner asks for, straight into the tensors of the program

A key is what ``ckpt convert --to dcp`` would call the entry, and what torch calls it in a nested state dict: its path,
dot-joined. Rank files of Megatron become global tensors below ``model.``. ``prefix`` and ``root`` fit the keys to a
state dict that is nested one level more, or less.

How the checkpoint is cut does not show: the engine finds the pieces of the region that a rank wants, so every mesh,
placement and number of ranks can read every checkpoint.

Source: torch 2.13 ``torch/distributed/checkpoint/{storage,planner,default_planner,state_dict_loader}.py``.

Objects are made by the safe table of ``core.dist_checkpointing._values.objects``; what it does not know is a
``StandIn``.

Not supported: casts that would lose integers (``core.arrays.cast``).
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
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

from core.arrays.box import Box
from core.catalog.catalog import Catalog
from core.convert.global_form import global_form
from core.convert.job import Job
from core.dist_checkpointing._engine import bridge
from core.dist_checkpointing._engine.torch_dtypes import dtype_name, torch_dtype
from core.errors import MissingShardError, UnsupportedError, UsageError
from core.files.store import LocalStore
from core.files.url import refuse_url
from core.formats.dcp import format as dcp
from core.live.tensors import Chunk
from core.opening.objects import state_dict
from core.opening.open import open_checkpoint

CheckpointId = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class _Opened:
    """A checkpoint that is being read.

    Args:
        catalog: global tensors, and the other entries with their values.
        store: its files.
        key_of: name that torch sees → key of the catalog.
        paths: name that torch sees → where the entry stands in a nested state dict.
    """

    catalog: Catalog
    store: LocalStore
    key_of: dict[str, str]
    paths: dict[str, tuple[str | int, ...]]


class CkptStorageReader(StorageReader):
    """Reads a checkpoint in any format into a (sharded) state dict.

    Args:
        path: whatever ``ckpt inspect`` takes: a directory, a file, a training root.
        iteration: which iteration of a training root; None for the one its tracker names, else the newest.
        names: whose names the tensors get: ``hf``, ``hf:MODEL_TYPE`` or ``megatron``; None keeps those that are stored.
        rename: (regular expression, replacement) pairs for keys, see ``core.changes.rename``.
        prefix: what the keys of the state dict begin with and those of the checkpoint do not; ``model.`` loads
            ``{"model": model.state_dict()}`` from a file of ``model.state_dict()``.
        root: the entry of the checkpoint whose content is loaded; ``model`` loads ``model.state_dict()`` from a file of
            ``{"model": …, "optimizer": …}``.
        casts: cast to the dtypes that the program's tensors have, rounding as torch does; False refuses.
        checks_crc: compare checksums where the checkpoint states them and whole records are read.
        changes: further fields of ``core.convert.job.Job`` that change what is read, such as ``exclude``,
            ``dequantize``, ``config``, ``vocab_size``, ``unstack_layers`` or ``rules``.

    Raises:
        TypeError: a field that Job does not have.
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
        refuse_url(path)
        self.path = Path(path)
        self.load_id = _new_id()
        self._prefix = prefix
        self._root = root
        self._casts = casts
        self._checks_crc = checks_crc
        self._options = {"iteration": iteration, "names": names, "rename": tuple(rename), **changes}
        self._opened: _Opened | None = None
        Job(src=self.path, to="dcp", **self._options)

    @property
    def checkpoint_id(self) -> CheckpointId:
        """What is read."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether it is a path that exists; addresses of other storage are none."""
        return "://" not in os.fspath(checkpoint_id) and os.path.lexists(checkpoint_id)

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Forgets what was opened; a new read begins, of another checkpoint if an id is given."""
        self._close()
        if checkpoint_id:
            refuse_url(checkpoint_id)
            self.path = Path(checkpoint_id)
        self.load_id = _new_id()

    def read_metadata(self) -> Metadata:
        """What there is: every tensor as one chunk, every other entry as bytes.

        Raises:
            CheckpointingException: the checkpoint cannot be opened, or not be made global as it was asked for.
        """
        self._close()
        opened = self._opened = self._open()
        catalog = opened.catalog
        return Metadata(
            state_dict_metadata={
                name: _tensor_metadata(catalog, key) if key in catalog.tensors else BytesStorageMetadata()
                for name, key in opened.key_of.items()
            },
            planner_data=dict(opened.paths),
            storage_data={},
            storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self.load_id),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing to prepare: all ranks read alike, and ``read_metadata`` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are: nobody needs to know what others read."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills what the plan asks for; the future is done.

        Raises:
            MissingShardError: the checkpoint has no such entry; the hint names similar ones.
            CorruptError: damaged bytes, or shapes that differ.
            UnsupportedError: a cast that is not made, or that was not wanted.
            UnsafeError: an object names something dangerous.
        """
        opened = self._opened = self._opened or self._open()
        try:
            items = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
            wanted = [self._wanted(opened, item, planner) for item in items]
            for same_type in _by_dtype(wanted):
                bridge.fill_tensors(same_type, opened.catalog, opened.store, checks_crc=self._checks_crc)
            for item, (_, tensor) in zip(items, wanted, strict=True):
                planner.commit_tensor(item, tensor)
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._stream(opened, item))
        finally:
            self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _open(self) -> _Opened:
        job = Job(src=self.path, to="dcp", **self._options)
        source = open_checkpoint(self.path, iteration=job.iteration)
        try:
            catalog = state_dict(global_form(job, source, dcp.FORMAT).catalog)
            return _Opened(catalog, source.store, *_named(catalog, prefix=self._prefix, root=self._root))
        except BaseException:
            source.store.close()
            raise

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.store.close()
            self._opened = None

    def _wanted(self, opened: _Opened, item: ReadItem, planner: LoadPlanner) -> tuple[Chunk, torch.Tensor]:
        """The region that an item asks for, and the tensor that gets it."""
        name = item.storage_index.fqn
        meta = opened.catalog.meta(_key(opened, name))
        begin = item.storage_index.offset or (0,) * len(meta.shape)
        offset = tuple(a + b for a, b in zip(begin, item.storage_offsets, strict=True))
        tensor = planner.resolve_tensor(item).detach()
        if tuple(tensor.shape) != tuple(item.lengths):
            raise UsageError(
                f"the planner asks for {tuple(item.lengths)} elements, its tensor has {tuple(tensor.shape)}", key=name
            )
        dtype = dtype_name(tensor.dtype, key=name)
        if dtype != meta.dtype and not self._casts:
            raise UnsupportedError(
                f"it is stored as {meta.dtype}, the state dict has {dtype}",
                key=name,
                hint="give a tensor of that type, or casts=True",
            )
        return Chunk(meta.key, dtype, meta.shape, Box(offset, tuple(item.lengths))), tensor

    def _stream(self, opened: _Opened, item: ReadItem) -> io.BytesIO:
        """The torch stream of an object, for a planner that unpickles it for real.

        It is made of the live value, so it names no class that the checkpoint alone knows of; a stand-in stays one.
        """
        name = item.storage_index.fqn
        found = opened.catalog.objects.get(_key(opened, name))
        if found is None:
            raise UsageError("it is a tensor in the checkpoint, but no tensor in the state dict", key=name)
        stream = io.BytesIO()
        torch.save(bridge.live_value(found.value, opened.catalog, opened.store, key=name), stream)
        stream.seek(0)
        return stream


class CkptLoadPlanner(DefaultLoadPlanner):
    """torch's own planner, whose errors about missing keys name similar ones."""

    def create_local_plan(self) -> LoadPlan:
        """As torch's.

        Raises:
            MissingShardError: the checkpoint lacks a key, and partial loads were not allowed.
        """
        there = self.metadata.state_dict_metadata
        lacking = [name for name in self.state_dict if name not in there]
        if lacking and not self.allow_partial_load and not _is_of_old_torch(self, there):
            raise _missing(lacking[0], list(there), n_more=len(lacking) - 1)
        return super().create_local_plan()


def _is_of_old_torch(planner: DefaultLoadPlanner, there: Mapping[str, object]) -> bool:
    """Whether a key may be spelled otherwise there, which torch's planner finds out: lists have been, before 2.4."""
    return planner.flatten_state_dict and any(
        name not in there and any(isinstance(part, int) for part in path) for name, path in planner.mappings.items()
    )


def _new_id() -> str:
    return str(uuid.uuid4())


def _named(catalog: Catalog, *, prefix: str, root: str) -> tuple[dict[str, str], dict[str, tuple[str | int, ...]]]:
    """(name that torch sees → key, name → path) of all tensors and objects below ``root``.

    Raises:
        UsageError: there is nothing below it.
    """
    before = tuple(prefix.removesuffix(".").split(".")) if prefix else ()
    keys: dict[str, str] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for key, path in dcp.paths_of(catalog).items():
        name = key
        if root:
            if not key.startswith(f"{root}."):
                continue
            name = key[len(root) + 1 :]
            path = path[1:] if path[0] == root else (name,)
        keys[prefix + name] = key
        paths[prefix + name] = (*before, *path)
    if root and not keys:
        first = dict.fromkeys(key.partition(".")[0] for key in (*catalog.tensors, *catalog.objects))
        raise UsageError(f"the checkpoint has no entry {root!r}", hint=f"there are: {', '.join(list(first)[:8])}")
    return keys, paths


def _tensor_metadata(catalog: Catalog, key: str) -> TensorStorageMetadata:
    meta = catalog.meta(key)
    size = torch.Size(meta.shape)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=torch_dtype(meta.dtype)),
        size=size,
        chunks=[ChunkStorageMetadata(offsets=torch.Size((0,) * len(size)), sizes=size)],
    )


def _key(opened: _Opened, name: str) -> str:
    """The key of the catalog for a name that torch asks for.

    Raises:
        MissingShardError: there is none.
    """
    key = opened.key_of.get(name)
    if key is None:
        raise _missing(name, list(opened.key_of))
    return key


def _missing(name: str, there: Sequence[str], *, n_more: int = 0) -> MissingShardError:
    """The error about a key that the checkpoint lacks."""
    near = get_close_matches(name, there, n=3, cutoff=0.7)
    tail = name.partition(".")[2]
    near += [other for other in there if other.endswith(f".{name}") or (tail and other == tail)][:3]
    hint = f"similar ones there: {', '.join(dict.fromkeys(near))}" if near else f"there are: {', '.join(there[:5])}"
    more = f", nor {n_more} others" if n_more else ""
    return MissingShardError(
        f"the checkpoint has no such entry{more}", key=name, hint=f"{hint}; prefix=, root= and names= change the names"
    )


def _by_dtype(wanted: Sequence[tuple[Chunk, torch.Tensor]]) -> Iterator[list[tuple[Chunk, torch.Tensor]]]:
    """All that is wanted in one group or, if one tensor is wanted in several dtypes, in a group for each dtype."""
    dtypes: dict[str, set[str]] = {}
    for chunk, _ in wanted:
        dtypes.setdefault(chunk.key, set()).add(chunk.dtype)
    if all(len(found) == 1 for found in dtypes.values()):
        yield list(wanted)
        return
    for dtype in dict.fromkeys(chunk.dtype for chunk, _ in wanted):
        yield [(chunk, tensor) for chunk, tensor in wanted if chunk.dtype == dtype]
