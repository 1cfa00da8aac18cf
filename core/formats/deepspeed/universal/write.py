"""The files of a universal checkpoint to write, see ``core.formats.deepspeed.universal.format``.

The content is what DeepSpeed's loaders need. ZeRO-3 reads the step from ``optimizer_state.pt``,
ZeRO-1 and 2 read it from ``step.pt``: it is stored in both. ZeRO-3 reads another model file than
the other stages: there are two, the second of which lacks client state that contains tensors.

``optimizer_state.pt`` has the optimizer's parameter groups. ZeRO-1 and 2 iterate over their own
groups and this list together and stop, silently, at the end of the shorter one: their remaining
groups keep the weights that they were initialized with (seen with 0.19.8). Therefore empty entries,
which change no setting, extend the list to the number of parameters, unless it is DeepSpeed's own
and names every parameter.

ZeRO-3 applies the settings of the first entry to all its groups.

Groups of experts are named after their expert parallel size (``ep_size_2``); the engine replaces
the names of its groups by these, and later looks up process groups by them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from shlex import quote
from typing import TYPE_CHECKING

from core.arrays.dtypes import DTYPES
from core.engine.catalog.file_image import FileImage, literal_file
from core.engine.catalog.key_patterns import rename_hint
from core.engine.catalog.optimizer_keys import MASTERS, MOMENTS, is_optimizer_key
from core.engine.catalog.optimizer_keys import split_state_key as state_of_megatron
from core.engine.changes.factor_states import check_factors
from core.errors import UnsafeError, UnsupportedError, list_some
from core.files.store import check_name
from core.formats.deepspeed.model_states import ZeroFacts
from core.formats.deepspeed.tree import EXTRAS, OPTIMIZER, PARAM_GROUPS, PARAMS, STATE
from core.formats.deepspeed.universal.expert_parallel import EP_SIZE, expert_facts
from core.formats.deepspeed.universal.parameter import (
    CAT_DIM,
    DS_VERSION,
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
    split_state_path,
    stored_extras,
)
from core.formats.torch.weights_only import loadable
from core.formats.torch.zip.tree_layout import plan_tree
from core.pickle.fields import list_or_empty
from core.pickle.inert import TensorLeaf, as_mapping, make_ordered_dict, walk
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.catalog import TargetCatalog
    from core.engine.catalog.stored import PlannedArray

UCP_VERSION = 0.4
_RESERVED = frozenset({
    "module", "buffer_names", OPTIMIZER, "param_shapes", "frozen_param_shapes",
    "frozen_param_fragments", "shared_params", "checkpoint_parallel_dimensions",
    "universal_checkpoint_info", "dp_world_size", "mp_world_size",
})  # fmt: skip
"""Entries of a model file that objects cannot replace."""


@dataclass(slots=True)
class _ParameterFiles:
    """The directory of a parameter to write.

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
        """True if the optimizer has a state of the parameter."""
        return bool(self.states or self.values)


def lay_out(target: TargetCatalog) -> Sequence[FileImage]:
    """Describe the files of a root: ``global_stepN_universal/`` and ``latest_universal``.

    Args:
        target: every tensor is one array; preferably created from a result of ``for_universal``.
            ``iteration``, ``ties`` and ``ZeroFacts`` are written as well.

    Raises:
        UnsupportedError: a weight is not float32, a tensor or a setting does not belong to a
            parameter, or a name is reserved or cannot be that of a directory.
    """
    # Each parameter has a directory. A release has no iteration.
    number = _iteration(target)
    folder = "universal" if number is None else f"global_step{number}_universal"
    parameters = _parameters(target)
    directory_of = expert_facts(target).directory_of
    images = [
        image
        for parameter in parameters.values()
        if directory_of.get(parameter.name, parameter.name) == parameter.name
        for image in _parameter_images(target, parameter, f"{folder}/{ZERO}/{parameter.name}")
    ]
    # The optimizer's file contains groups and settings.
    trained = _trained(target, parameters)
    groups = param_groups(target, list(parameters), trained)
    images.append(
        _image(
            target,
            f"{folder}/{OPTIMIZER_FILE}",
            _optimizer_root(target, stored_groups(target, groups, trained)),
        )
    )
    # The two model files have the same content, except that ZeRO-3's has no tensors.
    root = _model_root(target, parameters, groups, trained)
    images.append(_image(target, f"{folder}/{MODEL_FILE}", root))
    without_tensors = {
        name: value
        for name, value in root.items()
        if not any(isinstance(node, TensorLeaf) for node in walk(value))
    }
    images.append(_image(target, f"{folder}/{ZERO_MODEL_FILE}", without_tensors))
    # Last, as it makes the directory the one that is loaded.
    return (*images, literal_file(LATEST, folder.encode("utf-8"), is_metadata=True))


