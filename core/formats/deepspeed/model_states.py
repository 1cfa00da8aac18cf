"""What a ``*_model_states.pt`` file of DeepSpeed says.

Source: DeepSpeed 0.19.8 ``runtime/engine.py`` (``_common_checkpoint_state``, ``_get_zero_param_shapes``,
``_get_shared_params``); ``checkpoint/constants.py``.
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
        fragments: what this file holds of each frozen parameter.
        shared: name → the name of the parameter that it is.
        beside: every other entry.
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


def model_states(state: StateFile, *, is_universal: bool = False, has_zero_files: bool = True) -> ModelStates:
    """The content of a ``*_model_states.pt`` file.

    Args:
        is_universal: it lies in a universal checkpoint, which is free of model parallelism.
        has_zero_files: there are optimizer files of ZeRO with it.

    Raises:
        CorruptError: an entry is missing or of another type.
        UnsupportedError: the checkpoint is model parallel, or has experts.
    """
    root = state.root
    if "module" not in root:
        raise state.corrupt("the entry 'module' is missing; this is no file of model states")
    if not is_universal:
        _refuse_parallel(state, has_zero_files=has_zero_files)
    module = {}
    for name, value in (as_mapping(root["module"]) or {}).items():
        if isinstance(value, TensorLeaf):
            module[state.name(name, "module")] = state.arrays[value.key]
    buffers = [state.name(name, "buffer_names") for name in state.items(root.get("buffer_names") or [], "buffer_names")]
    found = root.get("param_shapes")
    if found is not None and as_mapping(found) is not None:
        found = [found]
    groups = None if found is None else [
        state.shapes(shapes, f"param_shapes[{number}]")
        for number, shapes in enumerate(state.items(found, "param_shapes"))
    ]  # fmt: skip
    frozen = state.shapes(root.get("frozen_param_shapes") or {}, "frozen_param_shapes")
    fragments = {
        state.name(name, "frozen_param_fragments"): state.tensor(value, f"frozen_param_fragments.{name}")
        for name, value in state.mapping(root.get("frozen_param_fragments") or {}, "frozen_param_fragments").items()
    }
    shared = {
        state.name(name, "shared_params"): state.name(owner, f"shared_params.{name}")
        for name, owner in state.mapping(root.get("shared_params") or {}, "shared_params").items()
    }
    beside = {str(name): value for name, value in root.items() if name not in CONSUMED_MODEL}
    return ModelStates(state, module, buffers, groups, frozen, fragments, shared, beside)


def _refuse_parallel(state: StateFile, *, has_zero_files: bool) -> None:
    degrees = as_mapping(state.root.get("checkpoint_parallel_dimensions")) or {}
    for name, what in (("tp_degree", "tensor"), ("pp_degree", "pipeline")):
        if isinstance(degrees.get(name), int) and degrees[name] != 1:
            raise UnsupportedError(
                f"saved with {what} parallelism of {degrees[name]}, whose pieces depend on the model",
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
            "experts that are cut among ranks (AutoEP) are not read",
            file=state.file,
            hint=way_out(has_zero_files=has_zero_files),
        )


def version_of(model: ModelStates) -> str | None:
    """DeepSpeed's version, as the model file states it."""
    found = model.beside.get("ds_version")
    return found if isinstance(found, str) else None


def iteration_of(model: ModelStates) -> int | None:
    """Return the iteration that the training script states, else the number of optimizer steps; None without both."""
    for name in ("iteration", "global_steps"):
        number = model.beside.get(name)
        if type(number) is int:
            return number
    return None
