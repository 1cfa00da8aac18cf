"""Writing the optimizer of torch_dist and zarr checkpoints.

========== ============= ==========================================================================
 format     optimizer     form
========== ============= ==========================================================================
 torch_dist FP32, Float16 ``optimizer.state.{fp32_param,exp_avg,…}.<key>``
 torch_dist distributed   ``fully_reshardable``: the same, but ``param`` instead of ``fp32_param``;
                          megatron-core 0.15 and later load it at any sizes
 zarr       FP32, Float16 as in torch_dist
 zarr       distributed   ``fully_sharded_model_space``, ``fp32_param``: megatron-core up to 0.12,
                          which alone reads zarr, has no other form that is independent of TP and PP
========== ============= ==========================================================================

``content_metadata`` of the common state records the form, and that keys of chained optimizers have
no prefix; without it, current Megatron looks for keys of older forms.

Source: Megatron-LM d98e8a64 ``training/checkpointing.py``; megatron-core 0.16.1
``core/optimizer/{optimizer, distrib_optimizer}.py``; pinned in tests/golden (``mcore*_torch_dist``,
``mcore0121_zarr``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import TorchDistFacts
from core.engine.catalog.optimizer_keys import (
    MASTER,
    STATES,
    Optimizer,
    ParamGroup,
    split_state_key,
    trained,
)
from core.errors import UnsupportedError
from core.megatron.extras.common_state import CONTENT, OPTIMIZER, get_common_state
from core.megatron.optimizer.entries import FULLY_RESHARDABLE, MODEL_SPACE, SHARDING, common_entry
from core.megatron.rules.experts import OPTION
from core.pickle.inert import as_mapping

if TYPE_CHECKING:
    from core.megatron.optimizer.reshard_target import ReshardTarget

_CONTENT_SHARDING = "distrib_optim_sharding_type"


def sharding_of(catalog: Catalog) -> str | None:
    """Return the ``param_state_sharding_type`` of a catalog's common state, or None."""
    return next(
        (str(value) for value in _sharding_types(get_common_state(catalog).get(OPTIMIZER))), None
    )


def _sharding_types(entry: object) -> Iterator[object]:
    mapping = as_mapping(entry) or {}
    if SHARDING in mapping:
        yield mapping[SHARDING]
    for name, member in mapping.items():
        if isinstance(name, int):
            yield from _sharding_types(member)


def wanted_sharding(format: str) -> str:
    """Return the sharding type of a format that Megatron loads at any TP and PP sizes.

    Args:
        format: ``torch_dist`` or ``zarr``.
    """
    return FULLY_RESHARDABLE if format == "torch_dist" else MODEL_SPACE


class StackedOptimizer:
    """The entries and keys of an optimizer in a torch_dist or zarr checkpoint.

    Args:
        target: the destination; None for a checkpoint without an optimizer.
        format: ``torch_dist`` or ``zarr``.

    Attributes:
        common: entries of the common state.
        needs_common_file: the dialect of megatron-core 0.12 must become that of a ``common.pt``
            file.
        notes: notes for the user.

    Raises:
        UnsupportedError, CorruptError: as for ``target_groups``.
    """

    def __init__(self, target: ReshardTarget | None, format: str) -> None:
        self._optimizer: Optimizer | None = None
        self._sharding = wanted_sharding(format)
        self.common: dict[object, object] = {}
        self.needs_common_file = False
        self.notes: list[str] = []
        if target is None:
            return

        # Megatron transposes the weights of GroupedMLP, but not its states in this form.
        is_grouped = target.facts.expert_names == "grouped"
        if is_grouped and self._is_distributed and self._sharding == MODEL_SPACE:
            raise UnsupportedError(
                f"optimizer states of GroupedMLP experts cannot be written as {MODEL_SPACE}",
                hint=f"drop the optimizer with --no-optim, or add {OPTION} sequential",
            )

        # Another distribution of experts may need other groups: with EP, they have their own.
        self._optimizer = target.optimizer
        before, after = target.facts.topology, target.topology
        if target.facts.n_experts and (after.ep, after.expert_tp) != (before.ep, before.expert_tp):
            from core.megatron.optimizer.target_groups import target_groups

            groups = target_groups(target, trained(target.catalog.tensors))
            self._optimizer = replace(
                target.optimizer, groups=tuple(ParamGroup(settings) for settings in groups.settings)
            )

        # The entry of the common state, and the content_metadata by which Megatron loads it.
        content = as_mapping(get_common_state(target.catalog).get(CONTENT)) or {}
        self.common[OPTIMIZER] = common_entry(
            self._optimizer, sharding=self._sharding, is_layer_wise=target.is_layer_wise
        )
        if format == "torch_dist" or content:
            new_content: dict[object, object] = {}
            if self._is_distributed:
                new_content[_CONTENT_SHARDING] = self._sharding
                new_content["distrib_optim_fully_reshardable_mem_efficient"] = False
            new_content |= {
                name: value
                for name, value in content.items()
                if not str(name).startswith("distrib_optim_")
            }
            new_content["singleton_local_shards"] = False
            new_content["chained_optim_avoid_prefix"] = True
            self.common[CONTENT] = new_content
        if any("dampening" in group.settings for group in self._optimizer.groups):
            self.notes.append(
                "optimizer: megatron-core 0.16 can save SGD as torch_dist but fails to load it; "
                "start Megatron with --no-load-optim, or write rank files"
            )
        if self._is_distributed and content.get(_CONTENT_SHARDING) != self._sharding:
            self._note_form(target.catalog)

    @property
    def _is_distributed(self) -> bool:
        return self._optimizer is not None and self._optimizer.kind == "distributed"

    def key(self, key: str, name: str) -> str:
        """Return the key under which a tensor is written.

        Args:
            key: key in the global form.
            name: written key of the tensor or, for a state, of its parameter.
        """
        state = split_state_key(key)
        if state is None:
            return name
        is_param = (
            state[0] == MASTER and self._is_distributed and self._sharding == FULLY_RESHARDABLE
        )
        return f"{STATES}{'param' if is_param else state[0]}.{name}"

    def _note_form(self, catalog: Catalog) -> None:
        if self._sharding == MODEL_SPACE:
            form = f"the distributed optimizer is written as {MODEL_SPACE}"
            self.notes.append(f"content_metadata: {form}, the form that megatron-core 0.12 reads")
            return
        self.notes.append(
            f"content_metadata: the distributed optimizer is written as {FULLY_RESHARDABLE}, "
            "which megatron-core 0.15 and later can load with any parallel sizes"
        )
        facts = catalog.facet(TorchDistFacts)
        self.needs_common_file = facts is not None and facts.dialect == "0.12"