def check(target: TargetCatalog) -> None:
    """Check names, dtypes, groups and entries like ``lay_out``, without planning files.

    Raises:
        UnsupportedError: see ``lay_out``.
    """
    parameters = _parameters(target)
    trained = _trained(target, parameters)
    groups = param_groups(target, list(parameters), trained)
    stored_groups(target, groups, trained)
    _model_root(target, parameters, groups, trained)


def _iteration(target: TargetCatalog) -> int | None:
    """Return the iteration to record; None for a release, or if the source has none."""
    return None if target.write.is_release else target.iteration


def _parameters(target: TargetCatalog) -> dict[str, _ParameterFiles]:
    """Return the directories to write, by parameter; of tied parameters, only the first has one.

    Raises:
        UnsupportedError: a tensor does not belong to a parameter, or cannot be stored; or the
            optimizer is SOAP, Shampoo or Adam-mini.
    """
    # Megatron's keys have the state before the parameter: a run of DeepSpeed has other names.
    for key in target.tensors:
        pair = state_of_megatron(key)
        if pair is not None and pair[0] in MASTERS | MOMENTS and pair[1] in target.tensors:
            raise UnsupportedError(
                "optimizer states with Megatron's names cannot be stored in a universal "
                "checkpoint, because DeepSpeed does not train models with these names",
                key=key,
                hint="convert the tensors to Hugging Face's names with --names hf, or drop the "
                "optimizer with --no-optim",
            )
    # Weights and buffers first, as states refer to them. Their keys become names of directories.
    states = [key for key in target.tensors if is_optimizer_key(key)]
    names = [key for key in target.tensors if key not in target.ties and not is_optimizer_key(key)]
    bad_names = [name for name in names if not _is_directory_name(name)]
    if bad_names:
        others_text = f" (nor can {list_some(bad_names[1:])})" if len(bad_names) > 1 else ""
        raise UnsupportedError(
            f"the key cannot be a directory name{others_text}",
            key=bad_names[0],
            hint=rename_hint(bad_names),
        )
    parameters: dict[str, _ParameterFiles] = {}
    for name in names:
        # The tensor must be the master weights of a parameter, or a buffer.
        tensor = target.tensors[name]
        kind = DTYPES[tensor.dtype].kind
        if kind == "packed" or (kind == "float" and tensor.dtype != "float32"):
            hint = f"cast the weights with --dtype float32 (or --dtype {quote(f'{name}=float32')})"
            raise UnsupportedError(
                f"the weights are {tensor.dtype} and have no master weights, but a universal "
                "checkpoint must contain float32 master weights",
                key=name,
                hint=hint if kind == "float" else "skip the tensor with --exclude",
            )
        parameters[name] = _ParameterFiles(name)
    # Assign each state to its parameter. A factor of a square matrix would pass for a state of its
    # elements.
    check_factors(states, option="--to deepspeed_universal")
    for key in states:
        state_key = split_state_path(key, parameters)
        if state_key is None:
            hint = (
                "rename the tensor to optimizer.state.<parameter>.<state> with --rename, skip "
                "it with --exclude, or drop the optimizer with --no-optim"
            )
            # Many scripts save a model under a key of its own, and the optimizer beside it.
            for prefix in sorted({name.partition(".")[0] + "." for name in parameters}):
                names_without = {name.removeprefix(prefix) for name in parameters}
                if split_state_path(key, names_without) is not None:
                    hint = f"remove the parameters' prefix with --strip-prefix '{prefix}'"
            raise UnsupportedError(
                "the optimizer tensor does not belong to any parameter that would be written",
                key=key,
                hint=hint,
            )
        state, name = state_key
        _check_state(target, key, name, state)
        parameters[name].states[state] = key
    # States that are not tensors, such as a step that is a number, are objects.
    for key, item in target.objects.items():
        state_key = split_state_path(key, parameters)
        if state_key is not None:
            state, name = state_key
            parameters[name].values[state] = item.value
    return parameters


