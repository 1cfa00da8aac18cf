"""DCP's metadata classes as inert records, for ``core.pickle.reader`` and the C unpickler.

A record is a list whose only element is the state of the object. Both readers set the state with
``list.append``, so that no Python code runs per record.

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

FAST_FROM_BYTES = 1 << 20
"""Smaller files are not worth a child process with the C unpickler."""


class DcpRecord(list[Any]):
    """An instance of one of DCP's classes: a list whose only element is the object's state."""

    __slots__ = ()
    # The C unpickler calls the first, core.pickle.reader the second; list.append is C code.
    __setstate__ = list.append
    build = list.append
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class RootRecord(DcpRecord):
    """A record of Metadata."""

    __slots__ = ()


class TensorRecord(DcpRecord):
    """A record of TensorStorageMetadata."""

    __slots__ = ()


class BytesRecord(DcpRecord):
    """A record of BytesStorageMetadata."""

    __slots__ = ()


class ChunkRecord(DcpRecord):
    """A record of ChunkStorageMetadata."""

    __slots__ = ()


class IndexRecord(DcpRecord):
    """A record of MetadataIndex; hashed by identity, as its state is set later."""

    __slots__ = ()


class PropertiesRecord(DcpRecord):
    """A record of TensorProperties."""

    __slots__ = ()


class StorageRecord(DcpRecord):
    """A record of _StorageInfo."""

    __slots__ = ()


class HfStorageRecord(DcpRecord):
    """A record of _HFStorageInfo."""

    __slots__ = ()


class OtherRecord(DcpRecord):
    """A record of any other object, whose content is dropped."""

    __slots__ = ()

    def __new__(cls, *args: object, **kwargs: object) -> OtherRecord:
        return list.__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()


_CLASSES: dict[str, type[DcpRecord]] = {
    "Metadata": RootRecord,
    "MCoreMetadata": RootRecord,
    "TensorStorageMetadata": TensorRecord,
    "BytesStorageMetadata": BytesRecord,
    "ChunkStorageMetadata": ChunkRecord,
    "MetadataIndex": IndexRecord,
    "TensorProperties": PropertiesRecord,
    "_StorageInfo": StorageRecord,
    "_HFStorageInfo": HfStorageRecord,
    "StorageMeta": DcpRecord,
    "SavePlan": DcpRecord,
    "MCoreSavePlan": DcpRecord,
    "WriteItem": DcpRecord,
    "TensorWriteData": DcpRecord,
    "BytesIOWriteData": DcpRecord,
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
_KNOWN: dict[tuple[str, str], Any] = {
    (module, name): kind for module in _MODULES for name, kind in _CLASSES.items()
}


# A layout is pickled as a call of _get_layout with its name; the record is the name.
_HOOKS = _KNOWN | {
    ("torch.serialization", "_get_layout"): lambda *args: (
        args[0] if len(args) == 1 else NotImplemented
    ),
}
_FIND_CLASS: dict[tuple[str, str], Any] = {
    **_KNOWN,
    **{("torch", name): Global("torch", name) for name in DTYPES},
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
}


def parse_by_machine(data: bytes, *, label: str) -> object:
    """Parse a pickle into its record tree with the hardened reader.

    Raises:
        CorruptError, UnsafeError: the pickle is damaged, uses persistent ids, or exceeds a limit.
    """
    limits = safe_pickle.PickleLimits(max_depth=None)
    return safe_pickle.load(
        data, label=label, hooks=_HOOKS, persistent_load=_refuse_persistent, limits=limits
    )


def _refuse_persistent(value: object) -> object:
    """Raise CorruptError for a persistent id."""
    raise CorruptError(
        "the pickle contains a persistent ID, which DCP metadata never does",
        hint="this is not the checkpoint's .metadata (it may be a torch.save file); copy the "
        ".metadata that was saved with these .distcp files",
    )


class _EnumMember(OtherRecord):
    """Stand-in for ``getattr``, by which Python 3.11 pickles the member of an enum.

    Any other call is refused.
    """

    __slots__ = ()

    def __new__(cls, *args: object, **kwargs: object) -> _EnumMember:
        if len(args) != 2 or type(args[1]) is not str or not _MEMBER.fullmatch(args[1]):
            raise CorruptError("the pickle calls getattr for something other than an enum member")
        return list.__new__(cls)


_MEMBER = re.compile(r"[A-Z][A-Z0-9_]*")


class _RecordUnpickler(pickle.Unpickler):
    """A C unpickler that only ever returns inert classes.

    Attributes:
        others: (module, name) of every class and function that is not DCP's.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.others: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        """Return an inert stand-in for a class or function.

        Raises:
            UnsafeError: the pickle names too many that are not DCP's.
        """
        known_class = _FIND_CLASS.get((module, name))
        if known_class is not None:
            return known_class
        if (module, name) == ("builtins", "getattr"):
            return _EnumMember
        if len(self.others) > safe_pickle.DEFAULT_LIMITS.max_names:
            raise UnsafeError("the metadata refers to too many classes and functions")
        self.others.add((module, name))
        return OtherRecord


def parse_by_c(data: bytes) -> tuple[object, set[tuple[str, str]]]:
    """Parse a pickle into its record tree with the C unpickler.

    Call it only in a sandboxed process (``core.files.sandbox``): it empties the extension registry
    of the process, and any exception may occur.

    Returns:
        The root, and (module, name) of every class and function in the pickle that is not DCP's.
    """
    # Extension codes would return registered callables without asking find_class.
    copyreg.clear_extension_cache()
    copyreg._inverted_registry.clear()  # type: ignore[attr-defined]
    file = io.BufferedReader(io.BytesIO(data), 1 << 20)
    reader = _RecordUnpickler(file)
    root = reader.load()
    if file.tell() != len(data):
        raise CorruptError("the file has extra bytes after the end of the pickle")
    return root, reader.others
