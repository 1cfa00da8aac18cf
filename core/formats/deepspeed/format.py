"""A checkpoint of DeepSpeed: ZeRO stages 0, 1, 2 and 3, read only.

On disk::

    global_step10/
    ├── mp_rank_00_model_states.pt                        ZeRO-0 to 2: names, shapes, 16-bit copies, client state
    ├── zero_pp_rank_R_mp_rank_00_model_states.pt …       ZeRO-3: the same, one per data-parallel rank, without weights
    └── [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt  ZeRO-1 to 3: flat parts of the fp32 masters and of the moments
    latest                                                beside the directory: the name of the newest one

Every file is a torch zip. The catalog has what ``zero_to_fp32.py`` makes, under the same names and bit for bit: the
fp32 master weights, buffers as float32, frozen parameters as stored, shared parameters as aliases of their owners. Its
keys are those of ``core.formats.deepspeed.tree``; moments stand under the parameters' names. How flat parts become
parameters: ``core.formats.deepspeed.partition``; where a file has ``param_slice_mappings``, they must say the same.

ZeRO-0 keeps weights as they were trained (16-bit) and numbers its optimizer's parameters; they keep their numbers.

Facet: ``ZeroFacts``.

Beyond ``zero_to_fp32.py``: parameters that no optimizer group and no list of frozen parameters names (ZeRO-1 with
frozen ones) are taken from the 16-bit copies, with a note; 64-bit buffers stay 64-bit.

Not carried, with a note: the 16-bit copies of ZeRO-1 and 2, which are the rounded masters, and states that are not as
long as the flat group that they belong to (factored optimizers). Not carried: facts about the partition.

Versions: 0.3.17 and later, elastic ZeRO-1 checkpoints and ``BF16_Optimizer`` included. Not supported, refused by
name: see ``core.formats.deepspeed.files``.

Source: DeepSpeed 0.19.8; checkpoints that it wrote, pinned in tests/golden (``deepspeed``, ``oracle/deepspeed``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.errors import CorruptError, MissingShardError
from core.formats.deepspeed.facets import ZeroFacts
from core.formats.deepspeed.files import is_rank_file, missing_rank, rank_files
from core.formats.deepspeed.model_states import iteration_of, model_states, version_of
from core.formats.deepspeed.moments import states_by_parameter
from core.formats.deepspeed.optim_states import optim_states
from core.formats.deepspeed.partition import CutGroups, cut_groups, cut_parameters
from core.formats.deepspeed.pieces import held_in_groups, held_whole
from core.formats.deepspeed.state_file import read_state_file
from core.formats.deepspeed.tree import OPTIMIZER, assembled, group_trees, spread, tree_of
from core.formats.deepspeed.weights import buffers, frozen, unlisted, with_shared
from core.formats.format import Format, no_folders

if TYPE_CHECKING:
    from core.catalog.catalog import Catalog
    from core.files.store import ReadStore
    from core.formats.deepspeed.files import RankFiles
    from core.formats.deepspeed.model_states import ModelStates
    from core.formats.deepspeed.optim_states import OptimStates
    from core.formats.deepspeed.partition import Partition

_UNIVERSAL = "zero"


def sniff(store: ReadStore) -> bool:
    """Whether the directory holds files of DeepSpeed's ranks, and is no universal checkpoint."""
    if store.entry is not None or not any(map(is_rank_file, store.files())):
        return False
    return not any(store.exists(f"{_UNIVERSAL}/{name}/fp32.pt") for name in store.folders(_UNIVERSAL))


def read(store: ReadStore) -> Catalog:
    """The catalog of a ``global_stepN`` directory.

    Raises:
        MissingShardError: a rank's file is absent.
        CorruptError: files contradict themselves or each other.
        UnsupportedError: a kind of parallelism or a version that is not handled.
        UnsafeError: a hostile pickle.
    """
    files = rank_files(store)
    optim = [optim_states(read_state_file(store, name)) for name in files.optim]
    if not optim:
        return _read_unpartitioned(store, files)
    _check_ranks(optim, files)
    if optim[0].stage == 3:
        if len(files.zero_model) < len(optim):
            raise missing_rank("zero_pp_rank_0_mp_rank_00_model_states.pt", len(files.zero_model))
        models = [model_states(read_state_file(store, name)) for name in files.zero_model]
        return _read_partitioned(store, models, optim)
    if files.model is None:
        raise MissingShardError(
            f"the model file of ZeRO-{optim[0].stage} is not there",
            file="mp_rank_00_model_states.pt",
            hint="copy the checkpoint again, with all its files",
        )
    return _read_partitioned(store, [model_states(read_state_file(store, files.model))], optim)


def _check_ranks(optim: Sequence[OptimStates], files: RankFiles) -> None:
    """The optimizer's files are all there, and of one run."""
    n_ranks = max(found.n_ranks for found in optim)
    if len(optim) < n_ranks:
        raise missing_rank(files.optim[0], len(optim))
    head = optim[0]
    for rank, found in enumerate(optim):
        file = found.state.file
        if found.n_ranks != len(optim):
            raise CorruptError(
                f"the file says that there are {found.n_ranks} ranks, but there are files of {len(optim)}",
                file=file,
                rank=str(rank),
                hint="remove files that an older run with more ranks left behind",
            )
        if found.stage != head.stage:
            raise CorruptError(
                f"the file is of ZeRO-{found.stage}, that of rank 0 of ZeRO-{head.stage}", file=file, rank=str(rank)
            )
        if len(found.fp32) != len(head.fp32):
            raise CorruptError(
                f"the file has {len(found.fp32)} flat groups, that of rank 0 {len(head.fp32)}",
                file=file,
                rank=str(rank),
            )
    if head.stage == 3 and len(files.zero_model) > len(optim):
        raise CorruptError(
            f"there are {len(files.zero_model)} files of model states for {len(optim)} of optimizer states",
            file=files.zero_model[-1],
            hint="remove files that an older run with more ranks left behind",
        )


