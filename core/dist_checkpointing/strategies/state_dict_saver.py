"""torch's dcp.save in two halves, between which another process can write.

::

    save_state_dict_async_plan      every rank plans; the coordinator builds the metadata;
                                    the writer receives the data
      … any process calls the writer's function …
    save_state_dict_async_finalize  gather the results of all ranks, then write ``.metadata``
                                    or raise the same error on all ranks

Every rank sends its plan to the coordinator, unless the structure is known to be the same: because
the caller declares it (``cached_ckpt_structure``), or because all ranks find their plans among
those of the loaded checkpoint (``loaded_all_plans``). The caller then already has the metadata.

The strategies of this package do not need these functions; they serve scripts with writers of
their own. Source: the documented functions of
``core.dist_checkpointing.strategies.state_dict_saver``; megatron-core 0.16.1 for the five values
that are returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper, _get_failure_dict

from core.dist_checkpointing._ranks import comm

_PlanningResult = tuple[tuple[Any, Metadata | None, Any], SavePlan, SavePlan, bool, bool]


def save_state_dict_async_plan(
    state_dict: Any,
    storage_writer: Any,
    process_group: Any = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    cached_ckpt_structure: tuple[SavePlan | None, SavePlan | None, bool] | None = None,
    loaded_all_plans: list[SavePlan] | None = None,
) -> _PlanningResult:
    """Plan a save and give the writer its data; collective.

    Args:
        state_dict: this rank's state, from ``mcore_to_pyt_state_dict``, or any state dict that
            torch saves.
        storage_writer: a FileSystemWriterAsync, or an object with the same steps.
        process_group: group of the ranks that save, None for all ranks.
        coordinator_rank: the rank that builds the metadata.
        planner: None for torch's DefaultSavePlanner. With ``can_run_decentralized_global_plan``,
            the coordinator does not send plans back.
        cached_ckpt_structure: central plan, local plan, and whether they equal those of the save
            before: the second to fourth value that the last call returned. If given, the structure
            must not change.
        loaded_all_plans: ``all_local_plans`` of the metadata of a loaded checkpoint, by rank.

    Returns:
        (writer, metadata, wrapper) for ``save_state_dict_async_finalize``; this rank's final plan;
        its local plan; True if the final plan equals the cached one; True if the loaded metadata
        can be used. The metadata is None on ranks other than the coordinator, and if no plans were
        sent: the caller then uses the metadata that it has.

    Raises:
        CheckpointException: planning failed on a rank (an error class of torch).
    """
    central_plan, local_plan, is_cache_valid = cached_ckpt_structure or (None, None, False)
    planner = planner or DefaultSavePlanner()
    wrapper = _DistWrapper(process_group, comm.has_process_group(), coordinator_rank)
    planning = _SavePlanning(state_dict, storage_writer, planner, wrapper, local_plan)

    # Create the final plan: from the cache, on each rank separately, or on the coordinator.
    is_loaded = False
    if is_cache_valid and central_plan is not None:
        # The local plan sets up the planner and the writer, too.
        planning.create_local_plan()
        final_plan = central_plan
    elif all(
        getattr(party, "can_run_decentralized_global_plan", False)
        for party in (planner, storage_writer)
    ):
        final_plan, is_loaded = planning.create_decentralized_plan(loaded_all_plans)
    else:
        final_plan = wrapper.reduce_scatter(
            "plan", planning.create_local_plan, planning.create_global_plan
        )

    # Give the data to the writer.
    final_plan = planner.finish_plan(final_plan)
    storage_writer.prepare_write_data(final_plan, planner)
    assert planning.local_plan is not None, "every branch creates the local plan"
    return (
        (storage_writer, planning.metadata, wrapper),
        final_plan,
        planning.local_plan,
        central_plan == final_plan,
        is_loaded,
    )


class _SavePlanning:
    """The planning of one save.

    Args:
        state_dict, writer, planner, wrapper: those of the save.
        local_plan: this rank's plan of the last save, None to create a new one.
    """

    def __init__(
        self, state_dict: Any, writer: Any, planner: Any, wrapper: Any, local_plan: SavePlan | None
    ) -> None:
        self.state_dict = state_dict
        self.writer = writer
        self.planner = planner
        self.wrapper = wrapper
        self.local_plan = local_plan
        self.metadata: Metadata | None = None

    def create_local_plan(self) -> SavePlan:
        """Plan the entries that this rank writes."""
        is_coordinator = self.wrapper.is_coordinator
        self.planner.set_up_planner(self.state_dict, is_coordinator=is_coordinator)
        self.writer.set_up_storage_writer(is_coordinator)
        plan = self.planner.create_local_plan() if self.local_plan is None else self.local_plan
        self.local_plan = self.writer.prepare_local_plan(plan)
        return self.local_plan

    def create_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the final plans of all ranks, and the metadata; on the coordinator."""
        plans, self.metadata = self.planner.create_global_plan(plans)
        return list(self.writer.prepare_global_plan(plans))

    def create_decentralized_plan(
        self, loaded_plans: list[SavePlan] | None
    ) -> tuple[SavePlan, bool]:
        """Create this rank's final plan without the other ranks' plans; collective.

        Returns:
            The plan, and True if the metadata of the loaded checkpoint can be used.
        """
        wrapper = self.wrapper
        plan = comm.together(self.create_local_plan, wrapper.group)
        is_loaded = verify_global_md_reuse(
            loaded_plans or [], plan, comm.rank(wrapper.group), wrapper
        )
        # Only the coordinator needs all plans, for the metadata.
        if not is_loaded:
            plans = wrapper.gather_object(plan)

            def create_metadata() -> None:
                if wrapper.is_coordinator:
                    _, self.metadata = self.planner.create_global_plan(plans)
                    self.metadata.all_local_plans = plans

            comm.together(create_metadata, wrapper.group)
        plan = self.planner.create_decentralized_global_plan(plan)
        return self.writer.prepare_decentralized_global_plan(plan), is_loaded


