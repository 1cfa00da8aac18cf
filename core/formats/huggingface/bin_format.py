"""Hugging Face directories with weights in torch files: one ``pytorch_model.bin``, or shards of it.

On disk, one of::

    pytorch_model-00001-of-00002.bin        a torch file each (zip, or a stream of before torch 1.6): {name: tensor}
    pytorch_model-00002-of-00002.bin
    pytorch_model.bin.index.json            {"metadata": {"total_size": bytes}, "weight_map": {name: file}}
    config.json  tokenizer.json …           carried, see ``huggingface.files``

    pytorch_model.bin                       one torch file, which may nest
    config.json …  or, as accelerate saves it: optimizer.bin  scheduler.bin  random_states_0.pkl …

The stem may be another (``adapter_model``, ``diffusion_pytorch_model``). Shards must hold what the
index says and nothing else. Without an index, a complete series of numbers is taken for one
checkpoint. A shard holds tensors at its top; other values there are objects. Tensors of one shard
that share their bytes still do.

A single file that is pointed at is of the format ``torch``.

Facets: ``WeightFileFacts``, whose ``stem`` is how the same weights are called in safetensors
(``model``, ``adapter_model`` …); of a single file also those of ``torch.format``.

Versions: as for ``torch.format``. Read only: Hugging Face writes safetensors now.

Source: transformers 4.30 to 4.57 (``save_pretrained(safe_serialization=False)``,
``load_sharded_checkpoint``), huggingface_hub 2.4 ``serialization``; hf/llama/bin_sharded and
hf/qwen2_tied/bin_sharded in tests/golden.

Not supported, refused by name: shards that nest tensors in containers, several indexes or series.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from core.catalog.catalog import Catalog, StoredObject, catalog_of_arrays
from core.catalog.facets import WeightFileFacts
from core.catalog.stored import StoredArray
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.formats.format import Format, no_folders
from core.formats.huggingface.files import with_carried
from core.formats.huggingface.index import WeightIndex, read_index
from core.formats.torch.format import SUFFIXES, TorchTree, catalog_of, parse
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping, walk
from core.pickle.nesting import LeafEntry, map_leaves

if TYPE_CHECKING:
    from core.files.store import ReadStore

INDEX_SUFFIX = ".bin.index.json"
SINGLE_FILES = (
    "pytorch_model.bin",
    "adapter_model.bin",
    "diffusion_pytorch_model.bin",
    "pytorch_model_fsdp.bin",
)
"""The last one is accelerate's, of FSDP with full state dicts."""
_SHARD = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})\.bin", re.DOTALL)
_COPY_AGAIN = "copy the checkpoint again, with all its files"
_MIXED = "files of two checkpoints may be mixed: copy it again"


@dataclass(frozen=True, slots=True)
class Shards:
    """The files of a sharded checkpoint.

    Args:
        names: the shards, sorted.
        stem: beginning of their names.
        index: the index that lists their entries; None if only their numbers identify them.
    """

    names: tuple[str, ...]
    stem: str
    index: WeightIndex | None = None


def sniff(store: ReadStore) -> bool:
    """Return whether a directory holds an index, numbered shards, or a single file of a usual
    name.
    """
    if store.entry is not None:
        return store.entry.endswith(INDEX_SUFFIX)
    names = store.files()
    if any(name.endswith(INDEX_SUFFIX) or _SHARD.fullmatch(name) for name in names):
        return True
    return _single_file(names) is not None


def _single_file(names: Sequence[str]) -> str | None:
    return next((name for name in SINGLE_FILES if name in names), None)


def read(store: ReadStore) -> Catalog:
    """Read the catalog of a directory.

    Raises:
        MissingShardError: a shard, or a tensor that the index lists, is missing.
        CorruptError, TruncatedError: the index or a shard is damaged; a tensor is not listed, or in
            two shards.
        UnsupportedError: not such a directory, several checkpoints in it, or a shard of another
            form.
        UnsafeError: a pickle is hostile, or the index names a file outside the directory.
    """
    shards = shards_of(store)
    if shards is None:
        name = _single_file(store.files())
        if name is None:
            raise UnsupportedError("the directory holds no pytorch_model.bin", file=store.label)
        catalog = replace(catalog_of(store, name), format="torch_bin")
        used, stem = {name}, name.removesuffix(".bin")
    else:
        catalog = _ShardMerger(store, shards).catalog()
        used, stem = set(shards.names), shards.stem
    unread = [name for name in store.files() if name.endswith(SUFFIXES) and name not in used]
    listed = ", ".join(unread[:4]) + (", …" if len(unread) > 4 else "")
    catalog = with_carried(catalog, store).noted([f"not read: {listed}"] if unread else [])
    return catalog.with_facet(
        WeightFileFacts(stem="model" if stem.startswith("pytorch_model") else stem)
    )