def _read_partitioned(store: ReadStore, models: Sequence[ModelStates], optim: Sequence[OptimStates]) -> Catalog:
    """The catalog of ZeRO-1, 2 or 3."""
    head, model = optim[0], models[0]
    if model.groups is None:
        raise model.state.corrupt(f"param_shapes is missing, which ZeRO-{head.stage} needs")
    for other in models[1:]:
        if other.groups != model.groups or other.frozen != model.frozen:
            raise other.state.corrupt(f"its param_shapes are not those of {model.state.file}")
    sizes = [[array.shape[0] for array in found.fp32] for found in optim]
    partition: Partition
    try:
        if head.stage == 3:
            partition = cut_parameters(model.groups, sizes)
        else:
            _check_groups(model, head)
            cut = cut_groups(model.groups, sizes, alignment=head.alignment)
            _check_slices(cut, optim)
            partition = cut
    except CorruptError as err:
        err.file = err.file or model.state.file
        raise
    shapes = {name: shape for group in model.groups for name, shape in group.items()}
    weights = buffers(model) | frozen(models, head.stage)
    flat = [found.fp32 for found in optim]
    weights |= {name: held_in_groups(partition, name, shape, flat) for name, shape in shapes.items()}
    notes: list[str] = []
    dropped: list[str] = []
    weights |= unlisted(model, weights, head.stage, notes, dropped)
    weights, aliases = with_shared(model, weights)
    if head.stage < 3:
        notes.append(
            "the model file's copies of the weights are not carried; they are rounded from the optimizer's masters"
        )
    states = states_by_parameter(store, partition, shapes, optim, dropped)
    names_of = {number: list(group) for number, group in enumerate(model.groups)}
    tree = tree_of(
        weights=weights,
        states={name: found for name, found in states.items() if found},
        groups=group_trees(head.param_groups, names_of if len(model.groups) == len(head.fp32) else {}),
        optimizer=head.beside,
        beside=model.beside,
    )
    catalog = assembled(tree, format="deepspeed", version=version_of(model), files=[model.state, head.state])
    return replace(
        catalog, iteration=iteration_of(model), aliases=aliases, notes=tuple(notes), dropped=tuple(dropped)
    ).with_facet(ZeroFacts(head.stage, len(optim)))


def _check_groups(model: ModelStates, head: OptimStates) -> None:
    assert model.groups is not None
    if len(model.groups) != len(head.fp32):
        raise model.state.corrupt(
            f"param_shapes has {len(model.groups)} groups, the optimizer's files have {len(head.fp32)}"
        )


def _check_slices(cut: CutGroups, optim: Sequence[OptimStates]) -> None:
    """What every file says of the parameters in it is what the shapes and sizes say.

    Raises:
        CorruptError: names the first parameter that is elsewhere.
    """
    if any(found.slices is None for found in optim):
        return
    wanted: dict[tuple[int, int, str], tuple[int, int]] = {}
    for name in cut.first:
        for run in cut.runs(name):
            wanted[run.rank, run.group, name] = (run.at, run.n)
    for rank, found in enumerate(optim):
        for group, slices in enumerate(found.slices or ()):
            for name, place in slices.items():
                here = wanted.pop((rank, group, name), None)
                if place != here and not (here is None and place[1] == 0):
                    raise found.state.corrupt(
                        f"param_slice_mappings say (start, elements) {place}, but by the shapes before it in its group "
                        f"it is {here}",
                        key=name,
                    )
    for rank, group, name in wanted:
        raise optim[rank].state.corrupt(
            f"param_slice_mappings do not list the parameter, which this rank's part of group {group} holds", key=name
        )


def _read_unpartitioned(store: ReadStore, files: RankFiles) -> Catalog:
    """The catalog of ZeRO-0: the module as stored, and the optimizer by numbers."""
    name = files.model or files.zero_model[0]
    model = model_states(read_state_file(store, name), has_zero_files=False)
    if model.groups is not None:
        raise MissingShardError(
            "the optimizer's files are not there, which hold the fp32 weights",
            file=f"*{name.replace('model_states', 'optim_states')}" if files.model is None else
            "*zero_pp_rank_0_mp_rank_00_optim_states.pt",
            hint="copy the checkpoint again, with all its files",
        )  # fmt: skip
    if files.model is None:
        raise model.state.corrupt("a file of ZeRO-3 without param_shapes")
    weights = {key: held_whole(array) for key, array in model.module.items()}
    weights, aliases = with_shared(model, weights)
    tree = tree_of(weights=weights, states={}, groups=[], optimizer={}, beside=model.beside)
    optimizer = model.state.root.get(OPTIMIZER)
    notes = []
    if optimizer is not None:
        tree[OPTIMIZER] = spread(optimizer, model.state)
        notes.append(
            "ZeRO-0 numbers the optimizer's parameters and does not say their names; its state keeps the numbers"
        )
    dp = model.state.root.get("dp_world_size")
    catalog = assembled(tree, format="deepspeed", version=version_of(model), files=[model.state])
    return replace(catalog, iteration=iteration_of(model), aliases=aliases, notes=tuple(notes)).with_facet(
        ZeroFacts(0, dp if type(dp) is int else 1)
    )


FORMAT = Format(
    name="deepspeed",
    title="DeepSpeed ZeRO",
    sniff=sniff,
    read=read,
    lay_out=None,
    own_folders=no_folders,
)
