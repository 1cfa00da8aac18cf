"""The assignment of parameters to the param groups of a Megatron optimizer.

Neither rank files nor torch_dist store the names of a group's parameters. Known are:

* Order: groups list the trained parameters in the order of the state dict, chunk by chunk, without
  buffers, extra states and frozen parameters. A tied copy of the embedding is a parameter of its
  own.
* Settings: ``wd_mult`` 0 marks biases and vectors; ``is_expert_parallel`` experts that expert
  parallelism distributes; another learning rate embedding and output layer, or with MuP the
  matrices between them. A ``Policy`` decides which vectors are exempt from weight decay; the
  training arguments name the policy of the run. Settings without ``betas`` are Muon's, which trains
  the matrices except embedding and output layer; Adam trains the rest.
* Sizes: the number of parameters in a group, and their shapes.

``assign`` searches for the assignment that fits all of these, and compares master weights with
weights if it can. The position of a group in the list is no evidence: before megatron-core 0.16
every pipeline stage may have another order.

Source: megatron-core 0.12.1, 0.15.0 and 0.16.1 ``core/optimizer/__init__.py``
``_get_param_groups``, ``get_standard_config_overrides``; 0.16.1 ``core/optimizer/muon.py``;
Megatron-LM d98e8a64 ``core/optimizer/emerging_optimizers.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from core.arrays.box import Shape
from core.errors import UnsupportedError
from core.values import dataclass

HALF = ("float16", "bfloat16")
"""Dtypes of the parameters that have master weights."""
EXPERT = "is_expert_parallel"
_IDENTITY = ("wd_mult", "lr_mult", EXPERT, "is_decoupled_lr", "max_lr", "min_lr", "eps")
_ADAPTER = re.compile(r"(^|\.)(linear_in|linear_out|lora_[ab]|adapter)(\.|$)")
_QK_NORM = re.compile(r"[qk]_layernorm\.")
_ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")
_MAX_STATES = 1 << 12
HINT = (
    "drop the optimizer with --no-optim; the weights are carried over exactly, but training "
    "continues with a fresh optimizer"
)
"""The next step where an optimizer cannot be resharded."""


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties of a parameter that decide its group.

    Args:
        is_exempt: the parameter is exempt from weight decay.
        is_expert: the parameter belongs to an expert that expert parallelism distributes.
        has_own_lr: the learning rate of the parameter differs from that of most parameters.
        is_muon: Muon trains the parameter, if the run has it.
    """

    is_exempt: bool
    is_expert: bool
    has_own_lr: bool
    is_muon: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules by which a run sorts parameters into groups.

    Args:
        exempt: parameters without weight decay: ``vectors`` (and biases), the same without
            ``qk_norms``, or the same with ``embeddings``.
        own_lr: parameters with a learning rate of their own: the ``ends`` of the model, or
            ``matrices`` (MuP).
        trained: ``all`` parameters, or only ``adapters``.
    """

    exempt: str = "vectors"
    own_lr: str = "ends"
    trained: str = "all"

    def traits(self, name: str, n_axes: int, *, is_expert: bool) -> Traits | None:
        """Return the traits of a parameter; None if it is frozen.

        Args:
            name: local or global name.
            n_axes: number of axes of the parameter.
        """
        if self.trained == "adapters" and _ADAPTER.search(name) is None:
            return None
        is_exempt = n_axes == 1 or name.endswith(".bias")
        if self.exempt == "qk_norms":
            is_exempt = is_exempt and _QK_NORM.search(name) is None
        elif self.exempt == "embeddings":
            is_exempt = is_exempt or "embedding" in name
        if self.own_lr == "ends":
            has_own_lr = name.endswith(_ENDS)
        else:
            has_own_lr = n_axes > 1 and "embedding" not in name
        is_muon = n_axes == 2 and not name.endswith(_ENDS)
        return Traits(is_exempt, is_expert, has_own_lr, is_muon)


def policies_of(args: Mapping[str, object]) -> Iterator[Policy]:
    """Yield all policies, starting with that of the training arguments."""
    exempt = "vectors"
    if (
        args.get("apply_wd_to_qk_layernorm")
        or args.get("no_weight_decay_cond_type") in _QK_CONDITIONS
    ):
        exempt = "qk_norms"
    elif args.get("embedding_init_method_std"):
        exempt = "embeddings"
    own_lr = "matrices" if args.get("use_mup") and not args.get("decoupled_lr") else "ends"

    # The arguments may not be those of the run that saved, so all other combinations follow.
    exemptions = sorted(("vectors", "qk_norms", "embeddings"), key=lambda name: name != exempt)
    rates = sorted(("ends", "matrices"), key=lambda name: name != own_lr)
    for trained, rate, exemption in product(("all", "adapters"), rates, exemptions):
        yield Policy(exemption, rate, trained)


_QK_CONDITIONS = ("apply_wd_to_qk_layernorm", "qwen3_next")


def traits_of(settings: Mapping[str, object]) -> Traits:
    """Return the traits of a group's parameters, judging by its settings."""
    # megatron-core also accepts these settings under the names pre_wd_mult and pre_lr_mult.
    decay = settings.get("wd_mult", settings.get("pre_wd_mult", settings.get("weight_decay")))
    has_own_lr = bool(settings.get("is_decoupled_lr")) or settings.get("default_config") is False
    return Traits(decay == 0, bool(settings.get(EXPERT)), has_own_lr, is_muon(settings))


