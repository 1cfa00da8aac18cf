"""The base classes of strategies, and the registry of default strategies.

A strategy reads or writes one part of a checkpoint, sharded or common, in the format of one version
of a backend. ``metadata.json`` names the backend and its version::

    LoadStrategyBase ── LoadCommonStrategy · LoadShardedStrategy
    SaveStrategyBase ── SaveCommonStrategy · SaveShardedStrategy ── AsyncSaveShardedStrategy

Source: the documented package ``core.dist_checkpointing.strategies.base``. Its pages call every
method abstract that only raises NotImplementedError. Here, a subclass must define only the methods
that all documented strategies define (the documented zarr strategy, for example, has no
``remove_sharded_tensors``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from copy import copy
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from typing_extensions import override

from core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from core.errors import UnsupportedError

if TYPE_CHECKING:
    from core.dist_checkpointing.mapping import ShardedStateDict, StateDict


class StrategyAction(Enum):
    """The purpose of a strategy: loading or saving, of the common or of the sharded part."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


class NotProvidedError(UnsupportedError, NotImplementedError):
    """A strategy does not provide an operation that is optional for strategies."""

    code = "not_provided"


@dataclass(frozen=True, slots=True)
class _Provider:
    """A module that registers the default strategies of a backend.

    Args:
        module: name of the module in this package.
        register: name of its function that registers the strategies.
        needs: requirement to install for the module, as pip takes it.
    """

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
"""Providers of each backend, called when a default is requested for the first time."""

default_strategies: defaultdict[str, dict[tuple[str, int], Any]] = defaultdict(dict)
"""Strategies by (backend, version), for each value of StrategyAction."""

_built_in: defaultdict[str, dict[tuple[str, int], Any]] = defaultdict(dict)
"""The same, as the backends' own modules registered them; never used themselves."""

async_calls = AsyncCallsQueue()
"""The queue for asynchronous work that strategies schedule themselves."""


def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Any:
    """Return the default strategy for an action on a backend's version.

    A strategy that the user registered takes precedence over those of the backend's own module. Of
    the latter, every call returns a new one, so that one script's settings do not reach another.

    Args:
        action: purpose of the strategy.
        backend: name as in ``metadata.json``: torch_dist, zarr, torch, or one that was registered.
        version: version of the backend, as in ``metadata.json``.

    Raises:
        UnsupportedError: there is no such strategy. The hint names the packages to install if a
            module cannot be imported, else the versions or backends that exist.
    """
    # Import the backend's own modules only if nobody has registered a strategy yet.
    strategies = default_strategies[action.value]
    failures = [] if strategies.get((backend, version)) else _call_providers(backend)
    strategy = strategies.get((backend, version))
    if strategy is not None:
        is_built_in = strategy is _built_in[action.value].get((backend, version))
        return copy(strategy) if is_built_in else strategy
    # Name the packages to install.
    description = f"{action.value} with backend {backend!r} and version {version}"
    if failures:
        reasons = "; ".join(f"{provider.module}: {err}" for provider, err in failures)
        raise UnsupportedError(
            f"the default strategy for {description} cannot be imported: {reasons}",
            hint="install " + ", ".join(f"`{provider.needs}`" for provider, _ in failures),
        ) from failures[0][1]
    # Name the versions of the backend, or else the backends that exist.
    versions = sorted(version for name, version in strategies if name == backend)
    if versions:
        hint = f"use one of these versions of {backend}: {', '.join(map(str, versions))}"
    else:
        names = sorted({name for name, _ in strategies} | set(_PROVIDERS))
        hint = (
            f"supported backends: {', '.join(names)}; "
            "register others with register_default_strategy"
        )
    raise UnsupportedError(f"there is no default strategy for {description}", hint=hint)


def register_default_strategy(
    action: StrategyAction,
    backend: str,
    version: int,
    strategy: SaveStrategyBase | LoadStrategyBase,
) -> None:
    """Register a strategy as the default for a version of a backend, replacing an earlier one."""
    default_strategies[action.value][backend, version] = strategy


def _call_providers(backend: str) -> list[tuple[_Provider, ImportError]]:
    """Register the strategies of the backend's modules, without replacing earlier ones.

    Returns:
        The modules that cannot be imported, with their errors.
    """
    failures = []
    # Registering replaces entries, so restore the user's strategies afterwards.
    earlier_strategies = {
        action.value: dict(default_strategies[action.value]) for action in StrategyAction
    }
    for provider in _PROVIDERS.get(backend, ()):
        try:
            module = import_module(f"core.dist_checkpointing.strategies.{provider.module}")
        except ImportError as err:
            failures.append((provider, err))
        else:
            getattr(module, provider.register)()
    for action, strategies in earlier_strategies.items():
        registered = default_strategies[action]
        _built_in[action].update(
            (key, strategy)
            for key, strategy in registered.items()
            if strategy is not strategies.get(key)
        )
        registered.update(strategies)
    return failures


