"""DCP's metadata classes as inert records, for two readers: ``core.pickle.reader`` and the C unpickler.

A record is a list that gets the state of its object as its only element. The method by which both readers set the
state is ``list.append``, so that no Python code runs per record.

Source: torch 1.13 to 2.13, module paths as in docs/facts/safety.md 2.1.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import re
from typing import Any

from core.arrays.dtypes import DTYPES
from core.errors import CorruptError, UnsafeError
from core.pickle import reader as safe_pickle
from core.pickle.inert import Global


class Record(list[Any]):
    """An instance of one of DCP's classes: a list that gets the state as its only element.

    The method by which both readers set the state is list.append, so that no Python code runs per record.
    """

    __slots__ = ()
    __setstate__ = list.append
    build = list.append
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class Root(Record):
    """Metadata."""

    __slots__ = ()


class Tensor(Record):
    """TensorStorageMetadata."""

    __slots__ = ()


class Bytes(Record):
    """BytesStorageMetadata."""

    __slots__ = ()


class Chunk(Record):
    """ChunkStorageMetadata."""

    __slots__ = ()


class Index(Record):
    """MetadataIndex; hashed by identity, as its state comes later."""

    __slots__ = ()


class Properties(Record):
    """TensorProperties."""

    __slots__ = ()


class Storage(Record):
    """_StorageInfo."""

    __slots__ = ()


class HfStorage(Record):
    """_HFStorageInfo."""

    __slots__ = ()


class Other(Record):
    """Anything else; what it is made of is forgotten."""

    __slots__ = ()

    def __new__(cls, *args: object, **kwargs: object) -> Other:
        return list.__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()


_CLASSES: dict[str, type[Record]] = {
    "Metadata": Root,
    "MCoreMetadata": Root,
    "TensorStorageMetadata": Tensor,
    "BytesStorageMetadata": Bytes,
    "ChunkStorageMetadata": Chunk,
    "MetadataIndex": Index,
    "TensorProperties": Properties,
    "_StorageInfo": Storage,
    "_HFStorageInfo": HfStorage,
    "StorageMeta": Record,
    "SavePlan": Record,
    "MCoreSavePlan": Record,
    "WriteItem": Record,
    "TensorWriteData": Record,
    "BytesIOWriteData": Record,
}
_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint._hf_utils",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed._shard.sharded_tensor.metadata",
    "torch.distributed._shard.checkpoint.metadata",
    "torch.distributed._shard.checkpoint.filesystem",
    "megatron.core.dist_checkpointing.strategies.torch",
)
_KNOWN: dict[tuple[str, str], Any] = {(module, name): kind for module in _MODULES for name, kind in _CLASSES.items()}


_HOOKS = _KNOWN | {
    ("torch.serialization", "_get_layout"): lambda *args: args[0] if len(args) == 1 else NotImplemented,
}
_FOUND: dict[tuple[str, str], Any] = {
    **_KNOWN,
    **{("torch", name): Global("torch", name) for name in DTYPES},
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
}


def read_by_machine(data: bytes, *, label: str) -> object:
    """The record tree of a pickle, by the hardened reader.

    Raises:
        CorruptError, UnsafeError: those of ``core.pickle.reader.load``.
    """
    limits = safe_pickle.PickleLimits(max_depth=None)
    return safe_pickle.load(data, label=label, hooks=_HOOKS, persistent_load=_refuse_persistent, limits=limits)


def _refuse_persistent(value: object) -> object:
    raise CorruptError("the pickle uses a persistent id, which no .metadata needs")


class _Member(Other):
    """What ``getattr`` gives: a member of an enum, as Python 3.11 writes it; anything else is for the other reader."""

    __slots__ = ()

    def __new__(cls, *args: object, **kwargs: object) -> _Member:
        if len(args) != 2 or type(args[1]) is not str or not _MEMBER.fullmatch(args[1]):
            raise CorruptError("getattr is called for something else than a member of an enum")
        return list.__new__(cls)


_MEMBER = re.compile(r"[A-Z][A-Z0-9_]*")


class _Unpickler(pickle.Unpickler):
    """The C unpickler that knows only inert classes.

    Attributes:
        others: names of other things.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.others: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        """A class of this module, whatever the name."""
        found = _FOUND.get((module, name))
        if found is not None:
            return found
        if (module, name) == ("builtins", "getattr"):
            return _Member
        if len(self.others) > safe_pickle.DEFAULT_LIMITS.max_names:
            raise UnsafeError("the metadata name too many classes and functions")
        self.others.add((module, name))
        return Other


def read_by_c(data: bytes) -> tuple[object, set[tuple[str, str]]]:
    """The record tree of a pickle, by the C unpickler, and the (module, name) of all that is none of the records.

    Only for a contained process (``core.files.sandbox``).

    Empties the extension registry of the process. Any exception may come out.
    """
    copyreg.clear_extension_cache()
    copyreg._inverted_registry.clear()  # type: ignore[attr-defined]
    file = io.BufferedReader(io.BytesIO(data), 1 << 20)
    reader = _Unpickler(file)
    root = reader.load()
    if file.tell() != len(data):
        raise CorruptError("bytes follow the end of the pickle")
    return root, reader.others
