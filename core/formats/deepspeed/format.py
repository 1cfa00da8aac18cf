"""A checkpoint of DeepSpeed: ZeRO stages 0, 1, 2 and 3, read only.

On disk::

    global_step10/
    ├── mp_rank_00_model_states.pt                        ZeRO-0 to 2: names, shapes, 16-bit copies, client state
    ├── zero_pp_rank_R_mp_rank_00_model_states.pt …       ZeRO-3: the same, one per data-parallel rank, without weights
    └── [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt  ZeRO-1 to 3: flat parts of the fp32 masters and of the moments
    latest                                                beside the directory: the name of the newest one

Every file is a torch zip. The catalog has what ``zero_to_fp32.py`` makes, under the same names and
bit for bit: the fp32 master weights, buffers as float32, frozen parameters as stored, shared
parameters as aliases of their owners. Its keys are those of ``core.formats.deepspeed.tree``;
moments stand under the parameters' names. How flat parts become
parameters: ``core.formats.deepspeed.partition``; where a file has ``param_slice_mappings``, they
    must say the same.

ZeRO-0 keeps weights as they were trained (16-bit) and numbers its optimizer's parameters; they keep
their numbers.

Facet: ``ZeroFacts``.

Beyond ``zero_to_fp32.py``: parameters that no optimizer group and no list of frozen parameters
names (ZeRO-1 with frozen ones) are taken from the 16-bit copies, with a note; 64-bit buffers stay
64-bit.

Not carried, with a note: the 16-bit copies of ZeRO-1 and 2, which are the rounded masters, and
states that are not as long as the flat group that they belong to (factored optimizers). Not
carried: facts about the partition.

Versions: 0.3.17 and later, elastic ZeRO-1 checkpoints and ``BF16_Optimizer`` included. Not
    supported, refused by
name: see ``core.formats.deepspeed.files``.

Source: DeepSpeed 0.19.8; checkpoints that it wrote, pinned in tests/golden (``deepspeed``,
    ``oracle/deepspeed``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.errors import CorruptError, MissingShardError
from core.formats.deepspeed.facets import ZeroFacts
from core.formats.deepspeed.files import is_rank_file, missing_rank, rank_files
from core.formats.deepspeed.model_states import iteration_of, parse_model_states, version_of
from core.formats.deepspeed.moments import states_by_parameter
from core.formats.deepspeed.optim_states import parse_optim_states
from core.formats.deepspeed.partition import CutGroups, cut_groups, cut_parameters
from core.formats.deepspeed.pieces import tensor_in_groups, tensor_of_array
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
    from core.formats.deepspeed.partition import Partition

_UNIVERSAL = "zero"


def sniff(store: ReadStore) -> bool:
    """Return whether the directory holds files of DeepSpeed's ranks, and is not a universal
    checkpoint.
    """
    if store.entry is not None or not any(map(is_rank_file, store.files())):
        return False
    return not any(
        store.exists(f"{_UNIVERSAL}/{name}/fp32.pt") for name in store.folders(_UNIVERSAL)
    )


def read(store: ReadStore) -> Catalog:
    """Read the catalog of a ``global_stepN`` directory.

    Raises:
        MissingShardError: a rank's file is missing.
        CorruptError: files contradict themselves or each other.
        UnsupportedError: a kind of parallelism or the version is not supported.
        UnsafeError: a pickle is hostile.
    """
    files = rank_files(store)
    optim = [parse_optim_states(read_state_file(store, name)) for name in files.optim]
    if not optim:
        return _read_unpartitioned(store, files)
    _check_ranks(optim, files)
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
    return _read_partitioned(
        store, [parse_model_states(read_state_file(store, files.model))], optim
    )


def _check_ranks(optim: Sequence[OptimStates], files: ZeroRankFiles) -> None:
    """Check that the optimizer's files are complete, and of one run."""
    n_ranks = max(rank_optim.n_ranks for rank_optim in optim)
    if len(optim) < n_ranks:
        raise missing_rank(files.optim[0], len(optim))
    head = optim[0]
    for rank, rank_optim in enumerate(optim):
        file = rank_optim.state.file
        if rank_optim.n_ranks != len(optim):
            raise CorruptError(
                f"the file records {rank_optim.n_ranks} ranks, but there are files from {len(optim)}",
                file=file,
                rank=str(rank),
                hint="remove files that an older run with more ranks left behind",
            )
        if rank_optim.stage != head.stage:
            raise CorruptError(
                f"the file is from ZeRO-{rank_optim.stage}, but that of rank 0 from ZeRO-{head.stage}",
                file=file,
                rank=str(rank),
            )
        if len(rank_optim.fp32) != len(head.fp32):
            raise CorruptError(
                f"the file has {len(rank_optim.fp32)} flat groups, but that of rank 0 {len(head.fp32)}",
                file=file,
                rank=str(rank),
            )
    if head.stage == 3 and len(files.zero_model) > len(optim):
        raise CorruptError(
            f"there are {len(files.zero_model)} files of model states, but {len(optim)} of optimizer states",
            file=files.zero_model[-1],
            hint="remove files that an older run with more ranks left behind",
        )