def verify_global_md_reuse(
    loaded_all_plans: Sequence[SavePlan], local_plan: SavePlan, rank: int, dist_wrapper: Any
) -> bool:
    """Check if every rank has the same plan as in the loaded checkpoint; collective.

    Not collective if the number of loaded plans is not the number of ranks.

    Args:
        loaded_all_plans: the loaded plans by rank; the same number on all ranks.
        local_plan: this rank's plan.
        rank: this rank, in the group of the wrapper.
        dist_wrapper: torch's wrapper of the process group that plans.
    """
    if len(loaded_all_plans) != dist_wrapper.get_world_size():
        return False
    loaded_plan = loaded_all_plans[rank]
    # Ignore the storage data: the prefixes of file names, which may differ.
    names = [field.name for field in fields(local_plan) if field.name != "storage_data"]
    differs = any(getattr(local_plan, name) != getattr(loaded_plan, name, None) for name in names)
    return not comm.any_of_all(differs, dist_wrapper.group)


def save_state_dict_async_finalize(
    storage_writer: Any, global_metadata: Metadata | None, dist_wrapper: Any
) -> None:
    """Write the metadata if all ranks have written their files; collective.

    Args:
        storage_writer, global_metadata, dist_wrapper: from ``save_state_dict_async_plan``. Only the
            coordinator needs the metadata.

    Raises:
        CheckpointException: a rank failed (an error class of torch). It is raised on every rank,
            with the failures of all ranks.
    """
    # Exchange the failures first, so that no rank waits for one that has failed.
    coordinator, group = dist_wrapper.coordinator_rank, dist_wrapper.group
    results = comm.gather(storage_writer.retrieve_write_results(), coordinator, group)
    failures = comm.broadcast(
        None if results is None else _get_failure_dict(results), coordinator, group
    )
    if failures:
        raise CheckpointException("write", failures)

    def write() -> None:
        if results is not None:
            storage_writer.finish(global_metadata, results)

    comm.together(write, group)