def _is_directory_name(key: str) -> bool:
    """Return whether a key can be the name of a single directory, not of nested ones."""
    try:
        check_name(key)
    except UnsafeError:
        return False
    return "/" not in key and len(key.encode("utf-8", "replace")) <= 255


def _check_state(target: TargetCatalog, key: str, name: str, state: str) -> None:
    """Raise unless a tensor can be a state of a parameter.

    Args:
        key: the tensor.
        name, state: names of the parameter and of the state.

    Raises:
        UnsupportedError: the tensor has another shape, or the state an impossible name.
    """
    tensor, weight = target.tensors[key], target.tensors[name]
    problem, hint = None, "skip the tensor with --exclude"
    # ``for_universal`` has normally put the master weights in place of the weights.
    if state == MASTER:
        problem = (
            "both the master weights and the rounded weights are selected, but DeepSpeed stores "
            "only the master weights"
        )
        hint = "skip the rounded weights with --exclude"
    elif state == STEP:
        if tensor.n_elements != 1:
            problem = f"the step has shape {tensor.shape}, not one value"
    elif tensor.shape != weight.shape:
        problem = (
            f"the state has shape {tensor.shape}, but the parameter has shape {weight.shape}; "
            "DeepSpeed shards both the same way"
        )
    elif state == FP32:
        problem = f"a state cannot be named {FP32!r}, because the weights have that name"
    if problem is not None:
        raise UnsupportedError(problem, key=key, hint=hint)


def _parameter_images(
    target: TargetCatalog, parameter: _ParameterFiles, folder: str
) -> Iterable[FileImage]:
    """Describe the files of a parameter: its weights and states."""
    # How tensor parallelism shards it: as recorded; else along axis 0, and buffers not at all.
    item = target.objects.get(f"{EXTRAS}.{parameter.name}")
    recorded = as_mapping(item.value) if item is not None else None
    extras: dict[object, object] = {CAT_DIM: 0} if parameter.is_trained else {}
    if recorded is not None:
        extras = stored_extras(recorded)
    extras |= expert_facts(target).entries(parameter.name, target.tensor(parameter.name).shape)
    yield _image(target, f"{folder}/{FP32}.pt", {**extras, PARAM: TensorLeaf(parameter.name)})
    for state, key in parameter.states.items():
        leaf = TensorLeaf(key)
        yield _image(
            target, f"{folder}/{state}.pt", leaf if state == STEP else {**extras, PARAM: leaf}
        )
    for state, value in parameter.values.items():
        yield _image(target, f"{folder}/{state}.pt", value)


def _image(target: TargetCatalog, path: str, value: object) -> FileImage:
    """Describe a torch file, with the same names inside as ``torch.save`` uses.

    Raises:
        UnsupportedError: a tensor is not one complete array.
    """

    def array_of(key: str) -> PlannedArray:
        array = target.fragments(key)[0].array
        shape = target.tensor(key).shape
        state, name = split_state_path(key, target.tensors) or (None, key)
        if state != STEP:
            shape = expert_facts(target).stored_shape(name, shape)
        if array is None or array.shape != shape:
            raise UnsupportedError(
                "a universal checkpoint stores complete tensors, but this tensor is sharded",
                key=key,
            )
        return array

    stem = path.rpartition("/")[2].removesuffix(".pt")
    plan = plan_tree(loadable(value, packages=PACKAGES), array_of, prefix=stem)
    return plan.image(path)


