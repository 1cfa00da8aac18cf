"""The content of a ``*_model_states.pt`` file of DeepSpeed.

It also tells the sizes of model parallelism. Files of rank m are those with ``mp_rank_m``. Ranks
are numbered by pipeline stage, then by tensor-parallel rank::

    pp 2, tp 2     mp_rank_00   stage 0, tensor-parallel rank 0
                   mp_rank_01   stage 0, tensor-parallel rank 1
                   mp_rank_02   stage 1, tensor-parallel rank 0
                   mp_rank_03   stage 1, tensor-parallel rank 1

``checkpoint_parallel_dimensions`` records both sizes. Versions before it have a pipeline if there
are files of layers, whose names have the tensor-parallel rank.

Source: DeepSpeed 0.19.8 ``runtime/engine.py`` (``_common_checkpoint_state``,
``_get_zero_param_shapes``, ``_get_shared_params``), ``checkpoint/constants.py``,
``checkpoint/reshape_meg_2d.py``, ``runtime/pipe/module.py`` (``ckpt_layer_path``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from core.engine.catalog.dropped import Dropped, dropped_each
from core.engine.catalog.mapping_attributes import attributes_of, record_attributes
from core.errors import CorruptError, UnsupportedError
from core.formats.deepspeed.files import UNIVERSAL_HINT, missing_model_parallel_rank
from core.pickle.fields import int_or_none, mapping_or_empty, text_or_none
from core.pickle.inert import TensorLeaf, as_mapping, walk
from core.values import dataclass, n_text

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray
    from core.formats.deepspeed.partition import Shapes
    from core.formats.deepspeed.state_file import StateFile


@dataclass(frozen=True, slots=True)
class ZeroFacts:
    """A facet (``catalog.facets``) of catalogs of DeepSpeed checkpoints, also universal ones.

    Args:
        stage: ZeRO stage, 0 to 3; None if it is not recorded.
        dp: number of data-parallel ranks; None if it is not recorded.
    """

    stage: int | None = None
    dp: int | None = None


@dataclass(frozen=True, slots=True)
class ModelStates:
    """A ``*_model_states.pt`` file.

    Args:
        state: the file.
        module: name of a parameter or buffer → its tensor; in ZeRO-3, parameters are empty.
        buffers: names of the buffers among them.
        groups: shapes of the optimizer's parameters by group; None without ZeRO.
        frozen: shapes of the parameters that are not trained.
        fragments: this file's part of each frozen parameter.
        shared: name → name of the parameter with which it shares its tensor.
        other_entries: all other entries.
        dropped: what else the module has.
    """

    state: StateFile
    module: Mapping[str, StoredArray]
    buffers: Sequence[str]
    groups: Sequence[Shapes] | None
    frozen: Shapes
    fragments: Mapping[str, StoredArray]
    shared: Mapping[str, str]
    other_entries: Mapping[str, object] = field(default_factory=dict)
    dropped: tuple[Dropped, ...] = ()


CONSUMED_MODEL = frozenset({
    "module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "optimizer", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "universal_checkpoint_info",
})  # fmt: skip
"""Entries of a model file that are parsed, or that only describe the run's ranks."""
NO_TENSOR = "not a tensor"
"""The reason for not carrying an entry of a module or a layer over."""
_AUTOEP = ("ds_autoep_layers", "autoep_layers")


def parse_model_states(state: StateFile, *, is_universal: bool = False) -> ModelStates:
    """Parse the content of a ``*_model_states.pt`` file.

    Args:
        is_universal: the file belongs to a universal checkpoint, which has complete experts.

    Raises:
        CorruptError: an entry is missing or of another type.
        UnsupportedError: the checkpoint has sharded experts.
    """
    root = state.root
    reader = state.fields
    if "module" not in root:
        raise state.corrupt("the entry 'module' is missing; this is not a model states file")
    if not is_universal:
        if any(root.get(name) for name in _AUTOEP):
            raise UnsupportedError(
                "experts that are sharded across ranks (AutoEP) are not supported",
                file=state.file,
                hint=UNIVERSAL_HINT,
            )
    # Parameters and buffers of the module, which may also have entries that are not tensors.
    entries = mapping_or_empty(root["module"])
    module = {
        state.name(name, "module"): state.arrays[value.key]
        for name, value in entries.items()
        if isinstance(value, TensorLeaf)
    }
    attributes = (f"module.{item.key}" for item in attributes_of(root["module"]))
    others = (f"module.{name}" for name, value in entries.items() if type(value) is not TensorLeaf)
    dropped = (*record_attributes(attributes), *dropped_each(others, NO_TENSOR))
    path = "buffer_names"
    buffers = [state.name(name, path) for name in reader.read_list(root.get(path) or [], path)]
    # Shapes of trained parameters by group; old versions stored a single group without a list.
    groups = None
    path = "param_shapes"
    stored_groups = root.get(path)
    if stored_groups is not None:
        if as_mapping(stored_groups) is not None:
            stored_groups = [stored_groups]
        groups = [
            state.shapes(shapes, f"{path}[{number}]")
            for number, shapes in enumerate(reader.read_list(stored_groups, path))
        ]
    # Shapes of frozen parameters, and this rank's parts of them.
    frozen = state.shapes(root.get("frozen_param_shapes") or {}, "frozen_param_shapes")
    path = "frozen_param_fragments"
    fragments = {
        state.name(name, path): state.tensor(value, f"{path}.{name}")
        for name, value in reader.read_mapping(root.get(path) or {}, path).items()
    }
    path = "shared_params"
    shared = {
        state.name(name, path): state.name(owner, f"{path}.{name}")
        for name, owner in reader.read_mapping(root.get(path) or {}, path).items()
    }
    other_entries = {str(name): value for name, value in root.items() if name not in CONSUMED_MODEL}
    return ModelStates(
        state, module, buffers, groups, frozen, fragments, shared, other_entries, dropped
    )