def require_backend(strategy: object, loaded_backend: object, backend: str) -> None:
    """Raise unless a strategy reads the backend of a checkpoint.

    Args:
        strategy: the strategy; its class is named in the error.
        loaded_backend: the backend that ``metadata.json`` names.
        backend: the backend that the strategy reads.

    Raises:
        UnsupportedError: the backends differ.
    """
    if loaded_backend != backend:
        raise UnsupportedError(
            f"{type(strategy).__name__} reads backend {backend!r}, "
            f"but the checkpoint has backend {loaded_backend!r}",
            hint="omit the strategy to use the default one for the checkpoint's backend",
        )


def require_version(strategy: object, loaded_version: object, versions: tuple[int, ...]) -> None:
    """Raise unless a strategy reads a checkpoint's version of its backend.

    Args:
        strategy: the strategy; its class is named in the error.
        loaded_version: the version that ``metadata.json`` names.
        versions: the versions that the strategy reads.

    Raises:
        UnsupportedError: the strategy does not read that version.
    """
    # True == 1 in Python, but it is not a version.
    if isinstance(loaded_version, bool) or loaded_version not in versions:
        supported = " or ".join(map(str, versions))
        raise UnsupportedError(
            f"{type(strategy).__name__} reads version {supported} of its backend, "
            f"but the checkpoint has version {loaded_version!r}"
        )


def _raise_not_provided(strategy: object, operation: str) -> NoReturn:
    raise NotProvidedError(f"{type(strategy).__name__} does not implement {operation}")


class LoadStrategyBase(ABC):
    """A strategy for loading, which checks whether it can read a checkpoint's backend."""

    @abstractmethod
    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        """Raise a CheckpointingException unless the strategy reads this backend."""

    @abstractmethod
    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Raise a CheckpointingException unless the strategy reads this version of its backend."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True if the strategy also loads ShardedObjects."""
        return False


class SaveStrategyBase(ABC):  # noqa: B024 (documented as one, without abstract methods)
    """A strategy for saving.

    Args:
        backend: name of the backend, for ``metadata.json``.
        version: version of the backend, for ``metadata.json``.
    """

    syncs_files = False
    """True if the strategy syncs the files and directories that it writes to disk.

    Not in the documented API. If False, ``serialization.save`` syncs every file after the save.
    """

    def __init__(self, backend: str, version: int) -> None:
        self.backend = backend
        self.version = version

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True if the strategy also saves ShardedObjects."""
        return False

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.backend}, {self.version})"


class LoadCommonStrategy(LoadStrategyBase):
    """A strategy that loads the common state, which is not sharded."""

    @abstractmethod
    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """Return the common state of the checkpoint."""

    @abstractmethod
    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> StateDict:
        """Return the state dict with stored values in place of the ShardedObjects."""

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return the stored ShardedObjects without data, by unique key.

        The result is empty if the strategy does not handle ShardedObjects.

        Raises:
            NotProvidedError: the strategy handles them, but does not override this method.
        """
        if not self.can_handle_sharded_objects:
            return {}
        _raise_not_provided(self, "load_sharded_metadata")


class LoadShardedStrategy(LoadStrategyBase):
    """A strategy that loads the sharded state."""

    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Return the state dict with stored values in place of the ShardedTensors."""

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return the stored tensors by key, as ShardedTensors without data and sharding.

        Only their global shape (in elements) and dtype are meaningful.
        """

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return the stored tensors by key, and the stored ShardedObjects by unique key.

        Raises:
            NotProvidedError: the strategy handles ShardedObjects, but does not override this
                method.
        """
        if not self.can_handle_sharded_objects:
            return self.load_tensors_metadata(checkpoint_dir)
        _raise_not_provided(self, "load_sharded_metadata")

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove all tensors whose keys begin with the prefix.

        Raises:
            NotProvidedError: the strategy does not override this method.
        """
        _raise_not_provided(self, "remove_sharded_tensors")


class SaveCommonStrategy(SaveStrategyBase):
    """A strategy that saves the common state, which is not sharded."""

    @abstractmethod
    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Write the common state."""

    def save_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> None:
        """Write this rank's ShardedObjects that are main replicas.

        Raises:
            NotProvidedError: the strategy does not override this method.
        """
        _raise_not_provided(self, "save_sharded_objects")


class SaveShardedStrategy(SaveStrategyBase):
    """A strategy that saves the sharded state."""

    @abstractmethod
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write this rank's part of the sharded state."""


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """A strategy that can also save the sharded state in the background."""

    @abstractmethod
    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> AsyncRequest:
        """Copy the data to be saved, and return the remaining work as a request.

        Args:
            sharded_state_dict: this rank's part of the sharded state.
            checkpoint_dir: directory of the checkpoint.

        Returns:
            A request with the function that writes, and with those that complete the checkpoint
            afterwards. The caller schedules it.
        """

    @override
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Save the sharded state synchronously."""
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()