def is_muon(settings: Mapping[str, object]) -> bool:
    """Return whether a group is trained by Muon, whose states have no number of steps.

    Adam has ``betas``, and torch's SGD a ``dampening``; Muon's momentum is called ``momentum_beta``
    by emerging-optimizers 0.1, and ``momentum`` by later versions and by torch.
    """
    return not {"momentum", "momentum_beta"}.isdisjoint(settings) and {
        "betas",
        "dampening",
    }.isdisjoint(settings)


def member_of(settings: Mapping[str, object], *, is_layer_wise: bool = False) -> tuple[bool, bool]:
    """Return the chained optimizer that a group belongs to; its values sort as Megatron chains.

    Megatron chains Muon before Adam, and each has one optimizer of dense parameters and one of
    experts that expert parallelism distributes.

    Args:
        is_layer_wise: Muon is distributed by layers, and has one optimizer of both.
    """
    muon = is_muon(settings)
    return not muon, bool(settings.get(EXPERT)) and not (muon and is_layer_wise)


def is_layer_wise(args: Mapping[str, object]) -> bool:
    """Return whether training arguments distribute Muon by layers (``dist_muon``)."""
    optimizer = args.get("optimizer")
    return bool(args.get("use_layer_wise_distributed_optimizer")) or (
        isinstance(optimizer, str) and optimizer.startswith("dist_")
    )


def identity(
    settings: Mapping[str, object], *, is_expert: bool | None = None
) -> tuple[object, ...]:
    """Return the values that distinguish a group from the other groups of an optimizer.

    Args:
        is_expert: replaces ``is_expert_parallel`` of the settings, unless None.
    """
    has_mult = "wd_mult" in settings or "pre_wd_mult" in settings
    names = (*_IDENTITY, *(() if has_mult else ("weight_decay",)))
    values = [settings.get(name, settings.get(f"pre_{name}")) for name in names]
    values[2] = bool(values[2]) if is_expert is None else is_expert
    return (*values, is_muon(settings))


@dataclass(frozen=True, slots=True)
class Trained:
    """A tensor of a rank that may be in a group: its local name, shape and dtype."""

    name: str
    shape: Shape
    dtype: str
    is_expert: bool


