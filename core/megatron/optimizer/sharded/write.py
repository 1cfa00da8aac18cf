"""The optimizer of torch_dist and zarr checkpoints that are to be written.

=============  ======================
=================================================================================
 format         optimizer               form
=============  ======================
=================================================================================
 torch_dist     FP32, Float16           ``optimizer.state.{fp32_param,exp_avg,…}.<key>``
 torch_dist     distributed             ``fully_reshardable``: the same, but ``param`` instead of ``fp32_param``;
                                        megatron-core 0.15 and later load it at any sizes
 zarr           FP32, Float16           as in torch_dist
 zarr           distributed             ``fully_sharded_model_space``, ``fp32_param``: megatron-core up to 0.12, which
                                        alone reads zarr, knows no other form that is independent of
                                        TP and PP
=============  ======================
=================================================================================

``content_metadata`` of the common state tells current Megatron which form it is, and that keys of
chained optimizers have no prefix; without it, Megatron asks for keys of older forms.

Source: Megatron-LM d98e8a64 ``training/checkpointing.py``; megatron-core 0.16.1
``core/optimizer/{optimizer, distrib_optimizer}.py``; pinned in tests/golden (``mcore*_torch_dist``,
``mcore0121_zarr``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from core.catalog.catalog import Catalog
from core.catalog.facets import TorchDistFacts
from core.catalog.optimizer_keys import MASTER, STATES, Optimizer, ParamGroup, state_of, trained
from core.megatron.extras.common_state import CONTENT, OPTIMIZER, common_of
from core.megatron.optimizer.entries import FULLY_RESHARDABLE, MODEL_SPACE, SHARDING, common_entry
from core.megatron.optimizer.reshard_target import ReshardTarget
from core.megatron.optimizer.target_groups import target_groups
from core.pickle.inert import as_mapping

_CONTENT_SHARDING = "distrib_optim_sharding_type"


def sharding_of(catalog: Catalog) -> str | None:
    """Return how a catalog with a common state keeps a distributed optimizer's states; None where
    it has none.
    """
    return next((str(value) for value in _sharding_types(common_of(catalog).get(OPTIMIZER))), None)


def _sharding_types(entry: object) -> Iterator[object]:
    mapping = as_mapping(entry) or {}
    if SHARDING in mapping:
        yield mapping[SHARDING]
    for name, member in mapping.items():
        if isinstance(name, int):
            yield from _sharding_types(member)


def wanted_sharding(format: str) -> str:
    """Return how the readers of ``torch_dist`` or ``zarr`` load a distributed optimizer at any
    sizes.
    """
    return FULLY_RESHARDABLE if format == "torch_dist" else MODEL_SPACE


def _regrouped(target: ReshardTarget) -> Optimizer:
    """Return the optimizer with the groups that it has where experts are distributed in another
    way.
    """
    before, after = target.facts.topology, target.topology
    if not target.facts.n_experts or (after.ep, after.expert_tp) == (before.ep, before.expert_tp):
        return target.optimizer
    groups = target_groups(target, trained(target.catalog.tensors))
    return replace(
        target.optimizer, groups=tuple(ParamGroup(settings) for settings in groups.settings)
    )


class StackedOptimizer:
    """The entries of an optimizer apart from its tensors, in a torch_dist or zarr checkpoint.

    There are none where there is no optimizer.

    Args:
        target: the destination: with expert parallelism, experts have groups of their own. None for
            no optimizer.
        format: ``torch_dist`` or ``zarr``.

    Attributes:
        common: entries of the common state.
        needs_common_file: the dialect of megatron-core 0.12 must become that of a ``common.pt``
            file.
        notes: what the user should know.
    """

    def __init__(self, target: ReshardTarget | None, format: str) -> None:
        self._optimizer: Optimizer | None = None
        self._sharding = wanted_sharding(format)
        self.common: dict[object, object] = {}
        self.needs_common_file = False
        self.notes: list[str] = []
        if target is None:
            return

        # The entry of the common state, and what tells Megatron its form.
        self._optimizer = _regrouped(target)
        content = as_mapping(common_of(target.catalog).get(CONTENT)) or {}
        self.common[OPTIMIZER] = common_entry(self._optimizer, sharding=self._sharding)
        if format == "torch_dist" or content:
            self.common[CONTENT] = self._content(content)
        if self._is_distributed and content.get(_CONTENT_SHARDING) != self._sharding:
            self._note_form(target.catalog)

    @property
    def _is_distributed(self) -> bool:
        return self._optimizer is not None and self._optimizer.kind == "distributed"

    def key(self, key: str, name: str) -> str:
        """Return the key of a tensor.

        Args:
            key: in the global form.
            name: the key of the tensor or, of a state, its parameter's.
        """
        state = state_of(key)
        if state is None:
            return name
        is_param = (
            state[0] == MASTER and self._is_distributed and self._sharding == FULLY_RESHARDABLE
        )
        return f"{STATES}{'param' if is_param else state[0]}.{name}"

    def _content(self, before: dict[object, object]) -> dict[object, object]:
        """Return the description of the content for Megatron's loader."""
        content: dict[object, object] = {}
        if self._is_distributed:
            content[_CONTENT_SHARDING] = self._sharding
            content["distrib_optim_fully_reshardable_mem_efficient"] = False
        content |= {
            name: value
            for name, value in before.items()
            if not str(name).startswith("distrib_optim_")
        }
        content["singleton_local_shards"] = False
        content["chained_optim_avoid_prefix"] = True
        return content

    def _note_form(self, catalog: Catalog) -> None:
        if self._sharding == MODEL_SPACE:
            form = f"the distributed optimizer is written as {MODEL_SPACE}"
            self.notes.append(f"content_metadata: {form}, as megatron-core 0.12 reads it")
            return
        self.notes.append(
            f"content_metadata: the distributed optimizer is written as {FULLY_RESHARDABLE}; megatron-core 0.15 and "
            "later load it at any sizes"
        )
        facts = catalog.facet(TorchDistFacts)
        self.needs_common_file = facts is not None and facts.dialect == "0.12"
