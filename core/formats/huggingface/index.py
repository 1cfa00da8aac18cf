"""Indexes of sharded Hugging Face weights: the file of each tensor.

On disk, ``model.safetensors.index.json`` or ``pytorch_model.bin.index.json``::

    {"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}

Other members of the metadata are attributes of the index (``core.engine.catalog.attributes``),
except the number of parameters, which also follows from the tensors.

The index of a weight update between trainer and rollout engine says that the files hold
compressed differences of bytes, which have the names of the tensors, but not their types and
shapes (``WeightDeltas``)::

    {"metadata": {"version": "000002", "base_version": "000001", "delta_encoding": "xor",
                  "compression_format": "zstd", "checksum_format": "xxh3-128"}, "weight_map": {…}}

Source: transformers 4.30 to 5.23 and huggingface_hub 2.4; slime
``update_weight_from_disk_delta.py`` (2026-08).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field
from typing import TYPE_CHECKING

from core.engine.catalog.facets import WeightDeltas
from core.errors import CheckpointingException, CorruptError
from core.files.json_object import read_json_object
from core.files.store import check_name
from core.pickle.fields import int_or_none, mapping_or_empty
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

INDEX_SUFFIX = ".index.json"
_WITHOUT_INDEX = (
    "remove the index (ckpt reads shards numbered from 1 to n without it, and a conversion writes "
    "a new index)"
)
_COPY_INDEX = f"copy the index again from its source, or {_WITHOUT_INDEX}"
STALE_INDEX_HINT = (
    "files from two checkpoints may be mixed, so copy one checkpoint into an empty directory; if "
    f"the shards are right, {_WITHOUT_INDEX}"
)
"""The hint for shards and an index that contradict each other."""
_OF_THE_TENSORS = ("total_size", "total_parameters")
"""Members of the metadata that follow from the tensors."""


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """The content of an index.

    Args:
        file: name of the index.
        file_of: tensor → file.
        total_bytes: size of all tensors as recorded in the index; None if it is missing.
        deltas: what the files hold instead of weights; None for weights.
        metadata: the metadata that do not follow from the tensors.
    """

    file: str
    file_of: dict[str, str]
    total_bytes: int | None
    deltas: WeightDeltas | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)

    @property
    def attributes(self) -> dict[str, Mapping[str, object]]:
        """The metadata as attributes of the index, by its name."""
        return {self.file: self.metadata} if self.metadata else {}


def list_indexed(store: ReadStore) -> set[str]:
    """Return the files that the indexes of a directory list, as far as these can be read."""
    listed: set[str] = set()
    for name in store.files():
        if name.endswith(".json") and ".index." in name:
            with suppress(CheckpointingException):
                listed.update(read_index(store, name).file_of.values())
    return listed


def read_index(store: ReadStore, file: str, *, suffix: str = "") -> WeightIndex:
    """Read an index and check its file names.

    Args:
        store, file: the directory and the name of the index in it.
        suffix: suffix that all file names in the index must have.

    Raises:
        CorruptError: the index is not a JSON object with a ``weight_map`` of strings, or lists
            another kind of file.
        UnsafeError: the index lists a file outside the directory.
        MissingShardError: the index does not exist.
    """
    content = read_json_object(store, file)
    weight_map = content.get("weight_map")
    facts = mapping_or_empty(content.get("metadata"))
    deltas = None
    if "delta_encoding" in facts:
        names = ("version", "base_version", "delta_encoding", "compression_format")
        deltas = WeightDeltas(*(str(facts.get(name, "?"))[:40] for name in names))
    # An update in which nothing has changed lists no tensor.
    if not isinstance(weight_map, dict) or not (weight_map or deltas):
        raise CorruptError(
            "the index has no weight_map, which maps tensors to files",
            file=file,
            hint=_COPY_INDEX,
        )
    # Loaders join a name to the directory, so that ./NAME is the same file.
    file_of = {
        key: check_name(name[2:] if str(name).startswith("./") else name, found_in=file)
        for key, name in weight_map.items()
    }
    for key, name in file_of.items():
        if not name.endswith(suffix):
            kind = suffix.removeprefix(".")
            raise CorruptError(
                f"the index lists the tensor in {name!r}, which is not a {kind} file",
                file=file,
                key=key,
                hint=_COPY_INDEX,
            )
    # Some versions of transformers wrote the size as a float.
    total = facts.get("total_size")
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    others = {name: value for name, value in facts.items() if name not in _OF_THE_TENSORS}
    return WeightIndex(file, file_of, int_or_none(total), deltas, others)


def describe_unread_single(single: str, index: str) -> str:
    """Return the note on a file with all tensors beside an index whose shards are complete."""
    return (
        f"{single} was not read, because {index} does not list it, but transformers loads it "
        f"instead of the shards; to read {single}, pass that file itself"
    )
