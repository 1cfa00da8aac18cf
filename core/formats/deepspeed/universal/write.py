"""Laying out a universal checkpoint; ``core.formats.deepspeed.universal.format`` describes its
files.

The content follows what DeepSpeed's loaders ask for. ZeRO-3 takes the step from
``optimizer_state.pt``, ZeRO-1 and 2 from ``step.pt``: it is stored in both. ZeRO-3 looks for
another model file than the others: there are two, of which the second one is without client state
that holds tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.arrays.dtypes import DTYPES
from core.catalog.file_image import FileImage, literal_file
from core.catalog.key_patterns import listed_keys, rename_hint
from core.changes.rename import is_optimizer_key
from core.errors import UnsafeError, UnsupportedError
from core.files.store import check_name
from core.formats.deepspeed.facets import ZeroFacts
from core.formats.deepspeed.tree import OPTIMIZER, PARAM_GROUPS, STATE
from core.formats.deepspeed.universal.groups import UniversalParamGroup, param_groups, stored_groups
from core.formats.deepspeed.universal.names import (
    CAT_DIM,
    DS_VERSION,
    EXTRAS,
    FP32,
    LATEST,
    MASTER,
    MODEL_FILE,
    OPTIMIZER_FILE,
    PACKAGES,
    PARAM,
    STEP,
    STEP_COPY,
    ZERO,
    ZERO_MODEL_FILE,
    state_of,
    stored_extras,
)
from core.formats.torch.format import plan_tree
from core.formats.torch.refused import loadable
from core.pickle.inert import TensorLeaf, as_mapping, make_ordered_dict, walk

if TYPE_CHECKING:
    from core.catalog.catalog import TargetCatalog, TensorMeta
    from core.catalog.stored import PlannedArray

UCP_VERSION = 0.4
_RESERVED = frozenset({
    "module", "buffer_names", OPTIMIZER, "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "checkpoint_parallel_dimensions", "universal_checkpoint_info", "dp_world_size", "mp_world_size",
})  # fmt: skip


@dataclass(slots=True)
class _ParameterFiles:
    """A parameter's directory to write.

    Args:
        name: name of the parameter.
        states: state name → key of its tensor.
        values: state name → value, for states that are not tensors.
    """

    name: str
    states: dict[str, str] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)

    @property
    def is_trained(self) -> bool:
        """Return whether the optimizer has a state of it."""
        return bool(self.states or self.values)


def lay_out(target: TargetCatalog) -> Sequence[FileImage]:
    """Return the images of a root: ``global_stepN_universal`` with its files, and
    ``latest_universal``.

    Args:
        target: every tensor is one array; best made from a result of ``for_universal``.
            ``iteration``, ``aliases`` and ``ZeroFacts`` are written as well.

    Raises:
        UnsupportedError: a weight is not float32, or a tensor belongs to no parameter; names it.
    """
    # Each parameter has a directory.
    number = _iteration(target)
    folder = "universal" if number is None else f"global_step{number}_universal"
    aliases = _aliases(target)
    parameters = _parameters(target, aliases)
    images = [
        image
        for parameter in parameters.values()
        for image in _parameter_images(target, parameter, f"{folder}/{ZERO}/{parameter.name}")
    ]
    # Groups and settings go to the optimizer's file.
    trained = _trained(target, parameters)
    groups = param_groups(target, list(parameters), trained)
    images.append(
        _image(
            target,
            f"{folder}/{OPTIMIZER_FILE}",
            _optimizer_root(target, stored_groups(target, groups, trained)),
        )
    )
    # The same client state for both loaders; ZeRO-3's is without tensors.
    root = _model_root(target, parameters, groups, trained, aliases)
    images.append(_image(target, f"{folder}/{MODEL_FILE}", root))
    without_tensors = {
        name: value
        for name, value in root.items()
        if not any(isinstance(node, TensorLeaf) for node in walk(value))
    }
    images.append(_image(target, f"{folder}/{ZERO_MODEL_FILE}", without_tensors))
    return (*images, literal_file(LATEST, folder.encode("utf-8"), is_metadata=True))


def check(target: TargetCatalog) -> None:
    """Raise what ``lay_out`` would raise about names, dtypes, groups and entries, without planning
    files.
    """
    aliases = _aliases(target)
    parameters = _parameters(target, aliases)
    trained = _trained(target, parameters)
    groups = param_groups(target, list(parameters), trained)
    stored_groups(target, groups, trained)
    _model_root(target, parameters, groups, trained, aliases)


def _iteration(target: TargetCatalog) -> int | None:
    return None if target.write.is_release else target.iteration


def _aliases(target: TargetCatalog) -> dict[str, str]:
    """Return name → name of the equal parameter that is written."""
    aliases = {}
    for key, owner in target.aliases.items():
        meta, other = target.tensors.get(key), target.tensors.get(owner)
        if (
            meta is not None
            and other is not None
            and (meta.dtype, meta.shape) == (other.dtype, other.shape)
        ):
            aliases[key] = owner
    return aliases


def _parameters(target: TargetCatalog, aliases: Mapping[str, str]) -> dict[str, _ParameterFiles]:
    """Return the directories to write, by name."""
    parameters: dict[str, _ParameterFiles] = {}
    states: list[str] = []
    # Weights and buffers first: states refer to them.
    _check_names(key for key in target.tensors if key not in aliases and not is_optimizer_key(key))
    for key, meta in target.tensors.items():
        if is_optimizer_key(key):
            states.append(key)
        elif key not in aliases:
            _check_weight(meta)
            parameters[key] = _ParameterFiles(key)
    # Assign each state to its parameter.
    for key in states:
        state_key = state_of(key, parameters)
        if state_key is None:
            raise UnsupportedError(
                "the tensor belongs to the optimizer, but to no parameter that is written",
                key=key,
                hint="its name should be optimizer.state.<parameter>.<state>: rename it with --rename, or leave it out "
                "with --exclude, all of them with --no-optim",
            )
        name, state = state_key
        _check_state(target, key, name, state)
        parameters[name].states[state] = key
    for key, item in target.objects.items():
        state_key = state_of(key, parameters)
        if state_key is not None:
            parameters[state_key[0]].values[state_key[1]] = item.value
    return parameters


def _check_names(keys: Iterable[str]) -> None:
    """Raise unless every key can be the name of a parameter's directory.

    Raises:
        UnsupportedError: names the keys that cannot.
    """
    bad_keys = [key for key in keys if not _is_directory_name(key)]
    if bad_keys:
        rest = f"; nor can {listed_keys(bad_keys[1:])}" if len(bad_keys) > 1 else ""
        raise UnsupportedError(
            f"the name cannot be that of a directory{rest}",
            key=bad_keys[0],
            hint=rename_hint(bad_keys),
        )


def _is_directory_name(key: str) -> bool:
    try:
        check_name(key)
    except UnsafeError:
        return False
    return "/" not in key and len(key.encode("utf-8", "replace")) <= 255


def _check_weight(meta: TensorMeta) -> None:
    """Raise unless the tensor can be a parameter's masters, or a buffer."""
    kind = DTYPES[meta.dtype].kind
    if kind == "packed" or (kind == "float" and meta.dtype != "float32"):
        hint = "widen it: --dtype float32" + (
            f" (or --dtype '{meta.key}=float32')" if kind == "float" else ""
        )
        raise UnsupportedError(
            f"the weights are {meta.dtype} without masters, but a universal checkpoint holds float32 masters",
            key=meta.key,
            hint=hint if kind == "float" else "leave it out with --exclude",
        )