def shards_of(store: ReadStore) -> Shards | None:
    """Return the shards of a directory, all of which exist.

    None if it has neither index nor numbered files.

    Raises:
        MissingShardError: a shard is missing.
        CorruptError: the index is malformed.
        UnsupportedError: there are several indexes or series, so that it is unclear which to read.
        UnsafeError: the index names a file outside the directory.
    """
    names = store.files()
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if store.entry is not None:
        indexes = [store.entry]
    if len(indexes) > 1:
        raise UnsupportedError(
            f"there are {len(indexes)} indexes, {indexes[0]} and {indexes[1]}",
            file=store.label,
            hint="pass one of them as the source",
        )
    return _shards_of_index(store, indexes[0]) if indexes else _numbered_shards(names, store.label)


def _shards_of_index(store: ReadStore, file: str) -> Shards:
    index = read_index(store, file)
    first_of: dict[str, str] = {}
    for key, name in index.file_of.items():
        first_of.setdefault(name, key)
    for name, key in first_of.items():
        if not store.exists(name):
            raise MissingShardError(
                f"a shard named by {file} is missing", file=name, key=key, hint=_COPY_AGAIN
            )
    return Shards(tuple(sorted(first_of)), file.removesuffix(INDEX_SUFFIX), index)


def _numbered_shards(names: Sequence[str], label: str) -> Shards | None:
    matches = [match for match in map(_SHARD.fullmatch, names) if match]
    if not matches:
        return None
    series = sorted({(match[1], match[3]) for match in matches})
    if len(series) > 1:
        (stem, total), (other_stem, other_total) = series[:2]
        raise UnsupportedError(
            f"two series, {stem}-*-of-{total}.bin and {other_stem}-*-of-{other_total}.bin, and no index that names one",
            file=label,
            hint="remove those that do not belong here",
        )
    stem, total = series[0]
    numbers = {int(match[2]) for match in matches}
    missing = next((number for number in range(1, int(total) + 1) if number not in numbers), None)
    if missing is not None:
        raise MissingShardError(
            f"only {len(matches)} of {int(total)} shards found",
            file=f"{stem}-{missing:0{len(total)}d}-of-{total}.bin",
            hint=_COPY_AGAIN,
        )
    return Shards(tuple(sorted(match[0] for match in matches)), stem)


