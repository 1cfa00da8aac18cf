"""The param groups of all ranks as one list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field

from core.engine.catalog.optimizer_keys import ParamGroup
from core.errors import CorruptError, UnsupportedError
from core.megatron.extras.common_state import renamed_leaves
from core.megatron.optimizer.groups import identity, member_of
from core.pickle.equality import are_same
from core.pickle.inert import TensorLeaf
from core.values import dataclass


@dataclass(slots=True)
class _Group:
    """A group under construction.

    Args:
        rank: name of the rank directory that the settings come from.
        is_empty: that rank has no parameter of the group, so its steps may be missing or behind.
    """

    settings: Mapping[str, object]
    rank: str
    is_empty: bool
    params: dict[str, None] = field(default_factory=dict)


class MergedGroups:
    """The groups of an optimizer, combined from those of its ranks.

    Args:
        note: called with (new key, old key) for every tensor among the settings.
    """

    def __init__(self, note: Callable[[str, str], None]) -> None:
        self._note = note
        self._groups: dict[tuple[object, ...], _Group] = {}
        self._first_group: dict[
            str, tuple[tuple[object, ...], str]
        ] = {}  # and the rank that has it
        self._of_rank: list[dict[tuple[object, ...], bool]] = []  # values: is the group empty

    def add(self, rank: str, groups: Iterable[tuple[Mapping[str, object], Iterable[str]]]) -> None:
        """Add the groups of a rank.

        Args:
            rank: name of the rank directory.
            groups: (settings, global names of the parameters).

        Raises:
            CorruptError: the rank contradicts another one.
            UnsupportedError: two groups of the rank have one identity.
        """
        own_groups: dict[tuple[object, ...], bool] = {}
        for stored, params in groups:
            # Tensors among the settings get keys by the number of the merged group.
            group_id = identity(stored)
            number = (
                list(self._groups).index(group_id)
                if group_id in self._groups
                else len(self._groups)
            )
            prefix = f"optimizer.groups.{number}"
            settings = {
                name: renamed_leaves(value, f"{prefix}.{name}", self._note)
                for name, value in stored.items()
            }
            names = dict.fromkeys(params)
            if group_id in own_groups:
                raise UnsupportedError(
                    "two of the optimizer's param groups cannot be distinguished by their settings",
                    rank=rank,
                    hint="drop the optimizer with --no-optim",
                )
            own_groups[group_id] = not names

            # Ranks must agree on the settings, and on the group of each parameter.
            self._settle(group_id, settings, rank, is_empty=not names)
            for name in names:
                first_id, first_rank = self._first_group.setdefault(name, (group_id, rank))
                if first_id != group_id:
                    other = self._groups[first_id]
                    differing = (
                        key for key, value in settings.items() if value != other.settings.get(key)
                    )
                    setting = next(differing, "")
                    raise CorruptError(
                        f"{setting} of its param group is {settings.get(setting)!r}, but "
                        f"{other.settings.get(setting)!r} in {first_rank}",
                        key=name,
                        rank=rank,
                    )
                self._groups[group_id].params[name] = None
        self._of_rank.append(own_groups)

    def _settle(
        self,
        group_id: tuple[object, ...],
        settings: Mapping[str, object],
        rank: str,
        *,
        is_empty: bool,
    ) -> None:
        """Check the settings of a group against other ranks'; the first rank's are stored."""
        group = self._groups.get(group_id)
        if group is None:
            self._groups[group_id] = _Group(settings, rank, is_empty)
            return

        # A rank without parameters in the group does not count its steps.
        free = {"step"} if is_empty or group.is_empty else set()
        for name in dict.fromkeys([*group.settings, *settings]):
            own, other = (source.get(name, _ABSENT) for source in (settings, group.settings))
            if name not in free and not are_same(own, other):
                number = list(self._groups).index(group_id)
                raise CorruptError(
                    f"{name} of the optimizer's param group {number} is {_text(own)}, but "
                    f"{_text(other)} in {group.rank}",
                    rank=rank,
                    hint="check that all rank directories are intact and from the same checkpoint",
                )

        # Settings of a rank with parameters replace those of an empty group: they have steps.
        if group.is_empty and not is_empty:
            group.settings, group.rank, group.is_empty = settings, rank, False

    def groups(self) -> tuple[ParamGroup, ...]:
        """Return the groups in the order of chained optimizers, then of appearance."""
        groups = [
            ParamGroup(group.settings, tuple(group.params)) for group in self._groups.values()
        ]
        return tuple(sorted(groups, key=lambda group: member_of(group.settings)))

    @property
    def omits_empty(self) -> bool | None:
        """True if ranks omit groups without a parameter of theirs; None if no rank shows it."""
        if any(len(of_rank) < len(self._groups) for of_rank in self._of_rank):
            return True
        lists_empty = any(is_empty for of_rank in self._of_rank for is_empty in of_rank.values())
        return False if lists_empty else None


_ABSENT = "absent"


def _text(value: object) -> str:
    if isinstance(value, TensorLeaf):
        return "a tensor"
    return repr(value) if value != _ABSENT else _ABSENT
