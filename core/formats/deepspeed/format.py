"""A checkpoint of DeepSpeed: ZeRO stages 0, 1, 2 and 3, read only.

On disk::

    latest                                    name of the newest directory
    global_step10/
    ├── mp_rank_00_model_states.pt            ZeRO-0 to 2: names, shapes, 16-bit copies of the
    │                                         weights, client state
    ├── zero_pp_rank_R_mp_rank_00_model_states.pt
    │                                         ZeRO-3: the same without weights, one per
    │                                         data-parallel rank R
    ├── [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt
    │                                         ZeRO-1 to 3: flat parts of the fp32 master weights
    │                                         and of the moments
    └── layer_L_expert_E_mp_rank_00_model_states.pt …
                                              experts, see ``core.formats.deepspeed.experts``

Every file is a torch zip. The catalog contains what ``zero_to_fp32.py`` writes, under the same
names and bit for bit: the fp32 master weights, buffers as float32, frozen parameters as stored,
shared parameters tied to their owners. Its keys are those of
``core.formats.deepspeed.tree``; moments have the names of their parameters. For the conversion from
flat parts to parameters see ``core.formats.deepspeed.partition``; ``param_slice_mappings``, where a
file has them, must agree with it.

ZeRO-0 stores the weights as they were trained (16-bit), and numbers the parameters of its
optimizer; the numbers are kept. With experts, it stores an optimizer for each expert-parallel rank.

Facet: ``ZeroFacts``.

Differences from ``zero_to_fp32.py``: parameters that are neither in an optimizer group nor in the
list of frozen parameters (ZeRO-1 with frozen parameters) are read from the 16-bit copies, with a
note; 64-bit buffers stay 64-bit.

Not carried, with a note: the 16-bit copies of ZeRO-1 and 2, which conversions and ``validate``
compare with the master weights, in a sample of each; and states that are not as long as their flat
group (factored optimizers). Not carried: facts about the partition. Not carried, and listed: other
ranks' client states that differ from the first rank's, or hold tensors.

Versions: 0.3.17 and later, including elastic ZeRO-1 checkpoints and ``BF16_Optimizer``.

Not supported, refused by name: see ``core.formats.deepspeed.files``.

Source: DeepSpeed 0.19.8; checkpoints that it wrote, pinned in tests/golden (``deepspeed``,
``oracle/deepspeed``, and deepspeed_parallel.tar.xz).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.tensor import whole_tensor
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.formats.deepspeed.experts import with_experts
from core.formats.deepspeed.files import (
    is_rank_file,
    layer_files,
    list_rank_files,
    missing_model_parallel_rank,
    model_parallel_ranks,
)
from core.formats.deepspeed.model_parallel.read import read_model_files, read_model_parallel
from core.formats.deepspeed.model_states import (
    ZeroFacts,
    find_iteration,
    parse_model_states,
    recorded_size,
    version_of,
)
from core.formats.deepspeed.partitioned import read_data_parallel
from core.formats.deepspeed.state_file import read_state_file
from core.formats.deepspeed.tree import (
    EXTRAS,
    OPTIMIZER,
    WholeObject,
    assemble_catalog,
    build_state_tree,
    group_trees,
    spread,
)
from core.formats.deepspeed.weights import advise_no_optim, with_shared
from core.formats.format import Format, no_folders
from core.pickle.fields import int_or_none

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog
    from core.files.store import ReadStore
    from core.formats.deepspeed.files import ZeroRankFiles
    from core.formats.deepspeed.partitioned import PartitionedStates

_UNIVERSAL = "zero"
_NUMBERED = "ZeRO-0 stores optimizer state by parameter number, not by name; the numbers are kept"


def sniff(store: ReadStore) -> bool:
    """Return whether the directory has DeepSpeed's rank files and is not a universal checkpoint."""
    # A universal checkpoint has a model file of the same name.
    if store.entry is not None or not any(map(is_rank_file, store.files())):
        return False
    return not any(
        store.exists(f"{_UNIVERSAL}/{name}/fp32.pt") for name in store.folders(_UNIVERSAL)
    )


def read(store: ReadStore) -> Catalog:
    """Read the catalog of a ``global_stepN`` directory.

    Raises:
        MissingShardError: a rank's file is missing.
        CorruptError: a file is malformed, or files contradict each other.
        ReplicaMismatchError: a scalar of the optimizer differs between ranks.
        UnsupportedError: a kind of parallelism or the version is not supported.
        UnsafeError: a pickle is hostile.
    """
    try:
        return _read_with_optimizer(store)
    except (CorruptError, UnsupportedError) as err:
        advise_no_optim(err, store, read_weights, "uses the weights in the model's own precision")
        raise


def _read_with_optimizer(store: ReadStore) -> Catalog:
    """Read the catalog of all files; raises as ``read``."""
    ranks, layers = model_parallel_ranks(store), layer_files(store)
    if len(ranks) > 1 or layers:
        return _catalog_of(read_model_parallel(store, ranks, layers))
    files = list_rank_files(store)
    partitioned = read_data_parallel(store, files)
    if partitioned is None:
        return _read_unpartitioned(store, files)
    # The names of files cannot show that the highest model-parallel ranks have none.
    if recorded_size(partitioned.model) > 1:
        raise missing_model_parallel_rank(1)
    return _catalog_of(partitioned)