def record_other_files(models: Sequence[ModelStates]) -> tuple[Dropped, ...]:
    """Return the record of what the files of other ranks have beside the model.

    The catalog has the entries of the first rank. Equal ones of other ranks are copies, and
    Megatron's arguments have the rank itself.

    Args:
        models: the files of the model, of all ranks.
    """
    from core.pickle.equality import are_same

    head = models[0].other_entries
    names = {
        name: None
        for model in models[1:]
        for name, value in model.other_entries.items()
        if name != "args"
        # Leaves say nothing of the tensors' contents.
        and (
            any(isinstance(leaf, TensorLeaf) for leaf in walk([value]))
            or not are_same(value, head.get(name))
        )
    }
    return dropped_each(
        (f"{name} of other ranks" for name in names), "the first rank's value is kept"
    )


def version_of(model: ModelStates) -> str | None:
    """Return DeepSpeed's version; None if the model file does not record it."""
    return text_or_none(model.other_entries.get("ds_version"))


def find_iteration(model: ModelStates) -> int | None:
    """Return the training script's iteration, else the number of optimizer steps, else None."""
    entries = model.other_entries
    numbers = (int_or_none(entries.get(name)) for name in ("iteration", "global_steps"))
    return next((number for number in numbers if number is not None), None)


@dataclass(frozen=True, slots=True)
class StageGrid:
    """Sizes of pipeline and tensor parallelism.

    Args:
        pp: number of pipeline stages.
        tp: number of tensor-parallel ranks.
    """

    pp: int
    tp: int


def recorded_size(model: ModelStates) -> int:
    """Return the number of model-parallel ranks that a model file records; 1 without a record."""
    degrees = mapping_or_empty(model.state.root.get("checkpoint_parallel_dimensions"))
    tp, pp = degrees.get("tp_degree"), degrees.get("pp_degree")
    product = tp * pp if type(tp) is int and type(pp) is int else 1
    return max(product, int_or_none(model.state.root.get("mp_world_size")) or 1)


def grid_of(model: ModelStates, n_ranks: int, layers: Mapping[int, Mapping[int, str]]) -> StageGrid:
    """Return the sizes of a checkpoint's parallelism.

    Args:
        model: the model file of rank 0.
        n_ranks: number of model-parallel ranks that have files.
        layers: number of a layer → tensor-parallel rank → its file.

    Raises:
        MissingShardError: a rank has no files.
        CorruptError: the recorded sizes and the files contradict each other.
    """
    if recorded_size(model) > n_ranks:
        raise missing_model_parallel_rank(n_ranks)
    degrees = mapping_or_empty(model.state.root.get("checkpoint_parallel_dimensions"))
    tp, pp = degrees.get("tp_degree"), degrees.get("pp_degree")
    if type(tp) is not int or type(pp) is not int:
        tp = len(next(iter(layers.values()))) if layers else n_ranks
        pp = n_ranks // tp
    if pp < 1 or tp < 1 or pp * tp != n_ranks:
        raise CorruptError(
            f"there are files for {n_ranks} model-parallel ranks, but the checkpoint records {pp} "
            f"pipeline stages with {tp} tensor-parallel ranks each",
            file=model.state.file,
            hint="remove the files that an older run with more ranks left behind",
        )
    for layer, files in layers.items():
        if set(files) != set(range(tp)):
            raise CorruptError(
                f"layer {layer} has files for {n_text(len(files), 'tensor-parallel rank')} "
                f"({', '.join(map(str, sorted(files)))}), but there are "
                f"{tp} ranks",
                file=next(iter(files.values())),
                hint="remove the files that an older run with more ranks left behind"
                if max(files) >= tp
                else "copy the checkpoint again, with all its files",
            )
    return StageGrid(pp, tp)