@dataclass(frozen=True, slots=True)
class Slots:
    """A group of a rank, whose entries are not yet assigned to parameters.

    Args:
        settings: the stored settings.
        shapes: shape of the states of each entry; None for an entry without states.
        masters: shapes of the master weights, which only fp16 and bf16 parameters have; None if
            the optimizer has none.
    """

    settings: Mapping[str, object]
    shapes: Sequence[Shape | None]
    masters: Sequence[Shape] | None


Assignment = tuple[tuple[int, ...], ...]
"""For every group, the numbers of its parameters, in order."""
Share = Callable[[Assignment], Assignment]
"""Selects the parameters of every group that the rank has."""
Agrees = Callable[[int, int, int], bool]
"""Checks if master weights belong to a parameter: (parameter, group, their number in the group)."""


def assign(
    params: Sequence[Trained],
    groups: Sequence[Slots],
    policies: Sequence[Policy],
    *,
    agrees: Agrees | None,
    decides: Agrees | None = None,
    share: Share | None = None,
) -> Assignment:
    """Return the parameters of every group of a rank.

    Args:
        params: parameters in the order of the file, without buffers and extra states.
        policies: the policies to try, in order.
        agrees: compares master weights with weights, possibly of some parameters only; None
            compares none.
        decides: compares those of every parameter, if no policy fits; None uses ``agrees``.
        share: selects what the rank has of a policy's assignment; None if it has all.

    Raises:
        UnsupportedError: no assignment fits, or several do.
    """
    # The first policy that fits the numbers, shapes and master weights decides.
    refused = None
    for policy in policies:
        assignment = by_policy(params, groups, policy)
        if assignment is not None and share is not None:
            assignment = share(assignment)
        if assignment is None or not fits(assignment, params, groups):
            continue
        wrong = None if agrees is None else _find_disagreeing(assignment, params, groups, agrees)
        if wrong is None:
            return assignment
        refused = refused or wrong

    # Otherwise search without the settings; only an unambiguous result counts.
    assignments = _search_assignments(params, groups, decides or agrees)
    if len(assignments) == 1:
        return assignments[0]
    sizes = ", ".join(str(len(group.shapes)) for group in groups)
    facts = f"{len(params)} parameters in groups of {sizes or 'none'}"
    if assignments:
        raise UnsupportedError(
            f"the parameters fit the optimizer's groups in several ways ({facts})", hint=HINT
        )
    if refused is not None:
        raise UnsupportedError(
            "no assignment of parameters to the optimizer's groups has master weights that round "
            f"to these weights ({facts})",
            key=refused,
            hint=HINT,
        )
    raise UnsupportedError(
        f"the parameters' names and shapes do not fit the optimizer's groups ({facts})", hint=HINT
    )


def by_policy(
    params: Sequence[Trained], groups: Sequence[Slots], policy: Policy
) -> Assignment | None:
    """Return the assignment by a policy, even if it does not fit; None for ambiguous groups."""
    group_traits = [traits_of(group.settings) for group in groups]
    if len(set(group_traits)) < len(group_traits):
        return None
    members: list[list[int]] = [[] for _ in groups]
    group_of = {traits: number for number, traits in enumerate(group_traits)}
    for number, param in enumerate(params):
        traits = policy.traits(param.name, len(param.shape), is_expert=param.is_expert)
        if traits is None:
            continue
        group = group_of.get(without_unused_traits(traits, group_traits))
        if group is None:
            return None
        members[group].append(number)
    return tuple(map(tuple, members))


def without_unused_traits(traits: Traits, group_traits: Sequence[Traits]) -> Traits:
    """Return the traits without those that no group has."""
    return Traits(
        traits.is_exempt and any(group.is_exempt for group in group_traits),
        traits.is_expert and any(group.is_expert for group in group_traits),
        traits.has_own_lr and any(group.has_own_lr for group in group_traits),
        traits.is_muon and any(group.is_muon for group in group_traits),
    )


