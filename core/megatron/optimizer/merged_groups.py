"""The param groups of all ranks as one list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from core.catalog.optimizer_keys import ParamGroup
from core.errors import CorruptError, UnsupportedError
from core.megatron.extras.common_state import renamed_leaves, same
from core.megatron.optimizer.groups import identity
from core.pickle.inert import TensorLeaf


@dataclass(slots=True)
class _Group:
    """A group under construction.

    Args:
        rank: the directory whose settings these are.
        is_empty: that rank has no parameter in it; such a group may miss the steps of the others.
    """

    settings: Mapping[str, object]
    rank: str
    is_empty: bool
    params: dict[str, None] = field(default_factory=dict)


class MergedGroups:
    """The groups of an optimizer, put together from those of its ranks.

    Args:
        note: takes (new key, old key) of every tensor among the settings.
    """

    def __init__(self, note: Callable[[str, str], None]) -> None:
        self._note = note
        self._groups: dict[tuple[object, ...], _Group] = {}
        self._home: dict[str, tuple[tuple[object, ...], str]] = {}
        self._of_rank: list[dict[tuple[object, ...], bool]] = []

    def add(self, rank: str, groups: Iterable[tuple[Mapping[str, object], Iterable[str]]]) -> None:
        """Add a rank's groups: settings, and global names of parameters.

        Raises:
            CorruptError: the rank contradicts another one.
            UnsupportedError: two groups of the rank have one identity.
        """
        own_groups: dict[tuple[object, ...], bool] = {}
        for stored, params in groups:
            group_id = identity(stored)
            number = (
                list(self._groups).index(group_id)
                if group_id in self._groups
                else len(self._groups)
            )
            prefix = f"optimizer.groups.{number}"
            settings = {
                name: self._renamed(value, f"{prefix}.{name}") for name, value in stored.items()
            }
            names = dict.fromkeys(params)
            if group_id in own_groups:
                raise UnsupportedError(
                    "two of the optimizer's param groups cannot be told apart by their settings",
                    rank=rank,
                    hint="leave the optimizer out with --no-optim",
                )
            own_groups[group_id] = not names

            # Ranks must agree on the settings, and on the group of each parameter.
            self._settle(group_id, settings, rank, is_empty=not names)
            for name in names:
                home = self._home.setdefault(name, (group_id, rank))
                if home[0] != group_id:
                    other = self._groups[home[0]]
                    differing = (
                        key for key, value in settings.items() if value != other.settings.get(key)
                    )
                    setting = next(differing, "")
                    raise CorruptError(
                        f"its param group has {setting} {settings.get(setting)!r} here, "
                        f"{other.settings.get(setting)!r} in {home[1]}",
                        key=name,
                        rank=rank,
                    )
                self._groups[group_id].params[name] = None
        self._of_rank.append(own_groups)

    def _renamed(self, value: object, key: str) -> object:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value

        def new_key(path: str, old: str) -> str:
            new = f"{key}.{path}" if path else key
            self._note(new, old)
            return new

        return renamed_leaves(value, new_key)

    def _settle(
        self,
        group_id: tuple[object, ...],
        settings: Mapping[str, object],
        rank: str,
        *,
        is_empty: bool,
    ) -> None:
        """Compare the settings of a group with those of other ranks, or take them as the first."""
        group = self._groups.get(group_id)
        if group is None:
            self._groups[group_id] = _Group(settings, rank, is_empty)
            return

        # A rank without parameters in the group did not count its steps.
        free = {"step"} if is_empty or group.is_empty else set()
        for name in dict.fromkeys([*group.settings, *settings]):
            own, other = (source.get(name, _ABSENT) for source in (settings, group.settings))
            if name not in free and not same(own, other):
                number = list(self._groups).index(group_id)
                raise CorruptError(
                    f"setting {name} of the optimizer's param group {number} is {_text(own)} here, {_text(other)} in "
                    f"{group.rank}",
                    rank=rank,
                    hint="the ranks' files are not of one checkpoint, or one is damaged",
                )
        if group.is_empty and not is_empty:
            group.settings, group.rank, group.is_empty = settings, rank, False

    def groups(self) -> tuple[ParamGroup, ...]:
        """Return the groups in order, dense ones first."""
        groups = [
            ParamGroup(group.settings, tuple(group.params)) for group in self._groups.values()
        ]
        return tuple(sorted(groups, key=lambda group: group.is_expert))

    @property
    def omits_empty(self) -> bool | None:
        """True if ranks leave out groups of which they have no parameter.

        None where no rank shows it.
        """
        if any(len(of_rank) < len(self._groups) for of_rank in self._of_rank):
            return True
        return (
            False
            if any(is_empty for of_rank in self._of_rank for is_empty in of_rank.values())
            else None
        )


_ABSENT = "absent"


def _text(value: object) -> str:
    return (
        "a tensor"
        if isinstance(value, TensorLeaf)
        else repr(value)
        if value != _ABSENT
        else _ABSENT
    )
