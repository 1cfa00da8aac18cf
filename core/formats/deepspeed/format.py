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
shared parameters as aliases of their owners. Its keys are those of
``core.formats.deepspeed.tree``; moments have the names of their parameters. For the conversion from
flat parts to parameters see ``core.formats.deepspeed.partition``; ``param_slice_mappings``, where a
file has them, must agree with it.

ZeRO-0 stores the weights as they were trained (16-bit), and numbers the parameters of its
optimizer; the numbers are kept. With experts, it stores an optimizer for each expert-parallel rank.

Facet: ``ZeroFacts``.

Differences from ``zero_to_fp32.py``: parameters that are neither in an optimizer group nor in the
list of frozen parameters (ZeRO-1 with frozen parameters) are read from the 16-bit copies, with a
note; 64-bit buffers stay 64-bit.

Not carried, with a note: the 16-bit copies of ZeRO-1 and 2, which are the rounded master weights,
and states that are not as long as their flat group (factored optimizers). Not carried: facts about
the partition.

Versions: 0.3.17 and later, including elastic ZeRO-1 checkpoints and ``BF16_Optimizer``.

Not supported, refused by name: see ``core.formats.deepspeed.files``.

Source: DeepSpeed 0.19.8; checkpoints that it wrote, pinned in tests/golden (``deepspeed``,
``oracle/deepspeed``, and deepspeed_parallel.tar.xz).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.errors import CorruptError, MissingShardError
from core.formats.deepspeed.experts import cut_with_experts, local_names, with_experts
from core.formats.deepspeed.facets import ZeroFacts
from core.formats.deepspeed.files import is_rank_file, missing_rank, rank_files
from core.formats.deepspeed.model_states import iteration_of, parse_model_states, version_of
from core.formats.deepspeed.moments import states_by_parameter
from core.formats.deepspeed.optim_states import parse_optim_states
from core.formats.deepspeed.partition import CutGroups, cut_parameters
from core.formats.deepspeed.runs import tensor_in_groups, tensor_of_array
from core.formats.deepspeed.state_file import read_state_file
from core.formats.deepspeed.tree import OPTIMIZER, assemble_catalog, group_trees, spread, tree_of
from core.formats.deepspeed.weights import buffers, frozen, unlisted_weights, with_shared
from core.formats.format import Format, no_folders

if TYPE_CHECKING:
    from core.catalog.catalog import Catalog
    from core.files.store import ReadStore
    from core.formats.deepspeed.files import ZeroRankFiles
    from core.formats.deepspeed.model_states import ModelStates
    from core.formats.deepspeed.optim_states import OptimStates
    from core.formats.deepspeed.partition import CutParameters

_UNIVERSAL = "zero"


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
    files = rank_files(store)
    store.expect_headers(files.names)
    optim = [parse_optim_states(read_state_file(store, name)) for name in files.optim]
    if not optim:
        return _read_unpartitioned(store, files)
    _check_ranks(optim, files)
    # ZeRO-3 has a model file per rank, with the rank's parts of frozen parameters.
    if optim[0].stage == 3:
        if len(files.zero_model) < len(optim):
            raise missing_rank("zero_pp_rank_0_mp_rank_00_model_states.pt", len(files.zero_model))
        models = [parse_model_states(read_state_file(store, name)) for name in files.zero_model]
        return _read_partitioned(store, models, optim)
    if files.model is None:
        raise MissingShardError(
            f"the model file of ZeRO-{optim[0].stage} is missing",
            file="mp_rank_00_model_states.pt",
            hint="copy the checkpoint again, with all its files",
        )
    model = parse_model_states(read_state_file(store, files.model))
    return _read_partitioned(store, [_with_experts(store, model, files)], optim)


def _with_experts(store: ReadStore, model: ModelStates, files: ZeroRankFiles) -> ModelStates:
    """Return the model file with the weights of single experts.

    Raises:
        MissingShardError: the file of an expert is missing.
        CorruptError: a file is malformed.
    """
    return with_experts(model, [read_state_file(store, name) for name in files.experts])


