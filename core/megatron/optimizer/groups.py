"""Which parameters are in which group of a Megatron optimizer.

No name is stored, neither in rank files nor in torch_dist. What is known:

* Groups are made of the parameters that are trained, in the order of the state dict, chunk by
  chunk; buffers, extra states and frozen parameters are in none. A tied copy of the embedding is a
  parameter of its own.
* A group's settings tell what it is made of (``wd_mult`` 0: biases and vectors;
  ``is_expert_parallel``: experts that expert parallelism distributes; another learning rate:
  embedding and output, or with MuP the matrices between). Which vectors are exempt from weight
  decay is a ``Policy``, of which the training arguments name one.
* How many parameters a group has, and their shapes.

``assign`` looks for the assignment that fits all of that, and compares masters with weights where
it can. Groups stand in another order on every stage before megatron-core 0.16, so their place tells
nothing.

Source: megatron-core 0.12.1, 0.15.0 and 0.16.1 ``core/optimizer/__init__.py``
``_get_param_groups``, ``get_standard_config_overrides``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from core.arrays.box import Shape
from core.errors import UnsupportedError

HALF = ("float16", "bfloat16")
"""Dtypes of the parameters that have masters."""
EXPERT = "is_expert_parallel"
_IDENTITY = ("wd_mult", "lr_mult", EXPERT, "is_decoupled_lr", "max_lr", "min_lr", "eps")
_ADAPTER = re.compile(r"(^|\.)(linear_in|linear_out|lora_[ab]|adapter)(\.|$)")
_ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")
_MAX_STATES = 1 << 12
_HINT = "leave the optimizer out with --no-optim; the weights are exact, and training starts with a fresh one"


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties of a parameter that decide its group.

    Args:
        is_exempt: the parameter is exempt from weight decay.
        is_expert: the parameter belongs to an expert that expert parallelism distributes.
        has_own_lr: the learning rate of the parameter is not the usual one.
    """

    is_exempt: bool
    is_expert: bool
    has_own_lr: bool


@dataclass(frozen=True, slots=True)
class Policy:
    """The way in which a run sorts parameters into groups.

    Args:
        exempt: what weight decay leaves alone: ``vectors`` and biases, those but not ``qk_norms``,
            or those and ``embeddings``.
        own_lr: what has a learning rate of its own: the ``ends`` of the model, or ``matrices``
            (MuP).
        trained: ``all`` parameters, or only ``adapters``.
    """

    exempt: str = "vectors"
    own_lr: str = "ends"
    trained: str = "all"

    def traits(self, name: str, n_axes: int, *, is_expert: bool) -> Traits | None:
        """Return the traits of a parameter; None if it is frozen.

        Args:
            name: local or global.
            n_axes: number of axes of the parameter.
        """
        if self.trained == "adapters" and _ADAPTER.search(name) is None:
            return None
        is_vector = n_axes == 1 or name.endswith(".bias")
        if self.exempt == "qk_norms":
            is_vector = is_vector and "q_layernorm." not in name and "k_layernorm." not in name
        elif self.exempt == "embeddings":
            is_vector = is_vector or "embedding" in name
        has_own_lr = (
            name.endswith(_ENDS)
            if self.own_lr == "ends"
            else n_axes > 1 and "embedding" not in name
        )
        return Traits(is_vector, is_expert, has_own_lr)


def policies_of(args: Mapping[str, object]) -> Iterator[Policy]:
    """Yield all policies, that of the training arguments first."""
    keeps_qk = (
        args.get("apply_wd_to_qk_layernorm")
        or args.get("no_weight_decay_cond_type") in _QK_CONDITIONS
    )
    exempt = (
        "qk_norms"
        if keeps_qk
        else "embeddings"
        if args.get("embedding_init_method_std")
        else "vectors"
    )
    own_lr = "matrices" if args.get("use_mup") and not args.get("decoupled_lr") else "ends"
    kinds = sorted(("vectors", "qk_norms", "embeddings"), key=lambda kind: kind != exempt)
    rates = sorted(("ends", "matrices"), key=lambda kind: kind != own_lr)
    for trained, lr, kind in product(("all", "adapters"), rates, kinds):
        yield Policy(kind, lr, trained)