class _ShardMerger:
    """Merges the content of all shards into one catalog."""

    def __init__(self, store: ReadStore, shards: Shards) -> None:
        self._store = store
        self._shards = shards
        self._arrays: dict[str, StoredArray] = {}
        self._hidden: dict[str, StoredArray] = {}
        self._objects: dict[str, StoredObject] = {}
        self._skeleton: dict[object, object] = {}
        self._shard_of: dict[object, str] = {}
        self._aliases: dict[str, str] = {}
        self._unsupported: dict[str, str] = {}
        self._notes: list[str] = []
        self._versions: set[str] = set()

    def catalog(self) -> Catalog:
        """Return the catalog of all shards."""
        for name in self._shards.names:
            self._add_shard(name)
        self._check_index()
        key = next((key for key in self._objects if key in self._arrays), None)
        if key is not None:
            file = None if self._shards.index is None else self._shards.index.file
            raise CorruptError("two entries have the same key", file=file, key=key, hint=_MIXED)
        catalog = catalog_of_arrays(
            format="torch_bin",
            version=", ".join(sorted(self._versions)) or None,
            arrays=self._arrays,
            objects=self._objects,
            hidden=self._hidden,
            skeleton=self._skeleton,
        )
        return replace(
            catalog, aliases=self._aliases, unsupported=self._unsupported, notes=tuple(self._notes)
        )

    def _add_shard(self, shard: str) -> None:
        """Read one shard and add its content.

        Raises:
            UnsupportedError: it is not a dict of tensors and values by name.
            CorruptError: an entry is in another shard as well, or the index places it elsewhere.
        """
        # Keys of hidden tensors are unique in a file only; the prefix makes them so among files.
        prefix = f"{shard}:"
        tree = parse(self._store, shard, prefix=prefix)
        tensors = {key.removeprefix(prefix) for key in tree.arrays}
        root = as_mapping(_without_prefix(tree, prefix))
        if root is None:
            raise UnsupportedError("the shard is not a dict of tensors", file=shard)
        for name, value in root.items():
            self._check_entry(shard, name, value, tensors)
            self._shard_of[name] = shard
            self._skeleton[name] = value
        self._arrays |= {
            key.removeprefix(prefix): replace(array, name=key.removeprefix(prefix))
            for key, array in tree.arrays.items()
        }
        self._hidden |= tree.hidden
        for key, item in tree.objects.items():
            plain = key.removeprefix(prefix)
            if plain in self._objects:
                raise CorruptError(
                    "another shard has an entry with the same key",
                    file=shard,
                    key=plain,
                    hint=_MIXED,
                )
            self._objects[plain] = replace(item, key=plain)
        self._aliases |= {
            key.removeprefix(prefix): first.removeprefix(prefix)
            for key, first in tree.aliases.items()
        }
        self._unsupported |= {
            key.removeprefix(prefix): kind for key, kind in tree.unsupported.items()
        }
        self._notes += [note.replace(prefix, "") for note in tree.notes]
        if tree.version is not None:
            self._versions.add(tree.version)

    def _check_index(self) -> None:
        """Check that every entry that the index lists exists."""
        index = self._shards.index
        if index is None:
            self._notes.append("there is no index; by their numbers, all shards exist")
            return
        for key, name in index.file_of.items():
            if key not in self._shard_of:
                raise MissingShardError(
                    f"{index.file} places the tensor in this shard, but it is not there",
                    file=name,
                    key=key,
                    hint=_MIXED,
                )
        n_bytes = sum(array.n_bytes for array in self._arrays.values())
        shared = sum(self._arrays[key].n_bytes for key in self._aliases)
        if index.total_bytes not in (None, n_bytes, n_bytes - shared):
            self._notes.append(
                f"{index.file} states a total_size of {index.total_bytes} bytes, but the tensors have {n_bytes}"
            )

    def _check_entry(
        self, shard: str, name: object, value: object, tensors: Container[str]
    ) -> None:
        """Check an entry: a tensor or a container without tensors, named once, where the index
        says.
        """
        is_tensor = isinstance(value, TensorLeaf)
        if not isinstance(name, str) or (isinstance(value, TensorLeaf) and value.key != name):
            raise UnsupportedError(
                f"the shard has an entry with the invalid name {str(name)[:80]!r}", file=shard
            )
        if not is_tensor and any(
            isinstance(node, TensorLeaf) and node.key in tensors for node in walk(value)
        ):
            raise UnsupportedError(
                "a container with tensors, but shards hold tensors by name",
                file=shard,
                key=name,
                hint="pass the shard itself to read it alone",
            )
        if name in self._shard_of:
            raise CorruptError(
                f"it is also in {self._shard_of[name]}", file=shard, key=name, hint=_MIXED
            )
        index = self._shards.index
        if index is None:
            return
        listed = index.file_of.get(name)
        if listed is not None and listed != shard:
            raise CorruptError(
                f"{index.file} places it in {listed}", file=shard, key=name, hint=_MIXED
            )
        if listed is None and is_tensor:
            raise CorruptError(
                f"{index.file} does not list the tensor", file=shard, key=name, hint=_MIXED
            )


def _without_prefix(tree: TorchTree, prefix: str) -> object:
    """Return a tree's value with the plain keys of its entries; tensors inside objects keep
    theirs.
    """

    def plain(entry: LeafEntry) -> object:
        leaf = entry.leaf
        if isinstance(leaf, (TensorLeaf, ObjectLeaf)):
            return replace(leaf, key=leaf.key.removeprefix(prefix))
        return leaf

    return map_leaves(tree.value, plain)


FORMAT = Format(
    name="torch_bin",
    title="pytorch_model.bin of Hugging Face",
    sniff=sniff,
    read=read,
    lay_out=None,
    has_live_objects=True,
    own_folders=no_folders,
)
