"""Hugging Face directories with weights in torch files: one ``pytorch_model.bin`` or its shards.

On disk, one of::

    pytorch_model-00001-of-00002.bin     a torch file each (zip, or the format before torch 1.6):
    pytorch_model-00002-of-00002.bin     {name: tensor}
    pytorch_model.bin.index.json         {"metadata": {"total_size": bytes},
                                          "weight_map": {name: file}}
    config.json  tokenizer.json …        carried, see ``huggingface.files``

    pytorch_model.bin                    one torch file, which may be nested
    config.json …                        or, if saved by accelerate: optimizer.bin  scheduler.bin
                                         random_states_0.pkl …, and further
                                         models, see ``trainer.torch_models``

There are other stems (``adapter_model``, ``diffusion_pytorch_model``). Shards must contain exactly
the tensors that the index lists. Without an index, a complete numbered series is one checkpoint.
The tensors of a shard are at the top level; other values there are objects. Tensors that share
their bytes within a shard are tied.

A single file passed as the source has the format ``torch``.

Facets: ``WeightFileFacts``, whose ``stem`` is the name of the same weights as safetensors
(``model``, ``adapter_model`` …); for a single file also those of ``torch.format``.

Versions: the same as for ``torch.format``. Read only: Hugging Face writes safetensors now.

Source: transformers 4.30 to 4.57 (``save_pretrained(safe_serialization=False)``,
``load_sharded_checkpoint``), huggingface_hub 2.4 ``serialization``; hf/llama/bin_sharded and
hf/qwen2_tied/bin_sharded in tests/golden.

Not supported, refused by name: shards that nest tensors in containers, several indexes or series.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog, StoredObject, catalog_of_arrays
from core.engine.catalog.dropped import Dropped, dropped_together
from core.engine.catalog.facets import TrainingState, WeightFileFacts
from core.engine.catalog.stored import StoredArray, renamed
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    Report,
    UnsupportedError,
    list_some,
    raising,
)
from core.formats.format import Format
from core.formats.huggingface.files import list_module_folders, with_carried
from core.formats.huggingface.index import (
    STALE_INDEX_HINT,
    WeightIndex,
    describe_unread_single,
    list_indexed,
    read_index,
)
from core.formats.missing_entries import report_missing
from core.formats.torch.format import read_file_catalog
from core.formats.torch.stream import SUFFIXES
from core.formats.torch.tree import parse
from core.formats.trainer.state import with_training_state
from core.formats.trainer.torch_models import torch_models, with_torch_models
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping, walk
from core.pickle.nesting import LeafEntry, map_leaves
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

INDEX_SUFFIX = ".bin.index.json"
SINGLE_FILES = (
    "pytorch_model.bin",
    "adapter_model.bin",
    "diffusion_pytorch_model.bin",
    "pytorch_model_fsdp.bin",
)
"""The last one is written by accelerate, for FSDP with full state dicts."""
_SHARD = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})\.bin", re.DOTALL)
_COPY_AGAIN = "copy the checkpoint again, with all its files"
_MIXED = "files from two checkpoints may be mixed; copy one checkpoint into an empty directory"


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
    """Return whether a directory has an index, numbered shards, or a single file to read."""
    if store.entry is not None:
        return store.entry.endswith(INDEX_SUFFIX)
    names = store.files()
    if any(name.endswith(INDEX_SUFFIX) or _SHARD.fullmatch(name) for name in names):
        return True
    return _single_file(names) is not None


def _single_file(names: Sequence[str]) -> str | None:
    """Return the first of ``SINGLE_FILES`` among the names, or None."""
    return next((name for name in SINGLE_FILES if name in names), None)


def read(store: ReadStore) -> Catalog:
    """Read the catalog of a directory.

    Raises:
        MissingShardError: a shard, or a tensor that the index lists, is missing.
        CorruptError, TruncatedError: the index or a shard is damaged; a tensor is not listed, or in
            two shards.
        UnsupportedError: the directory has none of these files or several checkpoints, or a shard
            is not a dict of tensors.
        UnsafeError: a pickle is hostile, or the index lists a file outside the directory.
    """
    # Shards take precedence over a single file.
    shards = shards_of(store)
    if shards is None:
        name = _single_file(store.files())
        if name is None:
            raise UnsupportedError("the directory has no pytorch_model.bin", file=store.label)
        catalog = replace(read_file_catalog(store, name), format="torch_bin")
        used, stem = {name}, name.removesuffix(".bin")
        catalog = catalog.noted(
            f"{name} was read, as transformers does, because {index} lists files that are missing"
            for index in store.files()
            if index.endswith(INDEX_SUFFIX)
        )
        if name == SINGLE_FILES[0]:
            catalog = with_torch_models(catalog, store)
            used |= {*torch_models(store).values()}
    else:
        catalog = _ShardMerger(store, shards).catalog()
        used, stem = set(shards.names), shards.stem

    # Add the small files, and note the torch files that are not part of the checkpoint.
    catalog = with_training_state(catalog, store, is_ordered=True)
    state = catalog.facet(TrainingState) or TrainingState()
    used |= {*state.files.values()}
    unread = [name for name in store.files() if name.endswith(SUFFIXES) and name not in used]
    single = SINGLE_FILES[0]
    if shards is not None and shards.index is not None and single in unread:
        unread.remove(single)
        catalog = catalog.noted([describe_unread_single(single, shards.index.file)])
    notes = [f"these files were not read: {list_some(unread, 4)}"] if unread else []
    catalog = with_carried(catalog, store).noted(notes)
    if shards is not None and shards.index is not None:
        catalog = replace(catalog, attributes=shards.index.attributes)
    facts = catalog.facet(WeightFileFacts) or WeightFileFacts()
    stem = "model" if stem.startswith("pytorch_model") else stem
    return catalog.with_facet(replace(facts, stem=stem))


def salvage(store: ReadStore, report: Report) -> Catalog:
    """Read the shards, and what can be read of damaged ones.

    Args:
        store: the directory.
        report: receives the error of every shard that is damaged or missing.

    Raises:
        CheckpointingException: it is unclear which shards to read, or there are none.
    """
    shards = shards_of(store, report)
    if shards is None:
        raise MissingShardError("the directory has no shards", file=store.label)
    return _ShardMerger(store, shards).salvaged(report)


def shards_of(store: ReadStore, report: Report = raising) -> Shards | None:
    """Return the shards of a directory after checking that all exist.

    Args:
        store: the directory.
        report: receives an error for each missing shard; raises it by default.

    Returns:
        None if the directory has neither an index nor numbered files, or has one file with all
        tensors next to an index whose shards are missing.

    Raises:
        MissingShardError: a shard is missing (default ``report``).
        CorruptError: the index is malformed.
        UnsupportedError: there are several indexes or series, so it is unclear which to read.
        UnsafeError: the index lists a file outside the directory.
    """
    names = store.files()
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if store.entry is not None:
        indexes = [store.entry]
    if len(indexes) > 1:
        raise UnsupportedError(
            f"the directory has {len(indexes)} index files: {list_some(indexes)}",
            file=store.label,
            hint="pass one of them as the source",
        )
    if not indexes:
        return _numbered_shards(names, store.label, report)

    # Name the first tensor of a missing shard.
    file = indexes[0]
    index = read_index(store, file)
    first_keys: dict[str, str] = {}
    for key, name in index.file_of.items():
        first_keys.setdefault(name, key)
    missing = [name for name in first_keys if not store.exists(name)]
    if missing and store.entry is None and _single_file(names) not in (None, *first_keys):
        return None  # loaders look for one file with all tensors first
    for name in missing:
        message = f"a shard listed in {file} is missing"
        report(MissingShardError(message, file=name, key=first_keys[name], hint=_COPY_AGAIN))
    return Shards(
        tuple(sorted(first_keys.keys() - set(missing))), file.removesuffix(INDEX_SUFFIX), index
    )


def _numbered_shards(names: Sequence[str], label: str, report: Report) -> Shards | None:
    """Return the numbered shards of a directory without an index; None if there are none.

    Args:
        report: receives the error if a number is missing.

    Raises:
        UnsupportedError: there are several series.
    """
    matches = [match for match in map(_SHARD.fullmatch, names) if match]
    if not matches:
        return None
    series = sorted({(match[1], match[3]) for match in matches})
    if len(series) > 1:
        (stem, total), (other_stem, other_total) = series[:2]
        raise UnsupportedError(
            f"the directory has two series of shards, {stem}-*-of-{total}.bin and "
            f"{other_stem}-*-of-{other_total}.bin, but no index",
            file=label,
            hint="remove the files that do not belong to the checkpoint",
        )
    stem, total = series[0]
    numbers = {int(match[2]) for match in matches}
    missing = next((number for number in range(1, int(total) + 1) if number not in numbers), None)
    if missing is not None:
        report(
            MissingShardError(
                f"only {len(matches)} of {int(total)} shards are present",
                file=f"{stem}-{missing:0{len(total)}d}-of-{total}.bin",
                hint=_COPY_AGAIN,
            )
        )
    return Shards(tuple(sorted(match[0] for match in matches)), stem)


class _ShardMerger:
    """Builder of one catalog from the content of all shards."""

    def __init__(self, store: ReadStore, shards: Shards) -> None:
        self._store = store
        self._shards = shards
        self._arrays: dict[str, StoredArray] = {}
        self._hidden: dict[str, StoredArray] = {}
        self._objects: dict[str, StoredObject] = {}
        self._skeleton: dict[object, object] = {}
        self._shard_of: dict[object, str] = {}
        self._notes: list[str] = []
        self._dropped: list[Dropped] = []
        self._versions: set[str] = set()

    def catalog(self) -> Catalog:
        """Read all shards and build their catalog.

        Raises:
            CorruptError, MissingShardError, UnsupportedError: shards contradict each other or the
                index, see ``read``.
        """
        self._store.expect_headers(self._shards.names)
        for name in self._shards.names:
            self._add_shard(name)
        self._check_index()
        return self._build()

    def salvaged(self, report: Report) -> Catalog:
        """Read the shards, damaged ones as far as possible, and build their catalog.

        Raises:
            CorruptError: two entries have the same key.
        """
        for name in self._shards.names:
            try:
                self._add_shard(name, report)
            except CheckpointingException as err:
                report(err)
        return self._build()

    def _build(self) -> Catalog:
        """Build the catalog of the shards that were added.

        Raises:
            CorruptError: two entries have the same key.
        """
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
            catalog,
            notes=tuple(self._notes),
            dropped=tuple(self._dropped),
        )

    def _add_shard(self, shard: str, report: Report = raising) -> None:
        """Read one shard and add its content.

        Args:
            report: as for ``parse``.

        Raises:
            CorruptError: an entry is also in another shard, or the index lists it elsewhere.
            UnsupportedError: the shard is not a dict of tensors and values by name.
        """
        # Keys of hidden tensors are unique only within a file, so all get the shard's name as a
        # prefix. Entries lose it again; tensors inside objects keep it, as they are hidden.
        prefix = f"{shard}:"
        tree = parse(self._store, shard, prefix=prefix, report=report)

        def plain(key: str) -> str:
            return key.removeprefix(prefix)

        def with_plain_key(entry: LeafEntry) -> object:
            if isinstance(entry.leaf, (TensorLeaf, ObjectLeaf)):
                return replace(entry.leaf, key=plain(entry.leaf.key))
            return entry.leaf

        # Check and add the top level.
        tensors = {plain(key) for key in tree.arrays}
        root = as_mapping(map_leaves(tree.value, with_plain_key))
        if root is None:
            raise UnsupportedError("the shard does not contain a dict of tensors", file=shard)
        for name, value in root.items():
            self._check_entry(shard, name, value, tensors)
            self._shard_of[name] = shard
            self._skeleton[name] = value

        # Add tensors and objects. Objects nested in containers may have equal keys in two shards.
        self._arrays |= renamed(tree.arrays, {key: plain(key) for key in tree.arrays})
        self._hidden |= tree.hidden
        for key, item in tree.objects.items():
            if plain(key) in self._objects:
                raise CorruptError(
                    "another shard also has an entry with this key",
                    file=shard,
                    key=plain(key),
                    hint=_MIXED,
                )
            self._objects[plain(key)] = replace(item, key=plain(key))
        self._notes += [note.replace(prefix, "") for note in tree.notes]
        for entry in tree.dropped:
            self._dropped += dropped_together(map(plain, entry.names), entry.reason)
        if tree.version is not None:
            self._versions.add(tree.version)

    def _check_index(self) -> None:
        """Check that every entry that the index lists exists; note a wrong total size.

        Raises:
            MissingShardError: an entry is missing.
        """
        index = self._shards.index
        if index is None:
            self._notes.append("there is no index, but all numbered shards are present")
            return
        for key, name in index.file_of.items():
            if key not in self._shard_of:
                report_missing(
                    MissingShardError(
                        f"{index.file} lists the tensor in this shard, but it is missing there",
                        file=name,
                        key=key,
                        hint=STALE_INDEX_HINT,
                    )
                )
        # The recorded size may count tied tensors once or several times.
        n_bytes = sum(array.n_bytes for array in self._arrays.values())
        own_bytes = sum({id(array): array.n_bytes for array in self._arrays.values()}.values())
        if index.total_bytes not in (None, n_bytes, own_bytes):
            self._notes.append(
                f"the tensors add up to {n_bytes} bytes, but total_size in {index.file} is "
                f"{index.total_bytes}"
            )

    def _check_entry(
        self, shard: str, name: object, value: object, tensors: Container[str]
    ) -> None:
        """Check an entry at the top level of a shard.

        Args:
            shard: name of the shard.
            name, value: the entry; a tensor, or a value that contains no tensors.
            tensors: keys of the shard's tensors.

        Raises:
            CorruptError: the entry is also in another shard, or the index does not list it in this
                one.
            UnsupportedError: the name is not a string, or the entry nests tensors.
        """
        is_tensor = isinstance(value, TensorLeaf)
        if not isinstance(name, str) or (isinstance(value, TensorLeaf) and value.key != name):
            raise UnsupportedError(
                f"the shard has an entry with an invalid name: {str(name)[:80]!r}", file=shard
            )
        if not is_tensor and any(
            isinstance(node, TensorLeaf) and node.key in tensors for node in walk(value)
        ):
            raise UnsupportedError(
                "the entry contains nested tensors, which sharded checkpoints do not support",
                file=shard,
                key=name,
                hint="pass only this shard as the source",
            )
        if name in self._shard_of:
            raise CorruptError(
                f"the entry is also in {self._shard_of[name]}", file=shard, key=name, hint=_MIXED
            )

        # The index must list every tensor, but need not list other entries.
        index = self._shards.index
        if index is None:
            return
        listed_shard = index.file_of.get(name)
        if listed_shard is None and is_tensor:
            raise CorruptError(
                f"{index.file} does not list the tensor",
                file=shard,
                key=name,
                hint=STALE_INDEX_HINT,
            )
        if listed_shard not in (None, shard):
            raise CorruptError(
                f"{index.file} lists the entry in {listed_shard}, not in this file",
                file=shard,
                key=name,
                hint=STALE_INDEX_HINT,
            )


FORMAT = Format(
    name="torch_bin",
    title="Hugging Face pytorch_model.bin",
    sniff=sniff,
    read=read,
    salvage=salvage,
    lay_out=None,
    has_live_objects=True,
    has_hf_config=True,
    own_folders=list_module_folders,
    list_indexed=list_indexed,
)
