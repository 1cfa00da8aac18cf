"""Training state next to the weights: read as entries of the same checkpoint.

On disk, as transformers' Trainer (``checkpoint-N``) and accelerate's ``save_state`` write it::

    checkpoint-500/
    ├── model.safetensors              the weights, in a format of their own: safetensors (one file
    │                                  or shards), pytorch_model.bin, FSDP's DCP directories
    ├── optimizer.pt                   → optimizer.state.<parameter>.exp_avg …,
    │                                    optimizer.param_groups.0.lr …
    ├── scheduler.pt                   → scheduler, one object for each of the other files
    └── rng_state_0.pth …              → rng_state_0 …

All names are below. Weights keep their names. The numbers of an optimizer's parameters become
names where those are certain (``optimizer``); a note says which. Objects are read when they are
needed, like those of DCP.

Facet: ``TrainingState``. Formats that store weights only leave these entries out, with a note
(``core.verbs.convert.report.training_state``).

Second and further models of accelerate (``model_1.safetensors``, ``torch_models``) have entries
``model_1.…`` and the optimizers ``optimizer_1``.

Source: directories that transformers 5.23 and accelerate 1.15.0 wrote, pinned in
tests/golden (``trainer``, ``accelerate``).

The names of the files::

    transformers' Trainer        accelerate's save_state       entry of the catalog
    optimizer.pt                 optimizer.bin                 optimizer
                                 optimizer_1.bin …             optimizer_1 …
    scheduler.pt                 scheduler.bin                 scheduler
                                 scheduler_1.bin …             scheduler_1 …
    scaler.pt                    scaler.pt                     scaler
    rng_state.pth, rng_state_0.pth …                           rng_state, rng_state_0 …
                                 random_states_0.pkl …         random_states_0 …
                                 sampler.bin  sampler_1.bin …  sampler …
                                 dl_state_dict.bin …           dl_state_dict …
                                 custom_checkpoint_0.pkl …     custom_checkpoint_0 …
    training_args.bin                                          training_args

Each is written by ``torch.save``. ``trainer_state.json`` is one of the small files that are carried
next to the weights (``core.formats.huggingface.files``).

Not supported, left alone: files of one rank of model parallelism on SageMaker
(``rank0-of-8-optimizer.pt``) and of FSDP without DCP (``optimizer_0_rank0.bin``).

Source: transformers 5.23 ``trainer.py``; accelerate 1.15.0 ``checkpointing.py``, ``utils/
constants.py``, ``utils/fsdp_utils.py``.

Training state above a directory of DeepSpeed becomes entries of DeepSpeed's checkpoint::

    checkpoint-2/
    ├── latest                         names DeepSpeed's directory
    ├── global_step2/                  weights and optimizer (accelerate: pytorch_model/)
    ├── scheduler.pt                   → scheduler, one object for each of these files
    ├── rng_state_0.pth …              → rng_state_0 …
    ├── training_args.bin              → training_args
    └── trainer_state.json  config.json … are carried, if there is a config.json

accelerate calls them ``scheduler.bin``, ``random_states_0.pkl`` and so on. A schedule
that DeepSpeed runs itself is in DeepSpeed's files (``lr_scheduler``) and in none of these.

Facet: ``TrainingState``, with the files as the user sees them, ``checkpoint-2/scheduler.pt``.

Not supported, listed as not carried: an optimizer's file, because the optimizer is DeepSpeed's.

Source: transformers 5.23 ``trainer.py`` (``_save_optimizer_and_scheduler``), accelerate 1.15.0
``accelerator.py`` (``save_state``); directories that they wrote with DeepSpeed 0.19.8, pinned in
tests/golden (``trainer/zero2_dp2``, ``accelerate/zero2_dp2``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from core.arrays.dtypes import dtype_of
from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.dropped import Dropped
from core.engine.catalog.facets import TrainingState, WeightFileFacts
from core.engine.catalog.stored import Extent, StoredArray, renamed
from core.engine.catalog.tensor import tensors_of
from core.errors import CheckpointingException
from core.files.json_object import read_json_object
from core.formats.torch.stream import stream_kind
from core.pickle.fields import text_or_none
from core.pickle.inert import ObjectLeaf, TensorLeaf, as_mapping, rebuild
from core.pickle.nesting import LeafEntry, entries, map_leaves
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog
    from core.files.store import ReadStore
    from core.formats.torch.tree import TorchTree
    from core.formats.trainer.optimizer import Weights

_CONFIG = "config.json"
_MAX_CONFIG_BYTES = 16 << 20
_SECOND_MODEL = "pytorch_model_1.bin"
BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq", "position_ids")
"""Last parts of the names of buffers that state dicts contain and optimizers do not."""


def with_training_state(catalog: Catalog, store: ReadStore, *, is_ordered: bool) -> Catalog:
    """Add the training state next to the weights to their catalog.

    Args:
        catalog: the weights of a directory.
        is_ordered: its tensors are in the order of the model's parameters.

    Raises:
        CorruptError, TruncatedError, UnsafeError: an optimizer's file is damaged or hostile.
    """
    files, others = state_files(store)
    if not (files or others):
        return catalog
    # Entries need a place in the root of the state dict, which a flat catalog gets here.
    flat: dict[object, object] = {key: TensorLeaf(key) for key in catalog.tensors}
    flat |= {key: ObjectLeaf(key) for key in catalog.objects}
    skeleton = flat if catalog.skeleton is None else catalog.skeleton
    unread = taken_entries(catalog, skeleton, files)
    notes = [
        f"{file} was not read, because the weights have entries named {entry}"
        for entry, file in unread.items()
    ]

    parts = []
    for entry, file in files.items():
        if entry in unread:
            continue
        if not is_optimizer(entry):
            parts.append(build_object_entries(entry, file, store.size(file)))
            continue
        n_optimizers = sum(map(is_optimizer, files))
        weights = _weights(catalog, store, entry, n_optimizers=n_optimizers, is_ordered=is_ordered)
        part = _optimizer_part(entry, file, store, weights)
        if part is None:
            unread[entry] = file
            notes.append(f"{file} was not read, because it is not an optimizer's state dict")
        else:
            parts.append(part)
    joined = with_entries(catalog, skeleton, parts) if parts else catalog
    read = {part.entry: files[part.entry] for part in parts}
    facet = TrainingState(read, (*unread.values(), *others))
    return joined.noted(notes).with_facet(facet)


def taken_entries(catalog: Catalog, skeleton: object, files: Mapping[str, str]) -> dict[str, str]:
    """Return the entries that cannot be added to a catalog, as it has others with their names.

    Args:
        skeleton: the catalog's; a flat one has a mapping of its keys.
        files: entry → file.
    """
    root = as_mapping(skeleton)
    used = {*catalog.tensors, *catalog.objects, *catalog.hidden, *(root or {})}
    used |= {str(key).partition(".")[0] for key in used}
    return {entry: file for entry, file in files.items() if root is None or entry in used}


@dataclass(frozen=True, slots=True)
class StateEntries:
    """The entries that one file adds to the catalog.

    Args:
        entry: its name in the root of the state dict.
        skeleton: what is there.
        arrays, objects, hidden: tensors, objects, and tensors inside objects, by key.
        notes, dropped: as in the catalog.
    """

    entry: str
    skeleton: object
    arrays: Mapping[str, StoredArray]
    objects: Mapping[str, StoredObject]
    hidden: Mapping[str, StoredArray]
    notes: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()


def build_object_entries(entry: str, file: str, n_bytes: int) -> StateEntries:
    """Return the entry of a file that is one object, whose stream is read later.

    Args:
        file: its name in the store from which the catalog is read.
        n_bytes: its size in bytes.
    """
    raw_key = f"raw:{entry}"
    stream = StoredArray(raw_key, "uint8", (n_bytes,), Extent(file, 0))
    item = StoredObject(entry, raw_key=raw_key)
    return StateEntries(entry, ObjectLeaf(entry), {}, {entry: item}, {raw_key: stream})


def _optimizer_part(
    entry: str, file: str, store: ReadStore, weights: Weights
) -> StateEntries | None:
    """Return the part of an optimizer's file; None if it is not an optimizer's state dict."""
    from core.formats.torch.tree import parse
    from core.formats.trainer.optimizer import is_state_dict, named, numbers_of, with_names

    try:
        tree = parse(store, file, prefix=f"{entry}.")
    except CheckpointingException as err:
        advice = "to read only the weights, pass the weights file"
        err.hint = advice if err.hint is None else f"{err.hint}; {advice}"
        raise
    if not is_state_dict(tree.value):
        return None
    shapes = {key: array.shape for key, array in tree.arrays.items()}
    optimizer = named(tree.value, shapes, weights)
    # The tensors of a further model have the model's name before their own.
    container = _container_of(entry)
    if weights.is_further and optimizer.value is not tree.value:
        groups = [[f"{container}{name}" for name in group] for group in numbers_of(optimizer.value)]
        optimizer = replace(optimizer, value=with_names(optimizer.value, groups))
    note = () if optimizer.note is None else (f"{file} {optimizer.note}",)
    return keyed_entries(entry, optimizer.value, tree, notes=(*tree.notes, *note))


def keyed_entries(
    entry: str, value: object, tree: TorchTree, *, notes: tuple[str, ...]
) -> StateEntries:
    """Give the entries of a file the keys of their places below ``entry``.

    Args:
        value: the state dict in the file, in which numbers may have become names.
    """
    from core.formats.torch.tree import keys_of

    leaves = list(entries(value, (entry,)))
    keys = iter(keys_of(leaves, reserved=tree.hidden))
    new_key_of: dict[str, str] = {}
    objects: dict[str, StoredObject] = {}

    def with_key(item: LeafEntry) -> object:
        key, plain_key = next(keys)
        leaf = item.leaf
        if isinstance(leaf, TensorLeaf):
            new_key_of[leaf.key] = key
            return replace(leaf, key=key)
        old_key = leaf.key if isinstance(leaf, ObjectLeaf) else None
        objects[key] = (
            StoredObject(key, value=leaf)
            if old_key is None
            else replace(tree.objects[old_key], key=key)
        )
        return leaf if old_key is None and key == plain_key else ObjectLeaf(key)

    skeleton = map_leaves(value, with_key, (entry,))
    return StateEntries(
        entry,
        skeleton,
        renamed(tree.arrays, new_key_of),
        objects,
        tree.hidden,
        notes,
        tree.dropped,
    )


def with_entries(catalog: Catalog, skeleton: object, parts: list[StateEntries]) -> Catalog:
    """Add the entries of files to a catalog whose root is the mapping ``skeleton``."""
    arrays = {key: array for part in parts for key, array in part.arrays.items()}
    hidden = {key: array for part in parts for key, array in part.hidden.items()}
    joined = catalog.with_hidden({**arrays, **hidden})
    root: dict[object, object] = {**(as_mapping(skeleton) or {})}
    root |= {part.entry: part.skeleton for part in parts}
    return replace(
        joined,
        tensors={**catalog.tensors, **tensors_of(arrays)},
        hidden={**catalog.hidden, **tensors_of(hidden)},
        objects={
            **catalog.objects,
            **{key: o for part in parts for key, o in part.objects.items()},
        },
        skeleton=rebuild(skeleton, root),
        dropped=(*catalog.dropped, *(entry for part in parts for entry in part.dropped)),
    ).noted(note for part in parts for note in part.notes)


def _container_of(entry: str) -> str:
    """Return the beginning of the keys of an optimizer's model, ``model_1.`` for ``optimizer_1``.

    The keys of the first model have none.
    """
    number = entry.partition("_")[2]
    return f"model_{number}." if number not in ("", "0") else ""


def _weights(
    catalog: Catalog, store: ReadStore, entry: str, *, n_optimizers: int, is_ordered: bool
) -> Weights:
    """Return the parameters among the weights of an optimizer's model, and the family of the model.

    Args:
        entry: the optimizer.
        n_optimizers: number of optimizers in the directory. Several optimizers may belong to one
            model, but several models must have one each.
    """
    from core.formats.trainer.optimizer import Weights

    facts = catalog.facet(WeightFileFacts) or WeightFileFacts()
    further = [f"{stem}." for stem in facts.further_models]
    container = _container_of(entry) if further else ""
    problem = None
    if further and (len(further) + 1 != n_optimizers or container not in ("", *further)):
        problem = (
            f"the checkpoint does not record which of its {len(further) + 1} models the optimizer "
            "belongs to"
        )
    elif not further and store.exists(_SECOND_MODEL):
        problem = f"the optimizer may belong to {_SECOND_MODEL}, which was not read"
    shapes = {
        key.removeprefix(container): tensor.shape
        for key, tensor in catalog.tensors.items()
        if key not in catalog.ties
        and (key.startswith(container) if container else not key.startswith(tuple(further)))
        and dtype_of(tensor.dtype).kind == "float"
        and key.rpartition(".")[2] not in BUFFERS
    }
    model_type = None
    if store.exists(_CONFIG):
        config = read_json_object(store, _CONFIG, max_bytes=_MAX_CONFIG_BYTES)
        model_type = text_or_none(config.get("model_type"))
    return Weights(shapes, is_ordered, model_type, is_further=container != "", problem=problem)


_NUMBER = r"(_\d{1,6})?"
_FILES = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?P<entry>optimizer{_NUMBER})\.(pt|bin)",
        rf"(?P<entry>scheduler{_NUMBER})\.(pt|bin)",
        r"(?P<entry>scaler)\.pt",
        rf"(?P<entry>rng_state{_NUMBER})\.pth",
        r"(?P<entry>random_states_\d{1,6})\.pkl",
        rf"(?P<entry>(sampler|dl_state_dict){_NUMBER})\.bin",
        r"(?P<entry>custom_checkpoint_\d{1,6})\.pkl",
        r"(?P<entry>training_args)\.bin",
    )
)
"""Names of the files, in the order in which their entries are listed."""
_OPTIMIZER = re.compile(rf"optimizer{_NUMBER}")


def is_optimizer(entry: str) -> bool:
    """Return whether an entry is an optimizer's state dict."""
    return _OPTIMIZER.fullmatch(entry) is not None


