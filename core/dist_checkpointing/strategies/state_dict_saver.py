"""torch's dcp.save in two halves, between which another process can write.

::

    save_state_dict_async_plan      every rank plans; the coordinator makes the metadata; the writer
    has the data
      … the writer's function and arguments are executed somewhere …
    save_state_dict_async_finalize  results of all ranks ──▶ ``.metadata``, or the same error on all
    of them

Every rank sends its plan to the coordinator. That is left out if the structure is known to be the
same: because the caller says so (``cached_ckpt_structure``), or because all ranks find their plans
among those of the checkpoint that was loaded (``loaded_all_plans``). The caller then has the
metadata already.

The strategies of this package do not need it; it serves scripts with writers of their own. Source:
the documented functions of ``core.dist_checkpointing.strategies.state_dict_saver``; megatron-core
0.16.1 for the five values that are returned.
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
        process_group: of the ranks that save, None for all.
        coordinator_rank: the rank that makes the metadata.
        planner: None for torch's DefaultSavePlanner. With ``can_run_decentralized_global_plan``,
            the coordinator does not send plans back.
        cached_ckpt_structure: central plan, local plan, and whether they equal those of the save
            before that: the second to fourth value of the last call. If given, the structure must
            not change.
        loaded_all_plans: ``all_local_plans`` of the metadata of a loaded checkpoint, by rank.

    Returns:
        (writer, metadata, wrapper) for ``save_state_dict_async_finalize``; this rank's final plan;
        its local plan; whether the final plan equals the cached one; whether the loaded metadata
        can be used. The metadata are None on other ranks than the coordinator, and if no plans were
        sent: the caller then uses those that it has.

    Raises:
        CheckpointException: torch's; planning failed on a rank.
    """
    central, local, is_valid = cached_ckpt_structure or (None, None, False)
    planner = planner or DefaultSavePlanner()
    wrapper = _DistWrapper(process_group, comm.is_distributed(), coordinator_rank)
    planning = _SavePlanning(state_dict, storage_writer, planner, wrapper, local)
    # Make the final plan: from the cache, on each rank alone, or on the coordinator.
    is_loaded = False
    if is_valid and central is not None:
        planning.make_local_plan()
        final = central
    elif _is_decentralized(planner) and _is_decentralized(storage_writer):
        final, is_loaded = planning.make_decentralized_plan(loaded_all_plans)
    else:
        final = wrapper.reduce_scatter("plan", planning.make_local_plan, planning.make_global_plan)
    final = planner.finish_plan(final)
    storage_writer.prepare_write_data(final, planner)
    assert planning.local is not None, "every case makes the local plan"
    return (
        (storage_writer, planning.metadata, wrapper),
        final,
        planning.local,
        central == final,
        is_loaded,
    )


class _SavePlanning:
    """The planning of one save.

    Args:
        state_dict, writer, planner, wrapper: of the save.
        local: this rank's plan of the save before, if it is the same.
    """

    def __init__(
        self, state_dict: Any, writer: Any, planner: Any, wrapper: Any, local: SavePlan | None
    ) -> None:
        self.state_dict = state_dict
        self.writer = writer
        self.planner = planner
        self.wrapper = wrapper
        self.local = local
        self.metadata: Metadata | None = None

    def make_local_plan(self) -> SavePlan:
        """Return the plan of the entries that this rank writes."""
        is_coordinator = self.wrapper.is_coordinator
        self.planner.set_up_planner(self.state_dict, is_coordinator=is_coordinator)
        self.writer.set_up_storage_writer(is_coordinator)
        plan = self.planner.create_local_plan() if self.local is None else self.local
        self.local = self.writer.prepare_local_plan(plan)
        return self.local

    def make_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the final plans of all ranks; on the coordinator."""
        plans, self.metadata = self.planner.create_global_plan(plans)
        return list(self.writer.prepare_global_plan(plans))

    def make_decentralized_plan(self, loaded: list[SavePlan] | None) -> tuple[SavePlan, bool]:
        """Return this rank's final plan, and whether the loaded metadata fit; collective."""
        wrapper = self.wrapper
        plan = comm.together(self.make_local_plan, wrapper.group)
        is_loaded = verify_global_md_reuse(loaded or [], plan, comm.rank(wrapper.group), wrapper)
        # Only the coordinator needs all plans, for the metadata.
        if not is_loaded:
            plans = wrapper.gather_object(plan)

            def make_metadata() -> None:
                if wrapper.is_coordinator:
                    _, self.metadata = self.planner.create_global_plan(plans)
                    self.metadata.all_local_plans = plans

            comm.together(make_metadata, wrapper.group)
        plan = self.planner.create_decentralized_global_plan(plan)
        return self.writer.prepare_decentralized_global_plan(plan), is_loaded


def _is_decentralized(planner_or_writer: Any) -> bool:
    return bool(getattr(planner_or_writer, "can_run_decentralized_global_plan", False))


def verify_global_md_reuse(
    loaded_all_plans: Sequence[SavePlan], local_plan: SavePlan, rank: int, dist_wrapper: Any
) -> bool:
    """Return whether every rank has the same plan as in the loaded checkpoint; collective.

    Not collective if there are no loaded plans.

    Args:
        loaded_all_plans: by rank; the same number on all ranks.
        local_plan: of this rank.
        rank: this rank.
        dist_wrapper: of the planning.
    """
    if len(loaded_all_plans) != dist_wrapper.get_world_size():
        return False
    before = loaded_all_plans[rank]
    # The storage data hold prefixes of files, which may differ.
    names = [field.name for field in fields(local_plan) if field.name != "storage_data"]
    differs = any(getattr(local_plan, name) != getattr(before, name, None) for name in names)
    return not comm.any_of_all(differs, dist_wrapper.group)


def save_state_dict_async_finalize(
    storage_writer: Any, global_metadata: Metadata | None, dist_wrapper: Any
) -> None:
    """Write the metadata if all ranks have written their files; collective.

    Args:
        storage_writer, global_metadata, dist_wrapper: from ``save_state_dict_async_plan``. Metadata
            are needed on the coordinator.

    Raises:
        CheckpointException: torch's; a rank failed. On every rank, with all failures.
    """
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
