"""What a strategy is, and the registry of the default ones.

A strategy reads or writes one part of a checkpoint, sharded or common, in the form that a backend's name and version
stand for in ``metadata.json``::

    LoadStrategyBase ── LoadCommonStrategy · LoadShardedStrategy
    SaveStrategyBase ── SaveCommonStrategy · SaveShardedStrategy ── AsyncSaveShardedStrategy

Source: the documented package ``core.dist_checkpointing.strategies.base``. Its pages call every method abstract that
does nothing but raise NotImplementedError; required of a subclass are here only those that the documented strategies
all define (the documented zarr strategy, for one, has no ``remove_sharded_tensors``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from core.errors import UnsupportedError

if TYPE_CHECKING:
    from core.dist_checkpointing.mapping import ShardedStateDict, StateDict


class StrategyAction(Enum):
    """What a strategy is for: loading or saving, of the common or of the sharded part."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


class NotProvidedError(UnsupportedError, NotImplementedError):
    """A strategy leaves out an operation that not every strategy must have."""

    code = "not_provided"


@dataclass(frozen=True, slots=True)
class _Provider:
    """A module whose function ``register`` fills in a backend's defaults; ``needs`` are the packages it stands on."""

    module: str
    register: str
    needs: str


_PROVIDERS: dict[str, tuple[_Provider, ...]] = {
    "torch": (_Provider("common", "register_default_common_strategies", "torch"),),
    "torch_dist": (_Provider("torch", "register_default_torch_strategies", "torch>=2.4"),),
    "zarr": (
        _Provider("tensorstore", "register_default_tensorstore_strategies", "tensorstore"),
        _Provider("zarr", "register_default_zarr_strategies", "zarr>=3"),
    ),
}
"""Backend → who registers its strategies, asked when a default is wanted for the first time."""

default_strategies: defaultdict[str, dict[tuple[str, int], Any]] = defaultdict(dict)
"""The value of a StrategyAction → (backend, version) → strategy."""

async_calls = AsyncCallsQueue()
"""The queue on which strategies schedule asynchronous work of their own."""


def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Any:
    """The default strategy for an action on a backend's version.

    What was registered by hand comes before what the backend's own module registers.

    Args:
        action: what it is wanted for.
        backend: name as in ``metadata.json``: torch_dist, zarr, torch, or one that was registered.
        version: version of the backend, as there.

    Raises:
        UnsupportedError: there is none. The hint names the packages that could not be imported, if that is the
            reason, else the versions or backends that exist.
    """
    failures = [] if _registered(action, backend, version) else _ask_providers(backend)
    found = _registered(action, backend, version)
    if found is not None:
        return found
    wanted = f"{action.value} of backend {backend!r}, version {version}"
    if failures:
        reasons = "; ".join(f"{provider.module}: {err}" for provider, err in failures)
        raise UnsupportedError(
            f"the default strategy for {wanted} cannot be imported: {reasons}",
            hint="install " + ", ".join(f"`{provider.needs}`" for provider, _ in failures),
        ) from failures[0][1]
    raise UnsupportedError(f"there is no default strategy for {wanted}", hint=_alternatives(action, backend))


def register_default_strategy(
    action: StrategyAction, backend: str, version: int, strategy: SaveStrategyBase | LoadStrategyBase
) -> None:
    """Makes a strategy the default one, in place of an earlier one.

    Args:
        action: what the strategy is for.
        backend: backend that it becomes the default for.
        version: version of that backend.
        strategy: the strategy.
    """
    default_strategies[action.value][backend, version] = strategy


def _registered(action: StrategyAction, backend: str, version: int) -> Any:
    return default_strategies[action.value].get((backend, version))


def _ask_providers(backend: str) -> list[tuple[_Provider, ImportError]]:
    """Has the backend's modules register; returns those that cannot be imported. Earlier entries stay."""
    failures = []
    by_hand = {action.value: dict(default_strategies[action.value]) for action in StrategyAction}
    for provider in _PROVIDERS.get(backend, ()):
        try:
            module = import_module(f"core.dist_checkpointing.strategies.{provider.module}")
        except ImportError as err:
            failures.append((provider, err))
        else:
            getattr(module, provider.register)()
    for action, strategies in by_hand.items():
        default_strategies[action].update(strategies)
    return failures


def _alternatives(action: StrategyAction, backend: str) -> str:
    known = default_strategies[action.value]
    versions = sorted(version for name, version in known if name == backend)
    if versions:
        return f"versions of {backend}: {', '.join(map(str, versions))}"
    names = sorted({name for name, _ in known} | set(_PROVIDERS))
    return f"backends: {', '.join(names)}; others are added by register_default_strategy"