def _optimizer_root(target: TargetCatalog, groups: list[object]) -> dict[object, object]:
    """Return the content of ``optimizer_state.pt``.

    Args:
        groups: result of ``stored_groups``.
    """
    # Values of the optimizer that are neither states nor settings, such as the loss scaler.
    prefix = f"{OPTIMIZER}."
    root: dict[object, object] = {}
    for key, item in target.objects.items():
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and not name.startswith((f"{STATE}.", f"{PARAM_GROUPS}.")):
            root[name] = item.value
    root["ds_version"] = DS_VERSION
    version = target.objects.get("ds_version")
    if version is not None and isinstance(version.value, str):
        root["ds_version"] = version.value
    facts = target.facet(ZeroFacts)
    if facts is not None and facts.stage is not None:
        root["zero_stage"] = facts.stage
    # ZeRO-3 reads the step, a tensor or a number, from the state dict of the wrapped optimizer.
    root[PARAM_GROUPS] = groups
    numbers = (
        item.value
        for key, item in target.objects.items()
        if (state_key := split_state_path(key, target.tensors)) is not None and state_key[0] == STEP
    )
    step = TensorLeaf(STEP_COPY) if STEP_COPY in target.hidden else next(numbers, None)
    if step is not None:
        root["optimizer_state_dict"] = {STATE: {0: {STEP: step}}, PARAM_GROUPS: groups}
    return root


def _trained(target: TargetCatalog, parameters: Mapping[str, _ParameterFiles]) -> list[str]:
    """Return the parameters that the optimizer trains: those with a state.

    Without any states, all floating-point parameters.
    """
    trained = [name for name, parameter in parameters.items() if parameter.is_trained]
    return trained or [
        name for name in parameters if DTYPES[target.tensors[name].dtype].kind == "float"
    ]


def _model_root(
    target: TargetCatalog,
    parameters: Mapping[str, _ParameterFiles],
    groups: Sequence[UniversalParamGroup],
    trained: Sequence[str],
) -> dict[object, object]:
    """Return the content of the model files: the entries of the loader, then all other objects.

    Args:
        trained: names of the parameters that the optimizer trains.

    Raises:
        UnsupportedError: an object has the name of an entry of the loader.
    """
    # Buffers are the tensors that are neither trained nor in a group. The entries that are always
    # empty here are ones that the loader accesses; the parallel degrees are those of one rank.
    optimized = {*trained, *(name for group in groups for name in group.names)}
    facts = target.facet(ZeroFacts)
    ep = expert_facts(target).ep
    ep_entry = {EP_SIZE: ep} if ep > 1 else {}
    root: dict[object, object] = {
        "module": make_ordered_dict({}),
        "buffer_names": [name for name in parameters if name not in optimized],
        OPTIMIZER: None,
        "param_shapes": [
            make_ordered_dict({name: target.tensors[name].shape for name in group.names})
            for group in groups
        ],
        "frozen_param_shapes": None,
        "shared_params": dict(target.ties),
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": _iteration(target) or 0,
        "dp_world_size": 1 if facts is None or facts.dp is None else facts.dp,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "universal_checkpoint_info": {"universal_checkpoint_version": UCP_VERSION, **ep_entry},
    }
    # Client state replaces defaults, such as ``lr_scheduler``, but no entry that is derived.
    for key, item in target.objects.items():
        if key.startswith((f"{OPTIMIZER}.", f"{EXTRAS}.")):
            continue
        if key in _RESERVED:
            raise UnsupportedError(
                "DeepSpeed uses an entry with this name for a different purpose",
                key=key,
                hint=rename_hint([key]),
            )
        root[key] = item.value
    return root


_EP_NAME = re.compile(r"ep_size_\d+")


@dataclass(frozen=True, slots=True)
class UniversalParamGroup:
    """A parameter group of the optimizer.

    Args:
        settings: learning rate and others; with {}, the run that loads keeps its own settings.
        names: names of the group's parameters.
    """

    settings: Mapping[str, object]
    names: Sequence[str]