def _check_ranks(optim: Sequence[OptimStates], files: ZeroRankFiles) -> None:
    """Check that the optimizer files are complete and come from one run.

    Raises:
        MissingShardError: the file of a rank is missing.
        CorruptError: the number of ranks, the stage or the number of groups differs between files.
    """
    # Names cannot show that the files of the highest ranks are missing, but every file records the
    # number of ranks.
    n_ranks = max(rank_optim.n_ranks for rank_optim in optim)
    if len(optim) < n_ranks:
        raise missing_rank(files.optim[0], len(optim))
    # Files that an older run left behind show up as other numbers of ranks, stages or groups.
    head = optim[0]
    for rank, rank_optim in enumerate(optim):
        file = rank_optim.state.file
        if rank_optim.n_ranks != len(optim):
            raise CorruptError(
                f"the file records {rank_optim.n_ranks} ranks, but there are files from "
                f"{len(optim)}",
                file=file,
                rank=str(rank),
                hint="remove files that an older run with more ranks left behind",
            )
        if rank_optim.stage != head.stage:
            raise CorruptError(
                f"the file is from ZeRO-{rank_optim.stage}, but that of rank 0 is from "
                f"ZeRO-{head.stage}",
                file=file,
                rank=str(rank),
            )
        if len(rank_optim.fp32) != len(head.fp32):
            raise CorruptError(
                f"the file has {len(rank_optim.fp32)} flat groups, but that of rank 0 has "
                f"{len(head.fp32)}",
                file=file,
                rank=str(rank),
            )
    # Fewer model files are reported when they are read.
    if head.stage == 3 and len(files.zero_model) > len(optim):
        raise CorruptError(
            f"there are {len(files.zero_model)} files of model states, but {len(optim)} of "
            "optimizer states",
            file=files.zero_model[-1],
            hint="remove files that an older run with more ranks left behind",
        )


def _read_partitioned(
    store: ReadStore, models: Sequence[ModelStates], optim: Sequence[OptimStates]
) -> Catalog:
    """Return the catalog of ZeRO-1, 2 or 3.

    Args:
        models: the model files: one, or in ZeRO-3 one per rank.
        optim: the optimizer files by rank.

    Raises:
        CorruptError: files contradict each other.
        ReplicaMismatchError: a scalar of the optimizer differs between ranks.
    """
    head, model = optim[0], models[0]
    if model.groups is None:
        raise model.state.corrupt(f"param_shapes is missing, which ZeRO-{head.stage} needs")
    for other in models[1:]:
        if other.groups != model.groups or other.frozen != model.frozen:
            raise other.state.corrupt(f"param_shapes differ from those of {model.state.file}")
    partition = _partition(store, model, optim)

    # The weights: master weights in the flat groups, and those that only model files contain. An
    # entry that comes later takes precedence.
    shapes = partition.shapes
    weights = buffers(model) | frozen(models, head.stage)
    flat = [rank_optim.fp32 for rank_optim in optim]
    weights |= {
        name: tensor_in_groups(partition, name, shape, flat) for name, shape in shapes.items()
    }
    unlisted = unlisted_weights(model, weights, head.stage)
    weights, aliases = with_shared(model, weights | unlisted.tensors)
    notes = list(unlisted.notes)
    if head.stage < 3:
        notes.append(
            "the model file's 16-bit copies of the weights are not carried; they are the rounded "
            "master weights"
        )

    # The optimizer's states and settings by parameter. ZeRO-3 may divide a group into several flat
    # groups; the numbers in the settings are then kept, as they are no groups of parameters.
    by_parameter = states_by_parameter(store, partition, shapes, optim)
    names_of = {number: list(group) for number, group in enumerate(model.groups)}
    if isinstance(partition, CutGroups):
        names_of = {group.number: [] for group in partition.groups}
        for group in partition.groups:
            names_of[group.number] += group.shapes
    tree = tree_of(
        weights=weights,
        states=by_parameter.states,
        groups=group_trees(
            head.param_groups, names_of if len(model.groups) == len(head.fp32) else {}
        ),
        optimizer=head.other_entries,
        other_entries=model.other_entries,
    )
    catalog = assemble_catalog(
        tree, format="deepspeed", version=version_of(model), files=[model.state, head.state]
    )
    return replace(
        catalog,
        iteration=iteration_of(model),
        aliases=aliases,
        notes=tuple(notes),
        dropped=(*unlisted.dropped, *by_parameter.dropped),
    ).with_facet(ZeroFacts(head.stage, len(optim)))