def read_weights(store: ReadStore) -> Catalog:
    """Read the catalog of the weights in the model's own files, in their own precision.

    Raises:
        MissingShardError: a file is missing, or these are files of ZeRO-3, which have no weights.
        CorruptError, UnsupportedError, UnsafeError: as for ``read``.
    """
    ranks = model_parallel_ranks(store, needs_optimizer=False)
    partitioned = read_model_files(store, ranks, layer_files(store), keeps_optimizer=False)
    return _catalog_of(partitioned)


def _catalog_of(partitioned: PartitionedStates) -> Catalog:
    """Return the catalog of what the files of all data-parallel ranks contain."""
    model = partitioned.model
    tree = build_state_tree(
        weights=partitioned.weights,
        states=partitioned.states,
        groups=group_trees(partitioned.param_groups, partitioned.names_of),
        optimizer=partitioned.other_entries,
        other_entries=model.other_entries,
    )
    if partitioned.extras:
        tree[EXTRAS] = {name: WholeObject(value) for name, value in partitioned.extras.items()}
    notes = list(partitioned.notes)
    if partitioned.optimizers:
        trees = partitioned.optimizers
        tree[OPTIMIZER] = (
            trees[0]
            if len(trees) == 1
            else {f"model_parallel_rank_{rank}": item for rank, item in enumerate(trees)}
        )
        notes.append(_NUMBERED)
    files = [model.state, partitioned.state, *partitioned.files]
    catalog = assemble_catalog(tree, format="deepspeed", version=version_of(model), files=files)
    catalog = replace(
        catalog,
        iteration=find_iteration(model),
        notes=tuple(notes),
        dropped=tuple(partitioned.dropped),
    ).with_facet(partitioned.facts)
    return catalog if partitioned.copies is None else catalog.with_facet(partitioned.copies)


def _read_unpartitioned(store: ReadStore, files: ZeroRankFiles) -> Catalog:
    """Read the catalog of ZeRO-0: the module as stored, the optimizer's parameters by number.

    Raises:
        MissingShardError: the checkpoint is one of ZeRO-1, 2 or 3 without its optimizer files.
        CorruptError: the model file is malformed.
    """
    # Only ZeRO records ``param_shapes``, and only ZeRO-3 has one model file per rank.
    name = files.model or files.zero_model[0]
    model = parse_model_states(read_state_file(store, name))
    if model.groups is not None:
        raise MissingShardError(
            "the optimizer files, which contain the fp32 weights, are missing",
            file=f"*{name.replace('model_states', 'optim_states')}" if files.model is None else
            "*zero_pp_rank_0_mp_rank_00_optim_states.pt",
            hint="copy the checkpoint again, with all its files",
        )  # fmt: skip
    if files.model is None:
        raise model.state.corrupt("param_shapes, which ZeRO-3 needs, is missing")
    if recorded_size(model) > 1:
        raise missing_model_parallel_rank(1)
    model = with_experts(model, [read_state_file(store, name) for name in files.experts])
    # The wrapped optimizer's own state dict is stored in the model file.
    weights = {key: whole_tensor(array) for key, array in model.module.items()}
    weights = with_shared(model, weights)
    tree = build_state_tree(
        weights=weights, states={}, groups=[], optimizer={}, other_entries=model.other_entries
    )
    optimizer = model.state.root.get(OPTIMIZER)
    notes = []
    expert_optim = [read_state_file(store, name) for name in files.expert_optim]
    if expert_optim:
        # Every expert-parallel rank has a file with the state dict of its optimizer, in which the
        # parameters that belong to no expert are the same.
        tree[OPTIMIZER] = {
            f"expert_parallel_rank_{rank}": spread(file.root.get(OPTIMIZER), file)
            for rank, file in enumerate(expert_optim)
        }
        notes.append(
            "ZeRO-0 stores an optimizer for each expert-parallel rank and numbers its parameters "
            "instead of naming them; all of these optimizers are kept"
        )
    elif optimizer is not None:
        tree[OPTIMIZER] = spread(optimizer, model.state)
        notes.append(_NUMBERED)
    catalog = assemble_catalog(
        tree, format="deepspeed", version=version_of(model), files=[model.state, *expert_optim]
    )
    return replace(
        catalog,
        iteration=find_iteration(model),
        notes=tuple(notes),
        dropped=model.dropped,
    ).with_facet(ZeroFacts(0, int_or_none(model.state.root.get("dp_world_size")) or 1))


FORMAT = Format(
    name="deepspeed",
    title="DeepSpeed ZeRO",
    sniff=sniff,
    read=read,
    read_weights=read_weights,
    has_masters_in_optimizer=True,
    has_files_of_ranks=True,
    has_files_above=True,
    lay_out=None,
    written_as="deepspeed_universal",
    own_folders=no_folders,
)