def _check_state(target: TargetCatalog, key: str, name: str, state: str) -> None:
    """Raise unless the tensor can be a state of the parameter."""
    meta, weight = target.tensors[key], target.tensors[name]
    if state == MASTER:
        raise UnsupportedError(
            "both the masters and the rounded weights are selected",
            key=key,
            hint="leave the rounded weights out with --exclude",
        )
    if state == STEP:
        if meta.n_elements != 1:
            raise UnsupportedError(
                f"the step has shape {meta.shape}, not one value",
                key=key,
                hint="leave it out with --exclude",
            )
    elif meta.shape != weight.shape:
        raise UnsupportedError(
            f"the state has shape {meta.shape}, but the parameter {weight.shape}; DeepSpeed cuts both in the same way",
            key=key,
            hint="leave it out with --exclude",
        )
    if state == FP32:
        raise UnsupportedError(
            f"a state cannot have the name {FP32!r}, which is that of the weights",
            key=key,
            hint="leave it out with --exclude",
        )


def _parameter_images(
    target: TargetCatalog, parameter: _ParameterFiles, folder: str
) -> Iterable[FileImage]:
    """Yield the images of a parameter's files."""
    item = target.objects.get(f"{EXTRAS}.{parameter.name}")
    stated = as_mapping(item.value) if item is not None else None
    extras: dict[object, object] = {CAT_DIM: 0} if parameter.is_trained else {}
    if stated is not None:
        extras = stored_extras(stated)
    yield _image(target, f"{folder}/{FP32}.pt", {**extras, PARAM: TensorLeaf(parameter.name)})
    for state, key in parameter.states.items():
        leaf = TensorLeaf(key)
        yield _image(
            target, f"{folder}/{state}.pt", leaf if state == STEP else {**extras, PARAM: leaf}
        )
    for state, value in parameter.values.items():
        yield _image(target, f"{folder}/{state}.pt", value)