def state_files(store: ReadStore) -> tuple[dict[str, str], tuple[str, ...]]:
    """Find the files of training state in a directory.

    Returns:
        Entry → file; and the files with such names that ``torch.save`` did not write, or of an
        entry that another file has.

    Raises:
        StorageError: the directory or a file cannot be read.
    """
    names = store.files()
    matches = [
        (match["entry"], name)
        for pattern in _FILES
        for name in sorted(names, key=_by_number)
        if (match := pattern.fullmatch(name)) is not None
    ]
    files: dict[str, str] = {}
    for entry, name in matches:
        if stream_kind(store, name, 0, store.size(name)) in ("zip", "legacy"):
            files.setdefault(entry, name)
    read = set(files.values())
    return files, tuple(name for _, name in matches if name not in read)


def _by_number(name: str) -> tuple[int, str]:
    """Sort ``rng_state_10.pth`` after ``rng_state_9.pth``."""
    return len(name), name


def with_state_above(catalog: Catalog, store: ReadStore, *, prefix: str, folder: str) -> Catalog:
    """Add the training state of the directory above to the catalog of DeepSpeed's directory.

    Args:
        catalog: the weights and the optimizer.
        store: the directory above.
        prefix: what comes before the names of its files in the store from which the catalog is
            read.
        folder: its name.

    Raises:
        StorageError: the directory or a file cannot be read.
    """
    all_files, _ = state_files(store)
    files = {entry: file for entry, file in all_files.items() if not is_optimizer(entry)}
    taken = taken_entries(catalog, catalog.skeleton, files)
    parts = [
        build_object_entries(entry, f"{prefix}{file}", store.size(file))
        for entry, file in files.items()
        if entry not in taken
    ]
    if not parts:
        return catalog
    notes = [
        f"{folder}/{file} was not read, because DeepSpeed's files have entries named {entry}"
        for entry, file in taken.items()
    ]
    read = {part.entry: f"{folder}/{files[part.entry]}" for part in parts}
    joined = with_entries(catalog, catalog.skeleton, parts)
    return joined.noted(notes).with_facet(TrainingState(read))