_QK_CONDITIONS = ("apply_wd_to_qk_layernorm", "qwen3_next")


def traits_of(settings: Mapping[str, object]) -> Traits:
    """Return the traits of a group's parameters, by its settings."""
    decay = settings.get("wd_mult", settings.get("pre_wd_mult", settings.get("weight_decay")))
    has_own_lr = bool(settings.get("is_decoupled_lr")) or settings.get("default_config") is False
    return Traits(decay == 0, bool(settings.get(EXPERT)), has_own_lr)


def identity(
    settings: Mapping[str, object], *, is_expert: bool | None = None
) -> tuple[object, ...]:
    """Return the values that tell a group from the others of an optimizer.

    Args:
        is_expert: in place of what the settings say.
    """
    has_mult = "wd_mult" in settings or "pre_wd_mult" in settings
    names = (*_IDENTITY, *(() if has_mult else ("weight_decay",)))
    values = [settings.get(name, settings.get(f"pre_{name}")) for name in names]
    values[2] = bool(values[2]) if is_expert is None else is_expert
    return tuple(values)


@dataclass(frozen=True, slots=True)
class Trained:
    """A tensor of a rank that may be in a group: its local name, shape and dtype."""

    name: str
    shape: Shape
    dtype: str
    is_expert: bool


@dataclass(frozen=True, slots=True)
class Slots:
    """A group of a rank, before it is known whose its entries are.

    Args:
        settings: the stored settings.
        shapes: shapes of the states of each entry; None where there are none.
        masters: shapes of the masters, which only fp16 and bf16 parameters have; None where the
            optimizer has none.
    """

    settings: Mapping[str, object]
    shapes: Sequence[Shape | None]
    masters: Sequence[Shape] | None


Assignment = tuple[tuple[int, ...], ...]
"""For every group, which parameters it has, in order."""
Agrees = Callable[[int, int, int], bool]
"""Tells whether a master belongs to a parameter: (parameter, group, number of the master in the
group).
"""


def assign(
    params: Sequence[Trained],
    groups: Sequence[Slots],
    policies: Sequence[Policy],
    *,
    agrees: Agrees | None,
    decides: Agrees | None = None,
) -> Assignment:
    """Return the parameters of every group of a rank.

    Args:
        params: without buffers and extra states, in the order of the file.
        policies: to be tried in order.
        agrees: compares masters with weights, or some of them; None leaves that out.
        decides: compares every one, where no policy fits; None takes ``agrees``.

    Raises:
        UnsupportedError: no assignment fits, or several do.
    """
    # The first policy that fits numbers, shapes and masters decides …
    refused = None
    for policy in policies:
        assignment = by_policy(params, groups, policy)
        if assignment is None or not fits(assignment, params, groups):
            continue
        wrong = None if agrees is None else _disagreeing(assignment, params, groups, agrees)
        if wrong is None:
            return assignment
        refused = refused or wrong

    # … else a search that ignores the settings, which must have one result.
    assignments = _ways(params, groups, decides or agrees)
    if len(assignments) == 1:
        return assignments[0]
    sizes = ", ".join(str(len(group.shapes)) for group in groups)
    facts = f"{len(params)} parameters in groups of {sizes or 'none'}"
    if assignments:
        raise UnsupportedError(
            f"several assignments to the optimizer's groups fit ({facts})", hint=_HINT
        )
    if refused is not None:
        raise UnsupportedError(
            f"no master rounds to it in any assignment ({facts})", key=refused, hint=_HINT
        )
    raise UnsupportedError(
        f"names and shapes do not fit the optimizer's groups ({facts})", hint=_HINT
    )


def by_policy(
    params: Sequence[Trained], groups: Sequence[Slots], policy: Policy
) -> Assignment | None:
    """Return the assignment that a policy makes, whether it fits or not.

    None if the policy cannot tell the groups apart.
    """
    wanted = [traits_of(group.settings) for group in groups]
    if len(set(wanted)) < len(wanted):
        return None
    members: list[list[int]] = [[] for _ in groups]
    place = {traits: number for number, traits in enumerate(wanted)}
    for number, param in enumerate(params):
        traits = policy.traits(param.name, len(param.shape), is_expert=param.is_expert)
        if traits is None:
            continue
        group = place.get(without_unused_traits(traits, wanted))
        if group is None:
            return None
        members[group].append(number)
    return tuple(map(tuple, members))