def fits(assignment: Assignment, params: Sequence[Trained], groups: Sequence[Slots]) -> bool:
    """Return whether an assignment has the numbers and shapes of the groups."""
    for members, group in zip(assignment, groups, strict=True):
        if len(members) != len(group.shapes):
            return False
        if any(
            shape not in (None, params[i].shape)
            for i, shape in zip(members, group.shapes, strict=True)
        ):
            return False
        half = [params[i].shape for i in members if params[i].dtype in HALF]
        if group.masters is not None and half != list(group.masters):
            return False
    return True


def masters_of(members: Sequence[int], params: Sequence[Trained]) -> list[int]:
    """Return the parameters of a group that have master weights."""
    return [i for i in members if params[i].dtype in HALF]


def _find_disagreeing(
    assignment: Assignment, params: Sequence[Trained], groups: Sequence[Slots], agrees: Agrees
) -> str | None:
    """Return the first parameter whose master weights do not round to its weights, or None."""
    for number, (members, group) in enumerate(zip(assignment, groups, strict=True)):
        if group.masters is not None:
            for place, i in enumerate(masters_of(members, params)):
                if not agrees(i, number, place):
                    return params[i].name
    return None


def _search_assignments(
    params: Sequence[Trained], groups: Sequence[Slots], agrees: Agrees | None
) -> list[Assignment]:
    """Return up to two assignments that fit, regardless of settings; parameters may be frozen.

    Dynamic programming, one pass over the parameters. A search state is the number of entries and
    of master weights used in each group. Two paths per state are kept, which is enough to know
    that an assignment is ambiguous.

    Raises:
        UnsupportedError: there are more search states than ``_MAX_STATES``.
    """
    frontier: dict[_State, list[_Path]] = {tuple((0, 0) for _ in groups): [None]}
    for i, param in enumerate(params):
        grown: dict[_State, list[_Path]] = {}
        for state, paths in frontier.items():
            # The parameter is frozen …
            _add_paths(grown, state, paths)

            # … or the next entry of one of the groups.
            for number, group in enumerate(groups):
                used = _take_entry(state[number], param, group)
                if used is None:
                    continue
                has_master = used[1] > state[number][1]
                if has_master and agrees is not None and not agrees(i, number, used[1] - 1):
                    continue
                extended = [(path, (i, number)) for path in paths]
                _add_paths(grown, (*state[:number], used, *state[number + 1 :]), extended)
        frontier = grown
        if len(frontier) > _MAX_STATES:
            raise UnsupportedError(
                "the parameters' shapes fit the optimizer's groups in too many ways",
                hint=HINT,
            )

    # Assignments use every entry and all master weights.
    full = tuple((len(group.shapes), len(group.masters or ())) for group in groups)
    return [_unroll(path, len(groups)) for path in frontier.get(full, [])]


def _take_entry(used: tuple[int, int], param: Trained, group: Slots) -> tuple[int, int] | None:
    """Return the used entries and master weights of a group after one more parameter.

    None if the next entry has another shape.
    """
    entry, master = used
    if entry == len(group.shapes) or group.shapes[entry] not in (None, param.shape):
        return None
    if group.masters is None or param.dtype not in HALF:
        return entry + 1, master
    if master == len(group.masters) or group.masters[master] != param.shape:
        return None
    return entry + 1, master + 1


def _add_paths(grown: dict[_State, list[_Path]], state: _State, paths: Sequence[_Path]) -> None:
    """Add paths to a search state, up to two in all."""
    known_paths = grown.setdefault(state, [])
    known_paths += paths[: 2 - len(known_paths)]


def _unroll(path: _Path, n_groups: int) -> Assignment:
    """Return the assignment that a path's steps make."""
    members: list[list[int]] = [[] for _ in range(n_groups)]
    while path is not None:
        path, (param, group) = path
        members[group].append(param)
    return tuple(tuple(reversed(params)) for params in members)


_State = tuple[tuple[int, int], ...]
_Path = tuple[Any, tuple[int, int]] | None
"""The path before, and (parameter, group) of its last step; None at the beginning."""
