"""The content of a ``*_model_states.pt`` file of DeepSpeed.

Source: DeepSpeed 0.19.8 ``runtime/engine.py`` (``_common_checkpoint_state``,
``_get_zero_param_shapes``, ``_get_shared_params``); ``checkpoint/constants.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.errors import UnsupportedError
from core.formats.deepspeed.files import way_out
from core.pickle.inert import TensorLeaf, as_mapping

if TYPE_CHECKING:
    from core.catalog.stored import StoredArray
    from core.formats.deepspeed.partition import Shapes
    from core.formats.deepspeed.state_file import StateFile


@dataclass(frozen=True, slots=True)
class ModelStates:
    """A ``*_model_states.pt`` file.

    Args:
        state: the file.
        module: parameter and buffer name → its tensor; ZeRO-3 leaves parameters empty.
        buffers: names of the buffers among them.
        groups: the optimizer's parameters by group, or None without ZeRO.
        frozen: parameters that are not trained, with their shapes.
        fragments: this file's part of each frozen parameter.
        shared: name → name of the parameter that it shares.
        beside: all other entries.
    """

    state: StateFile
    module: Mapping[str, StoredArray]
    buffers: Sequence[str]
    groups: Sequence[Shapes] | None
    frozen: Shapes
    fragments: Mapping[str, StoredArray]
    shared: Mapping[str, str]
    beside: Mapping[str, object] = field(default_factory=dict)


CONSUMED_MODEL = frozenset({
    "module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "optimizer", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "universal_checkpoint_info",
})  # fmt: skip
_AUTOEP = ("ds_autoep_layers", "autoep_layers")


def parse_model_states(
    state: StateFile, *, is_universal: bool = False, has_zero_files: bool = True
) -> ModelStates:
    """Parse the content of a ``*_model_states.pt`` file.

    Args:
        is_universal: whether it belongs to a universal checkpoint, which has no model parallelism.
        has_zero_files: whether there are optimizer files of ZeRO.

    Raises:
        CorruptError: an entry is missing or of another type.
        UnsupportedError: the checkpoint is model parallel, or has experts.
    """
    root = state.root
    if "module" not in root:
        raise state.corrupt("the entry 'module' is missing; this is not a file of model states")
    if not is_universal:
        _refuse_parallel(state, has_zero_files=has_zero_files)
    # Parameters and buffers of the module.
    module = {}
    for name, value in (as_mapping(root["module"]) or {}).items():
        if isinstance(value, TensorLeaf):
            module[state.name(name, "module")] = state.arrays[value.key]
    buffers = [
        state.name(name, "buffer_names")
        for name in state.items(root.get("buffer_names") or [], "buffer_names")
    ]
    # Shapes of trained parameters; shapes and parts of frozen ones; names of shared ones.
    groups = _param_shapes(state)
    frozen = state.shapes(root.get("frozen_param_shapes") or {}, "frozen_param_shapes")
    fragments = {
        state.name(name, "frozen_param_fragments"): state.tensor(
            value, f"frozen_param_fragments.{name}"
        )
        for name, value in state.mapping(
            root.get("frozen_param_fragments") or {}, "frozen_param_fragments"
        ).items()
    }
    shared = {
        state.name(name, "shared_params"): state.name(owner, f"shared_params.{name}")
        for name, owner in state.mapping(root.get("shared_params") or {}, "shared_params").items()
    }
    other_entries = {str(name): value for name, value in root.items() if name not in CONSUMED_MODEL}
    return ModelStates(state, module, buffers, groups, frozen, fragments, shared, other_entries)


def _param_shapes(state: StateFile) -> list[Shapes] | None:
    """Return the optimizer's parameters and their shapes by group; None without ZeRO."""
    groups = state.root.get("param_shapes")
    if groups is None:
        return None
    if as_mapping(groups) is not None:  # one group, in files of old versions
        groups = [groups]
    listed = state.items(groups, "param_shapes")
    return [state.shapes(shapes, f"param_shapes[{number}]") for number, shapes in enumerate(listed)]


def _refuse_parallel(state: StateFile, *, has_zero_files: bool) -> None:
    """Raise if the file is one of several model-parallel ranks, or has cut experts."""
    degrees = as_mapping(state.root.get("checkpoint_parallel_dimensions")) or {}
    for name, kind in (("tp_degree", "tensor"), ("pp_degree", "pipeline")):
        if isinstance(degrees.get(name), int) and degrees[name] != 1:
            raise UnsupportedError(
                f"saved with {kind} parallelism of {degrees[name]}, whose pieces depend on the model",
                file=state.file,
                hint=way_out(has_zero_files=has_zero_files),
            )
    size = state.root.get("mp_world_size")
    if isinstance(size, int) and size > 1:
        raise UnsupportedError(
            f"saved with {size} model-parallel ranks, whose pieces depend on the model",
            file=state.file,
            hint=way_out(has_zero_files=has_zero_files),
        )
    if any(state.root.get(name) for name in _AUTOEP):
        raise UnsupportedError(
            "experts that are cut among ranks (AutoEP) are not supported",
            file=state.file,
            hint=way_out(has_zero_files=has_zero_files),
        )


def version_of(model: ModelStates) -> str | None:
    """Return DeepSpeed's version, as the model file states it; None if it does not."""
    version = model.beside.get("ds_version")
    return version if isinstance(version, str) else None


def iteration_of(model: ModelStates) -> int | None:
    """Return the iteration that the training script states, else the number of optimizer steps;
    None without both.
    """
    for name in ("iteration", "global_steps"):
        number = model.beside.get(name)
        if type(number) is int:
            return number
    return None
