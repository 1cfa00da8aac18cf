"""Experts of DeepSpeed's ``MoE`` layers in a universal checkpoint, for one expert parallel size.

DeepSpeed's loader names a parameter's directory after the number that an expert has on its rank,
so that every rank of a larger EP size would read the first experts. If the files of a parameter say
``is_expert_param``, however, each rank takes its part of the tensor's rows. So the directory of a
number contains the experts that have this number, one below the other in the order of the ranks::

    4 experts, EP 2                          rank 0      rank 1
    zero/…deepspeed_experts.0.w/fp32.pt      expert 0    expert 2     {"is_expert_param": True,
    zero/…deepspeed_experts.1.w/fp32.pt      expert 1    expert 3      "ep_num_experts": rows, …}

``ep_num_experts`` is what the loader divides by EP: here the rows of the tensor. The model file
records EP as ``universal_checkpoint_info["expert_parallel_size"]``, an entry of this project that
DeepSpeed ignores, and ``param_shapes`` has the experts' global numbers; both are needed to read it.

Versions: DeepSpeed 0.19.8 loads it, if all MoE layers have the same ``ep_size``. At EP 1 the files
of experts are like all others. Not supported: parameters of experts without axes.

Source: DeepSpeed 0.19.8 ``checkpoint/universal_checkpoint.py`` (``load_hp_checkpoint_state``),
``runtime/base_optimizer.py``. Its own ``ds_to_universal.py`` writes only AutoEP's experts like
this (``native_moe`` is skipped).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.arrays.box import full_box
from core.engine.catalog.stored import PlannedArray
from core.engine.catalog.tensor import Fragment, TargetTensor, Tensor
from core.errors import CorruptError, UnsupportedError, UsageError
from core.formats.deepspeed.universal.parameter import CAT_DIM, STEP, split_state_path
from core.pickle.fields import FieldReader
from core.values import dataclass

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.engine.catalog.catalog import Catalog, TargetCatalog
    from core.engine.catalog.tensor import TargetTensor
    from core.formats.deepspeed.universal.parameter import UniversalParameter

IS_EXPERT = "is_expert_param"
ROWS = "ep_num_experts"
EP_SIZE = "expert_parallel_size"
_MAX_EP = 1 << 20


@dataclass(frozen=True, slots=True)
class ExpertParallelFacts:
    """A facet of the target catalog of a universal checkpoint for an EP size above 1.

    Args:
        ep: expert parallel size of the engine that will load it.
        directory_of: parameter of an expert → the parameter that names its directory.
    """

    ep: int
    directory_of: Mapping[str, str]

    def stored_shape(self, name: str, shape: Shape) -> Shape:
        """Return the shape of the tensor that contains a parameter, or a state of its shape."""
        return _stacked(shape, self.ep) if name in self.directory_of else shape

    def entries(self, name: str, shape: Shape) -> dict[object, object]:
        """Return the entries that make the loader cut the files of a parameter; {} for others."""
        if name not in self.directory_of:
            return {}
        return {IS_EXPERT: True, ROWS: self.ep * shape[0]}


_ANY_EP = ExpertParallelFacts(1, {})


def expert_facts(target: TargetCatalog) -> ExpertParallelFacts:
    """Return the facet of a target catalog, or that of EP 1, which changes nothing."""
    return target.facet(ExpertParallelFacts) or _ANY_EP


def expert_notes(target: TargetCatalog) -> list[str]:
    """Return a note that names the EP size at which DeepSpeed loads the experts."""
    from core.formats.deepspeed.experts import split_expert_name

    if not any(map(split_expert_name, target.tensors)):
        return []
    ep = expert_facts(target).ep
    other = (
        "DeepSpeed cannot load them with any other size"
        if ep > 1
        else "for a different size, add --ep-new N"
    )
    return [f"the experts are laid out for engines with ep_size={ep}; {other}"]


@dataclass(frozen=True, slots=True)
class _ExpertEntry:
    """A tensor or value of an expert.

    Args:
        first: key of the same entry of the expert that names the directory.
        ep_rank: index of the expert-parallel rank that has the expert.
        is_step: it is a step of the optimizer, of which a directory has only one.
    """

    first: str
    ep_rank: int
    is_step: bool


def cut_experts(
    source: Catalog, target: TargetCatalog, *, ep: int
) -> tuple[Catalog, TargetCatalog]:
    """Put the experts that have the same number on their ranks into the same arrays.

    Args:
        source: result of ``for_universal``.
        target: the target catalog for it, with one array per tensor.
        ep: expert parallel size of the engine that will load the checkpoint.

    Returns:
        Source and target. The steps of a directory are one tensor, whose copies are compared.

    Raises:
        UsageError: there are no experts of DeepSpeed's ``MoE`` layers, or they are not divisible.
        UnsupportedError: a parameter of an expert has no axes, or is unlike that of another expert.
    """
    from core.formats.deepspeed.experts import split_expert_name

    names = [key for key in target.tensors if split_state_path(key, target.tensors) is None]
    rank_of, directory_of = _assigned([name for name in names if split_expert_name(name)], ep=ep)
    if ep == 1:
        return source, target

    # Every tensor of an expert becomes a region of the array of its directory.
    entries: dict[str, _ExpertEntry] = {}
    for key in (*target.tensors, *target.objects):
        state, name = split_state_path(key, target.tensors) or (None, key)
        if name in directory_of:
            first = key.replace(name, directory_of[name])
            entries[key] = _ExpertEntry(first, rank_of[name], state == STEP)
    for key, entry in entries.items():
        _check_alike(target, key, entry)

    def in_directory(key: str, entry: _ExpertEntry) -> TargetTensor:
        """Return a tensor as a region of the array of its directory."""
        tensor = target.tensors[key]
        array = PlannedArray(entry.first, tensor.dtype, _stacked(tensor.shape, ep))
        at = (entry.ep_rank * tensor.shape[0], *(0 for _ in tensor.shape[1:]))
        fragment = Fragment(full_box(tensor.shape), array, at)
        return replace(tensor, tiling=lambda: (fragment,))

    # The steps of a directory are one tensor: the others become its copies.
    copies: dict[str, list[str]] = {}
    for key, entry in entries.items():
        if entry.is_step and key in target.tensors:
            copies.setdefault(entry.first, []).append(key)
    omitted = {key for key, entry in entries.items() if entry.is_step and key != entry.first}
    stored = {key: tensor for key, tensor in source.tensors.items() if key not in omitted}
    for first, keys in copies.items():
        others = (source.tensors[key] for key in keys if key != first)
        stored[first] = stored[first].with_replicas(*others)
    tensors = {
        key: in_directory(key, entries[key])
        if key in entries and not entries[key].is_step
        else tensor
        for key, tensor in target.tensors.items()
        if key not in omitted
    }
    objects = {key: item for key, item in target.objects.items() if key not in omitted}
    cut_source = replace(source, tensors=stored, objects=objects)
    cut_target = replace(target, tensors=tensors, objects=objects)
    return cut_source, cut_target.with_facet(ExpertParallelFacts(ep, directory_of))


def _assigned(names: Sequence[str], *, ep: int) -> tuple[dict[str, int], dict[str, str]]:
    """Return parameter → expert-parallel rank, and parameter → name of its directory.

    Args:
        names: the parameters of all experts.

    Raises:
        UsageError: there are none, or the experts of a layer are not divisible.
    """
    from core.formats.deepspeed.experts import numbered

    numbers: dict[str, set[int]] = {}
    for name in names:
        layer, number = _expert(name)
        numbers.setdefault(layer, set()).add(number)
    if not numbers:
        raise UsageError(
            "--ep-new cannot be used, because the checkpoint has no DeepSpeed MoE experts",
            hint="omit --ep-new",
        )
    for layer, experts in numbers.items():
        if len(experts) % ep or max(experts) >= len(experts):
            raise UsageError(
                f"--ep-new {ep} does not evenly divide the layer's {len(experts)} experts",
                key=layer.removesuffix("."),
                hint="use a size that divides the number of experts of every layer",
            )
    rank_of, directory_of = {}, {}
    for name in names:
        layer, number = _expert(name)
        rank_of[name], local = divmod(number, len(numbers[layer]) // ep)
        directory_of[name] = numbered(name, local)
    return rank_of, directory_of


def _expert(name: str) -> tuple[str, int]:
    from core.formats.deepspeed.experts import split_expert_name

    expert = split_expert_name(name)
    assert expert is not None, "the parameter belongs to an expert"
    return expert


def _check_alike(target: TargetCatalog, key: str, entry: _ExpertEntry) -> None:
    """Raise unless an entry of an expert can be stored together with that of another one.

    Raises:
        UnsupportedError: the two are unlike each other, or have no axis.
    """
    tensor, other = target.tensors.get(key), target.tensors.get(entry.first)
    problem = None
    if tensor is None:
        item = target.objects.get(entry.first)
        if item is None or item.value != target.objects[key].value:
            problem = "the value"
    elif other is None or (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
        problem = f"the tensor ({tensor.dtype}, shape {tensor.shape})"
    elif not tensor.shape and not entry.is_step:
        raise UnsupportedError(
            "a tensor without axes cannot be divided among expert-parallel ranks",
            key=key,
            hint="omit --ep-new, and load the checkpoint with ep_size=1",
        )
    if problem is not None:
        raise UnsupportedError(
            f"{problem} differs from that of {entry.first}, but both would be stored together",
            key=key,
            hint="omit --ep-new, and load the checkpoint with ep_size=1",
        )


def _stacked(shape: Shape, ep: int) -> Shape:
    """Return the shape of so many tensors one below the other."""
    return (ep * shape[0], *shape[1:])


def recorded_ep(info: Mapping[object, object], *, file: str) -> int:
    """Return the expert parallel size that a model file records; 1 if it records none.

    Args:
        info: the file's ``universal_checkpoint_info``.

    Raises:
        CorruptError: it is not a positive number.
    """
    ep = info.get(EP_SIZE, 1)
    return FieldReader(file).read_int(
        ep, EP_SIZE, least=1, most=_MAX_EP, expected="a number of ranks"
    )


def directories(folders: Iterable[str], *, ep: int) -> dict[str, tuple[str, int]]:
    """Return the parameters in the directories of a universal checkpoint.

    Args:
        folders: names of the directories.

    Returns:
        Parameter → (its directory, rank of the part of it that is the parameter).
    """
    from core.formats.deepspeed.experts import numbered, split_expert_name

    folders = list(folders)
    n_local: dict[str, int] = {}
    for folder in folders:
        if ep > 1 and (expert := split_expert_name(folder)) is not None:
            n_local[expert[0]] = max(n_local.get(expert[0], 0), expert[1] + 1)
    parameters: dict[str, tuple[str, int]] = {}
    for folder in folders:
        expert = split_expert_name(folder) if ep > 1 else None
        if expert is None:
            parameters[folder] = (folder, 0)
            continue
        layer, local = expert
        for ep_rank in range(ep):
            parameters[numbered(folder, ep_rank * n_local[layer] + local)] = (folder, ep_rank)
    return parameters


def part_of_stack(
    parameter: UniversalParameter, ep_rank: int, *, ep: int, folder: str
) -> UniversalParameter:
    """Return the parameter of one rank's expert out of the files of a directory.

    Args:
        parameter: the content of the directory.
        ep_rank: index of the rank.
        folder: path of the directory, for errors.

    Raises:
        CorruptError: the rows are not those of so many experts.
    """
    from core.formats.deepspeed.universal.parameter import UniversalParameter

    shape = parameter.weight.shape
    extras = dict(parameter.extras)
    is_expert, rows = extras.pop(IS_EXPERT, False), extras.pop(ROWS, None)
    if is_expert is not True or not shape or rows != shape[0] or shape[0] % ep:
        raise CorruptError(
            f"the weights have shape {shape} and {ROWS} is {rows!r:.40}, which does not match "
            f"{ep} expert-parallel ranks",
            file=f"{folder}/fp32.pt",
        )

    def part(tensor: object) -> object:
        # Steps and other values are the same for all ranks.
        if not isinstance(tensor, Tensor) or tensor.shape != shape:
            return tensor
        extent = shape[0] // ep
        return tensor.narrow(0, ep_rank * extent, extent)

    weight = part(parameter.weight)
    assert isinstance(weight, Tensor)
    states = {name: part(state) for name, state in parameter.states.items()}
    return UniversalParameter(weight, states, {} if extras in ({}, {CAT_DIM: 0}) else extras)