def _read_partitioned(
    store: ReadStore, models: Sequence[ModelStates], optim: Sequence[OptimStates]
) -> Catalog:
    """Return the catalog of ZeRO-1, 2 or 3."""
    head, model = optim[0], models[0]
    if model.groups is None:
        raise model.state.corrupt(f"param_shapes is missing, which ZeRO-{head.stage} needs")
    for other in models[1:]:
        if other.groups != model.groups or other.frozen != model.frozen:
            raise other.state.corrupt(f"param_shapes differ from those of {model.state.file}")
    partition = _partition(model, optim)

    # The weights: masters in the flat groups, and what only the model files hold.
    shapes = {name: shape for group in model.groups for name, shape in group.items()}
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
            "the model file's copies of the weights are not carried; they are rounded from the optimizer's masters"
        )

    # The optimizer's states and settings by parameter.
    by_parameter = states_by_parameter(store, partition, shapes, optim)
    names_of = {number: list(group) for number, group in enumerate(model.groups)}
    tree = tree_of(
        weights=weights,
        states=by_parameter.states,
        groups=group_trees(
            head.param_groups, names_of if len(model.groups) == len(head.fp32) else {}
        ),
        optimizer=head.beside,
        beside=model.beside,
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


def _partition(model: ModelStates, optim: Sequence[OptimStates]) -> Partition:
    """Return the positions of the parameters, after checking them against the files.

    Raises:
        CorruptError: shapes, sizes and positions contradict each other.
    """
    assert model.groups is not None
    sizes = [[array.shape[0] for array in rank_optim.fp32] for rank_optim in optim]
    try:
        if optim[0].stage == 3:
            return cut_parameters(model.groups, sizes)
        if len(model.groups) != len(optim[0].fp32):
            raise model.state.corrupt(
                f"param_shapes has {len(model.groups)} groups, but the optimizer's files have {len(optim[0].fp32)}"
            )
        partition = cut_groups(model.groups, sizes, alignment=optim[0].alignment)
        _check_slices(partition, optim)
    except CorruptError as err:
        err.file = err.file or model.state.file
        raise
    return partition


def _check_slices(cut: CutGroups, optim: Sequence[OptimStates]) -> None:
    """Check that every file's positions of parameters agree with shapes and sizes.

    Raises:
        CorruptError: names the first parameter at another position.
    """
    if any(rank_optim.slices is None for rank_optim in optim):
        return
    expected: dict[tuple[int, int, str], tuple[int, int]] = {}
    for name in cut.first:
        for run in cut.runs(name):
            expected[run.rank, run.group, name] = (run.at, run.n)
    for rank, rank_optim in enumerate(optim):
        for group, slices in enumerate(rank_optim.slices or ()):
            for name, stated in slices.items():
                position = expected.pop((rank, group, name), None)
                if stated != position and not (position is None and stated[1] == 0):
                    raise rank_optim.state.corrupt(
                        f"param_slice_mappings state (start, elements) {stated}, but by the shapes before it in its "
                        f"group it is {position}",
                        key=name,
                    )
    for rank, group, name in expected:
        raise optim[rank].state.corrupt(
            f"param_slice_mappings lack the parameter, which is in this rank's part of group {group}",
            key=name,
        )


def _read_unpartitioned(store: ReadStore, files: ZeroRankFiles) -> Catalog:
    """Read the catalog of ZeRO-0: the module as stored, and the optimizer by numbers."""
    name = files.model or files.zero_model[0]
    model = parse_model_states(read_state_file(store, name), has_zero_files=False)
    if model.groups is not None:
        raise MissingShardError(
            "the optimizer's files, which hold the fp32 weights, are missing",
            file=f"*{name.replace('model_states', 'optim_states')}" if files.model is None else
            "*zero_pp_rank_0_mp_rank_00_optim_states.pt",
            hint="copy the checkpoint again, with all its files",
        )  # fmt: skip
    if files.model is None:
        raise model.state.corrupt("a file of ZeRO-3 without param_shapes")
    weights = {key: tensor_of_array(array) for key, array in model.module.items()}
    weights, aliases = with_shared(model, weights)
    tree = tree_of(weights=weights, states={}, groups=[], optimizer={}, beside=model.beside)
    optimizer = model.state.root.get(OPTIMIZER)
    notes = []
    if optimizer is not None:
        tree[OPTIMIZER] = spread(optimizer, model.state)
        notes.append(
            "ZeRO-0 stores numbers instead of names for the optimizer's parameters; its state keeps the numbers"
        )
    dp = model.state.root.get("dp_world_size")
    catalog = assemble_catalog(
        tree, format="deepspeed", version=version_of(model), files=[model.state]
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