def _partition(
    store: ReadStore, model: ModelStates, optim: Sequence[OptimStates]
) -> CutGroups | CutParameters:
    """Return the positions of the parameters in the flat groups, checked against the files.

    Raises:
        CorruptError: shapes, sizes and recorded positions contradict each other.
    """
    assert model.groups is not None
    try:
        if optim[0].stage == 3:
            sizes = [[array.shape[0] for array in rank_optim.fp32] for rank_optim in optim]
            return cut_parameters(model.groups, sizes)
        if len(model.groups) != len(optim[0].fp32):
            raise model.state.corrupt(
                f"param_shapes has {len(model.groups)} groups, but the optimizer files have "
                f"{len(optim[0].fp32)}"
            )
        partition = cut_with_experts(store, model, optim)
        _check_slices(partition, optim)
    except CorruptError as err:
        err.file = err.file or model.state.file  # the partition knows no files
        raise
    return partition


def _check_slices(cut: CutGroups, optim: Sequence[OptimStates]) -> None:
    """Check that the positions recorded in every file agree with those of a partition.

    Raises:
        CorruptError: names the first parameter that is recorded at another position, or not at all.
    """
    if any(rank_optim.slices is None for rank_optim in optim):
        return
    # The files have the numbers that experts have on their ranks.
    local = local_names(cut)
    expected = {
        (run.rank, run.group, local.get(name, name)): (run.at, run.n)
        for name in cut.first
        for run in cut.runs(name)
    }
    for rank, rank_optim in enumerate(optim):
        for group, slices in enumerate(rank_optim.slices or ()):
            for name, recorded in slices.items():
                position = expected.pop((rank, group, name), None)
                # A parameter without elements has no run, but may be recorded.
                if recorded != position and not (position is None and recorded[1] == 0):
                    raise rank_optim.state.corrupt(
                        f"param_slice_mappings records (start, elements) {recorded}, but the "
                        f"shapes of the parameters before it give {position}",
                        key=name,
                    )
    # Positions that no file records are left over.
    for rank, group, name in expected:
        raise optim[rank].state.corrupt(
            "param_slice_mappings lacks the parameter, which is in this rank's part of group "
            f"{group}",
            key=name,
        )


def _read_unpartitioned(store: ReadStore, files: ZeroRankFiles) -> Catalog:
    """Read the catalog of ZeRO-0: the module as stored, the optimizer's parameters by number.

    Raises:
        MissingShardError: the checkpoint is one of ZeRO-1, 2 or 3 without its optimizer files.
        CorruptError: the model file is malformed.
    """
    # Only ZeRO records ``param_shapes``, and only ZeRO-3 has one model file per rank.
    name = files.model or files.zero_model[0]
    model = parse_model_states(read_state_file(store, name), has_zero_files=False)
    if model.groups is not None:
        raise MissingShardError(
            "the optimizer files, which hold the fp32 weights, are missing",
            file=f"*{name.replace('model_states', 'optim_states')}" if files.model is None else
            "*zero_pp_rank_0_mp_rank_00_optim_states.pt",
            hint="copy the checkpoint again, with all its files",
        )  # fmt: skip
    if files.model is None:
        raise model.state.corrupt("param_shapes is missing, which ZeRO-3 needs")
    model = _with_experts(store, model, files)
    # The wrapped optimizer's own state dict is stored in the model file.
    weights = {key: tensor_of_array(array) for key, array in model.module.items()}
    weights, aliases = with_shared(model, weights)
    tree = tree_of(
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
            "ZeRO-0 stores an optimizer for each expert-parallel rank, with numbers instead of "
            "names for its parameters; all of them are kept"
        )
    elif optimizer is not None:
        tree[OPTIMIZER] = spread(optimizer, model.state)
        notes.append(
            "ZeRO-0 stores numbers instead of names for the optimizer's parameters; the state "
            "keeps them"
        )
    dp = model.state.root.get("dp_world_size")
    catalog = assemble_catalog(
        tree, format="deepspeed", version=version_of(model), files=[model.state, *expert_optim]
    )
    return replace(
        catalog, iteration=iteration_of(model), aliases=aliases, notes=tuple(notes)
    ).with_facet(ZeroFacts(0, dp if type(dp) is int else 1))


FORMAT = Format(
    name="deepspeed",
    title="DeepSpeed ZeRO",
    sniff=sniff,
    read=read,
    lay_out=None,
    own_folders=no_folders,
)