def param_groups(
    target: TargetCatalog, names: Sequence[str], trained: Sequence[str]
) -> list[UniversalParamGroup]:
    """Build the parameter groups from the settings among the target's objects.

    The keys of settings are ``optimizer.param_groups.<number>.<setting>``, including ``params``,
    or, as flattened by torch, ``optimizer.param_groups.<parameter>.<setting>``. In the latter case
    parameters with equal settings become a group; without any settings, all become one.

    Args:
        names: names of all parameters that are written.
        trained: names of those that the optimizer trains.

    Raises:
        UnsupportedError: a setting belongs neither to a group nor to a parameter.
    """
    # Collect the settings by their owners. Names take precedence, as a parameter may be called "0".
    prefix = f"{OPTIMIZER}.{PARAM_GROUPS}."
    by_number: dict[int, dict[str, object]] = {}
    by_name: dict[str, dict[str, object]] = {}
    written = set(names)
    for key, item in target.objects.items():
        owner, _, setting = key.removeprefix(prefix).rpartition(".")
        if not key.startswith(prefix) or not owner:
            continue
        if owner in written:
            by_name.setdefault(owner, {})[setting] = item.value
        elif owner.isascii() and owner.isdigit():
            by_number.setdefault(int(owner), {})[setting] = item.value
        else:
            raise UnsupportedError(
                "the setting does not belong to any parameter that would be written",
                key=key,
                hint="skip the setting with --exclude",
            )
    # Numbered groups list their parameters, of which only some may be written.
    if by_number:
        groups = []
        for _, settings in sorted(by_number.items()):
            params = settings.pop(PARAMS, None)
            members = list_or_empty(params)
            groups.append(
                UniversalParamGroup(settings, [name for name in members if name in written])
            )
        return _at_ep_size(groups, expert_facts(target).ep)
    # Values need not be hashable: compare the settings of parameters as text.
    by_settings: dict[str, tuple[dict[str, object], list[str]]] = {}
    for name in trained:
        settings = by_name.get(name, {})
        by_settings.setdefault(repr(sorted(settings.items())), (settings, []))[1].append(name)
    return [UniversalParamGroup(settings, members) for settings, members in by_settings.values()]


def _at_ep_size(groups: Sequence[UniversalParamGroup], ep: int) -> list[UniversalParamGroup]:
    """Return the groups as an engine has them whose MoE layers all have the same ``ep_size``.

    Groups of experts are named after the size, and there is one for each size that the layers have.
    """
    result: list[UniversalParamGroup] = []
    previous: object = None
    for group in groups:
        name = group.settings.get("name")
        if group.settings.get("moe") is not True or not (
            isinstance(name, str) and _EP_NAME.fullmatch(name)
        ):
            result.append(group)
            previous = None
            continue
        settings = {**group.settings, "name": f"ep_size_{ep}"}
        # Groups that differ only in the size become one.
        if previous not in (None, name) and dict(result[-1].settings) == settings:
            result[-1] = UniversalParamGroup(settings, [*result[-1].names, *group.names])
        else:
            result.append(UniversalParamGroup(settings, group.names))
        previous = name
    return result


def stored_groups(
    target: TargetCatalog, groups: Sequence[UniversalParamGroup], trained: Sequence[str]
) -> list[object]:
    """Return ``param_groups`` in the form in which the file stores them.

    Args:
        trained: names of the parameters that the optimizer trains.
    """
    # The wrapped optimizer has one flat parameter per group.
    stored: list[object] = [
        {**group.settings, PARAMS: [number]} for number, group in enumerate(groups)
    ]
    # Extend the list, unless it is DeepSpeed's own and complete (see the module's docstring).
    named = {name for group in groups for name in group.names}
    facts = target.facet(ZeroFacts)
    is_own = facts is not None and facts.stage is not None
    if not (is_own and named.issuperset(trained) and all(group.settings for group in groups)):
        stored += [{PARAMS: []} for _ in range(len(trained) - len(stored))]
    return stored