def without_unused_traits(traits: Traits, wanted: Sequence[Traits]) -> Traits:
    """Return the traits without those that no group has."""
    return Traits(
        traits.is_exempt and any(of_group.is_exempt for of_group in wanted),
        traits.is_expert and any(of_group.is_expert for of_group in wanted),
        traits.has_own_lr and any(of_group.has_own_lr for of_group in wanted),
    )


def fits(assignment: Assignment, params: Sequence[Trained], groups: Sequence[Slots]) -> bool:
    """Return whether the numbers and shapes of an assignment are those of the groups."""
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
    """Return the parameters of a group that have masters."""
    return [i for i in members if params[i].dtype in HALF]


def _disagreeing(
    assignment: Assignment, params: Sequence[Trained], groups: Sequence[Slots], agrees: Agrees
) -> str | None:
    """Return the first parameter whose master belongs to another one, or None."""
    for number, (members, group) in enumerate(zip(assignment, groups, strict=True)):
        if group.masters is not None:
            for place, i in enumerate(masters_of(members, params)):
                if not agrees(i, number, place):
                    return params[i].name
    return None


def _ways(
    params: Sequence[Trained], groups: Sequence[Slots], agrees: Agrees | None
) -> list[Assignment]:
    """Return up to two assignments that fit, whatever the settings say; parameters may be frozen.

    Goes through the parameters once. A state is how many entries and masters of each group are
    taken; it keeps two of the ways that lead to it.
    """
    # Two ways are enough to know that the assignment is not certain.
    frontier: dict[_State, list[_Way]] = {tuple((0, 0) for _ in groups): [None]}
    for i, param in enumerate(params):
        grown: dict[_State, list[_Way]] = {}
        for taken, ways in frontier.items():
            _extend(grown, taken, ways, None)
            for number, group in enumerate(groups):
                after = _after(taken[number], param, group)
                is_master = after is not None and after[1] > taken[number][1]
                if after is None or (
                    is_master and agrees is not None and not agrees(i, number, after[1] - 1)
                ):
                    continue
                _extend(grown, (*taken[:number], after, *taken[number + 1 :]), ways, (i, number))
        frontier = grown
        if len(frontier) > _MAX_STATES:
            raise UnsupportedError(
                "too many assignments of parameters to the optimizer's groups fit by their shapes",
                hint=_HINT,
            )
    full = tuple((len(group.shapes), len(group.masters or ())) for group in groups)
    return [_unrolled(way, len(groups)) for way in frontier.get(full, [])]


def _after(taken: tuple[int, int], param: Trained, group: Slots) -> tuple[int, int] | None:
    """Return how much of a group is taken with one more parameter; None if its shape does not
    fit.
    """
    entry, master = taken
    if entry == len(group.shapes) or group.shapes[entry] not in (None, param.shape):
        return None
    if group.masters is None or param.dtype not in HALF:
        return entry + 1, master
    if master == len(group.masters) or group.masters[master] != param.shape:
        return None
    return entry + 1, master + 1


def _extend(
    grown: dict[_State, list[_Way]],
    taken: _State,
    ways: Sequence[_Way],
    choice: tuple[int, int] | None,
) -> None:
    """Extend the ways that lead to a state; without a choice, the parameter is frozen."""
    have = grown.setdefault(taken, [])
    have += [way if choice is None else (way, choice) for way in ways[: 2 - len(have)]]


def _unrolled(way: _Way, n_groups: int) -> Assignment:
    """Return the assignment that a way of choices makes."""
    members: list[list[int]] = [[] for _ in range(n_groups)]
    while way is not None:
        way, (param, group) = way
        members[group].append(param)
    return tuple(tuple(reversed(members)) for members in members)


_State = tuple[tuple[int, int], ...]
_Way = tuple[Any, tuple[int, int]] | None
"""The way before, and (parameter, group) of the latest choice."""