def _image(target: TargetCatalog, path: str, value: object) -> FileImage:
    """Return the image of a torch file, with the names inside that ``torch.save`` would use."""

    def array_of(key: str) -> PlannedArray:
        array = target.fragments(key)[0].array
        if array is None or array.shape != target.meta(key).shape:
            raise UnsupportedError(
                "a universal checkpoint needs every tensor in one piece", key=key
            )
        return array

    stem = path.rpartition("/")[2].removesuffix(".pt")
    plan = plan_tree(loadable(value, packages=PACKAGES), array_of, prefix=stem)
    return FileImage(path, plan.size, plan.arrays, plan.literals)


def _optimizer_root(target: TargetCatalog, listed: list[object]) -> dict[object, object]:
    """Return the content of ``optimizer_state.pt``."""
    prefix = f"{OPTIMIZER}."
    root: dict[object, object] = {}
    for key, item in target.objects.items():
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and not name.startswith((f"{STATE}.", f"{PARAM_GROUPS}.")):
            root[name] = item.value
    root["ds_version"] = _version(target)
    facts = target.facet(ZeroFacts)
    if facts is not None and facts.stage is not None:
        root["zero_stage"] = facts.stage
    root[PARAM_GROUPS] = listed
    step = _step(target)
    if step is not None:
        root["optimizer_state_dict"] = {STATE: {0: {STEP: step}}, PARAM_GROUPS: listed}
    return root


def _version(target: TargetCatalog) -> object:
    stated = target.objects.get("ds_version")
    return stated.value if stated is not None and isinstance(stated.value, str) else DS_VERSION


def _step(target: TargetCatalog) -> object:
    """Return the step for ``optimizer_state.pt``, or None."""
    if STEP_COPY in target.hidden:
        return TensorLeaf(STEP_COPY)
    for key, item in target.objects.items():
        state_key = state_of(key, target.tensors)
        if state_key is not None and state_key[1] == STEP:
            return item.value
    return None


def _trained(target: TargetCatalog, parameters: Mapping[str, _ParameterFiles]) -> list[str]:
    """Return the parameters in the optimizer: those with a state, else all that could have one."""
    trained = [name for name, parameter in parameters.items() if parameter.is_trained]
    return trained or [
        name for name in parameters if DTYPES[target.tensors[name].dtype].kind == "float"
    ]


def _model_root(
    target: TargetCatalog,
    parameters: Mapping[str, _ParameterFiles],
    groups: Sequence[UniversalParamGroup],
    trained: Sequence[str],
    aliases: Mapping[str, str],
) -> dict[object, object]:
    """Return the content of the model files: what the loader asks for, then all other objects."""
    optimized = {*trained, *(name for group in groups for name in group.names)}
    facts = target.facet(ZeroFacts)
    root: dict[object, object] = {
        "module": make_ordered_dict({}),
        "buffer_names": [name for name in parameters if name not in optimized],
        OPTIMIZER: None,
        "param_shapes": [
            make_ordered_dict({name: target.tensors[name].shape for name in group.names})
            for group in groups
        ],
        "frozen_param_shapes": None,
        "shared_params": dict(aliases),
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": _iteration(target) or 0,
        "dp_world_size": 1 if facts is None or facts.dp is None else facts.dp,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "universal_checkpoint_info": {"universal_checkpoint_version": UCP_VERSION},
    }
    for key, item in target.objects.items():
        if key.startswith((f"{OPTIMIZER}.", f"{EXTRAS}.")):
            continue
        if key in _RESERVED:
            raise UnsupportedError(
                "DeepSpeed uses an entry with this name for something else",
                key=key,
                hint=rename_hint([key]),
            )
        root[key] = item.value
    return root