def require_backend(strategy: object, loaded_backend: object, backend: str) -> None:
    """Checks that a checkpoint's backend is the one that a strategy reads.

    Args:
        strategy: the strategy; its class is named in the error.
        loaded_backend: the backend that ``metadata.json`` names.
        backend: the backend that the strategy reads.

    Raises:
        UnsupportedError: they differ.
    """
    if loaded_backend != backend:
        raise UnsupportedError(
            f"{type(strategy).__name__} reads the backend {backend!r}, but the checkpoint has {loaded_backend!r}",
            hint="leave the strategy out, then the one that the checkpoint asks for is taken",
        )


def require_version(strategy: object, loaded_version: object, versions: tuple[int, ...]) -> None:
    """Checks that a strategy reads a checkpoint's version of its backend.

    Args:
        strategy: the strategy; its class is named in the error.
        loaded_version: the version that ``metadata.json`` names.
        versions: those that the strategy reads.

    Raises:
        UnsupportedError: it is none of them.
    """
    if isinstance(loaded_version, bool) or loaded_version not in versions:
        raise UnsupportedError(
            f"{type(strategy).__name__} reads version {' or '.join(map(str, versions))} of its backend, but the "
            f"checkpoint has version {loaded_version!r}"
        )


def _not_provided(strategy: object, operation: str) -> NoReturn:
    raise NotProvidedError(f"{type(strategy).__name__} has no {operation}")


class LoadStrategyBase(ABC):
    """A strategy for loading. It must say which checkpoints it can read."""

    @abstractmethod
    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        """Raises a CheckpointingException unless the strategy reads the backend with this name."""

    @abstractmethod
    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Raises a CheckpointingException unless the strategy reads this version of its backend."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether the strategy loads ShardedObjects, too."""
        return False


class SaveStrategyBase(ABC):  # noqa: B024 (documented as one, without abstract methods)
    """A strategy for saving.

    Args:
        backend: the backend's name, which ``metadata.json`` will have.
        version: the backend's version, likewise.
    """

    syncs_files = False
    """Whether files and directories are on the disk when they have been written. Ours; where it is False,
    ``serialization.save`` syncs them once more, file by file."""

    def __init__(self, backend: str, version: int) -> None:
        self.backend = backend
        self.version = version

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether the strategy saves ShardedObjects, too."""
        return False

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.backend}, {self.version})"


class LoadCommonStrategy(LoadStrategyBase):
    """Loads the common state, which is not sharded."""

    @abstractmethod
    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """The common state of the checkpoint."""

    @abstractmethod
    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> StateDict:
        """The same nesting with the stored values in place of the ShardedObjects."""

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """The stored ShardedObjects without data, by unique key; {} if the strategy does not handle them."""
        if not self.can_handle_sharded_objects:
            return {}
        _not_provided(self, "load_sharded_metadata")


class LoadShardedStrategy(LoadStrategyBase):
    """Loads the sharded state."""

    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """The same nesting with the stored values in place of the ShardedTensors."""

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """The stored tensors by their keys, as ShardedTensors without data and sharding.

        Only their global shape (in elements) and dtype mean something.
        """

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """As load_tensors_metadata, together with the stored ShardedObjects by their unique keys."""
        if not self.can_handle_sharded_objects:
            return self.load_tensors_metadata(checkpoint_dir)
        _not_provided(self, "load_sharded_metadata")

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Removes all tensors whose keys begin with the prefix."""
        _not_provided(self, "remove_sharded_tensors")


class SaveCommonStrategy(SaveStrategyBase):
    """Saves the common state, which is not sharded."""

    @abstractmethod
    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Writes the common state."""

    def save_sharded_objects(self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Writes this rank's ShardedObjects that are main replicas."""
        _not_provided(self, "save_sharded_objects")


class SaveShardedStrategy(SaveStrategyBase):
    """Saves the sharded state."""

    @abstractmethod
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Writes this rank's part of the sharded state."""


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """Saves the sharded state in the background, too."""

    @abstractmethod
    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> AsyncRequest:
        """Copies what is to be saved, and returns the rest of the work.

        Args:
            sharded_state_dict: what to save.
            checkpoint_dir: directory of the checkpoint.

        Returns:
            The writing, and the functions that make it valid afterwards. The caller schedules it.
        """

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Does the same at once."""
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()
