"""Megatron's optimizer, built from a run of other software that trained a Hugging Face model.

========== ==================================================================================
 format     optimizer
========== ==================================================================================
 torch_dist the distributed one (``--use-distributed-optimizer``), which loads at any sizes
 rank files Float16Optimizer for 16-bit weights, FP32Optimizer for float32: numbered states; the
            flat buffers of the distributed one would depend on arguments of a run that is still
            to come
========== ==================================================================================

The steps are those of the groups, as the fused Adam of Apex and Transformer Engine counts them.

The state of the scheduler, without which Megatron loads no optimizer, is a constant schedule
(``core.megatron.extras.schedule``).

Source: megatron-core 0.16.1 ``core/optimizer/{optimizer,distrib_optimizer}.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import MASTER, MASTERS, Optimizer
from core.errors import UnsupportedError
from core.hf.optimizer.groups import PARAM_GROUPS, megatron_groups
from core.hf.optimizer.steps import read_steps
from core.megatron.extras.schedule import build_constant_schedule, describe_position
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

_HALF = ("float16", "bfloat16")
_SAMPLES = "global_samples"
"""DeepSpeed's entry for the number of samples trained on."""
_MOMENTS_OF_MEGATRON = ({"exp_avg", "exp_avg_sq"}, {"momentum_buffer"}, set[str]())
_OF_OTHERS = frozenset({"momentum_decay", "ns_steps", "max_coeff", "weight_lr_power"})
"""Settings of NAdam, torch's Muon, DeepSpeed's LAMB and schedule-free optimizers."""


@dataclass(frozen=True, slots=True)
class RestoredOptimizer:
    """An optimizer for Megatron's global form.

    Args:
        optimizer: its kind, groups and states.
        arguments: training arguments that follow from it.
        scheduler: the entry ``opt_param_scheduler``.
        n_steps: the number of steps taken; None if it is not recorded.
        notes: notes for the user.
    """

    optimizer: Optimizer
    arguments: Mapping[str, object]
    scheduler: Mapping[str, object]
    n_steps: int | None
    notes: tuple[str, ...]


def restored_optimizer(
    catalog: Catalog,
    trained: Mapping[str, tuple[int, str]],
    *,
    names: Sequence[str],
    states: Sequence[str],
    dtypes: Sequence[str],
    is_distributed: bool,
    store: ReadStore,
) -> RestoredOptimizer:
    """Build Megatron's optimizer.

    Args:
        catalog: weights, states and groups under Hugging Face's names.
        trained: as for ``megatron_groups``.
        names: Hugging Face names of all trained parameters.
        states: names of the states.
        dtypes: element types of the trained weights.
        is_distributed: build the distributed optimizer.
        store: the checkpoint's files, from which the number of steps is read.

    Raises:
        UnsupportedError: the optimizer is neither Adam nor SGD, parameters have taken different
            numbers of steps, or the settings of a group are missing or differ.
        CorruptError: a number of steps is not one.
    """
    _check_algorithm(catalog, states)
    n_steps = read_steps(catalog, names, store)
    groups, group_notes = megatron_groups(catalog, trained, n_steps=n_steps)
    kind = "distributed"
    if not is_distributed:
        kind = "float16" if any(dtype in _HALF for dtype in dtypes) else "fp32"
    optimizer = Optimizer(
        kind=kind,
        groups=tuple(groups),
        states=tuple(state for state in states if state != MASTER),
    )

    # The scheduler goes on at the sample that training has reached.
    samples = catalog.objects.get(_SAMPLES)
    n_samples = samples.value if samples is not None and type(samples.value) is int else 0
    settings = groups[0].settings
    scheduler = build_constant_schedule(settings, n_samples=n_samples)
    titles = {
        "distributed": "distributed optimizer (--use-distributed-optimizer); --to megatron writes "
        "the non-distributed optimizer",
        "float16": "Float16Optimizer (without --use-distributed-optimizer); --to torch_dist writes "
        "the distributed optimizer",
        "fp32": "FP32Optimizer, because the weights are float32 (--dtype bf16 writes bf16 weights "
        "and uses these as master weights); --to torch_dist writes the distributed optimizer",
    }
    iteration = (
        (f"the source does not record its iteration, so ckpt uses the step count, {n_steps}",)
        if catalog.iteration is None and n_steps
        else ()
    )
    notes = (
        *iteration,
        f"the optimizer is written as Megatron's {titles[kind]}",
        describe_position(n_samples),
        *group_notes,
    )
    arguments = {
        "use_distributed_optimizer": is_distributed,
        "consumed_train_samples": n_samples,
        "optimizer": "adam" if "betas" in settings else "sgd",
    }
    return RestoredOptimizer(optimizer, arguments, scheduler, n_steps, notes)


def _check_algorithm(catalog: Catalog, states: Sequence[str]) -> None:
    """Raise unless the states and settings are those of an optimizer that Megatron has.

    Other algorithms have states of the same names (Lion, RAdam, LAMB, torch's Muon), with which
    Megatron's Adam or SGD would go on without an error.

    Args:
        states: names of the states, without the number of steps.

    Raises:
        UnsupportedError: they are not.
    """
    moments = {*states} - MASTERS
    settings = {
        key.rpartition(".")[2]: item.value
        for key, item in catalog.objects.items()
        if key.startswith(PARAM_GROUPS)
    }
    foreign = sorted(_OF_OTHERS & settings.keys())
    problem = None
    if moments not in _MOMENTS_OF_MEGATRON:
        problem = f"its states are {', '.join(sorted(moments))}"
    elif foreign:
        problem = f"its groups have {', '.join(foreign)}"
    elif "decoupled_weight_decay" in settings and "amsgrad" not in settings:
        problem = "its groups have the settings of RAdam"
    elif settings.get("maximize") or settings.get("amsgrad"):
        problem = f"it uses {'maximize' if settings.get('maximize') else 'amsgrad'}"
    if problem is not None:
        raise UnsupportedError(
            f"Megatron has no Adam or SGD like this optimizer, because {problem}",
            hint="drop the optimizer with --no-optim",
        )
