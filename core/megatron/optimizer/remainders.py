"""Recognise master weights of which only the low half is stored.

With ``--use-precision-aware-optimizer``, bf16 weights and fp32 master weights, Transformer Engine
(2.1 and later) keeps no master weights unless ``store_param_remainders`` is switched off::

    bits of the fp32 master weight = (bits of the bf16 weight << 16) + remainder      int16, signed

Megatron stores the remainders where the master weights would be: as int16 in ``dp_reshardable`` and
``fully_sharded_model_space``; as the same numbers in float32 (``-20113.0``), in distrib_optim.pt,
``fully_reshardable`` and ``dp_zero_gather_scatter``, which copy all states to float32. Taken for
master weights, they would replace the model's weights at the next step.

States of other dtypes (``exp_avg_dtype``, ``main_params_dtype``) are stored in float32, without
their scales, and are read like all others.

Source: megatron-core 0.16.1 ``core/optimizer/distrib_optimizer.py``
(``_get_main_param_and_optimizer_states``, ``get_parameter_state_dp_zero``),
``core/optimizer/optimizer_config.py``; TransformerEngine 2.x ``pytorch/optimizers/fused_adam.py``
(``get_unscaled_state``).

Not supported: joining remainders and weights. Megatron-LM 0.16.1 itself loads such an optimizer
from the two int16 forms only.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod

from core.arrays.dtypes import dtype_of
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import MASTER, split_state_key
from core.engine.catalog.stored import StoredArray
from core.engine.catalog.tensor import Tensor
from core.errors import UnsupportedError
from core.files.store import ReadStore

_LARGEST = 1 << 15
"""Largest absolute value of a remainder."""


def are_remainders(
    store: ReadStore | None,
    masters: StoredArray,
) -> bool:
    """Return whether stored master weights are remainders, judged by a sample.

    Remainders are integers of both signs, most of them far from zero. Weights can be so by design;
    ask for arrays whose elements do not round to the model's weights.

    Args:
        store: store that holds the array; None to judge by the dtype alone.
    """
    from core.megatron.optimizer.proof import sample_array

    if dtype_of(masters.dtype).kind == "int":
        return True
    if store is None or masters.dtype != "float32":
        return False
    data = sample_array(store, masters)
    values = struct.unpack(f"<{len(data) // 4}f", data)
    return min(values, default=0) < -1 < 1 < max(values, default=0) and all(
        value.is_integer() and abs(value) <= _LARGEST for value in values
    )


def check_master_dtypes(tensors: Mapping[str, Tensor]) -> None:
    """Raise if master weights are stored as integers.

    Args:
        tensors: those of the global per-layer form.

    Raises:
        UnsupportedError: they are.
    """
    for key, tensor in tensors.items():
        state = split_state_key(key)
        if state is not None and state[0] == MASTER and dtype_of(tensor.dtype).kind == "int":
            raise remainders_error(key=state[1])


def refuse_remainders(model: Catalog, store: ReadStore, strange: Sequence[str]) -> None:
    """Raise if master weights that are stored by name, and do not round to weights, are remainders.

    Args:
        model: the global per-layer form.
        store: the checkpoint's files.
        strange: the parameters that ``core.megatron.optimizer.proof.strange_masters`` returned.

    Raises:
        UnsupportedError: they are.
    """
    from core.megatron.optimizer.proof import pairs_of_masters

    # The largest array tells most.
    names = frozenset(strange)
    pairs = [pair for pair in pairs_of_masters(model) if pair[0] in names]
    largest = max(pairs, key=lambda pair: prod(pair[1].shape), default=None)
    if largest is not None and largest[1].dtype == "bfloat16":
        key, _, masters = largest
        if are_remainders(store, masters):
            raise remainders_error(key=key)


def remainders_error(*, key: str, rank: str | None = None) -> UnsupportedError:
    """Return the error about an optimizer that stores remainders.

    Args:
        key: a parameter whose master weights they belong to.
        rank: the rank that stores them; None for all.
    """
    return UnsupportedError(
        "the optimizer stores remainders (the low 16 bits of each master weight), as Transformer "
        "Engine's Adam does with --use-precision-aware-optimizer; ckpt cannot reshard or "
        "convert remainders",
        key=key,
        rank=rank,
        hint="drop the optimizer with --no-optim (the bf16 weights are exact), or save the "
        "checkpoint again from a run with store_param_remainders=False in OptimizerConfig",
        rule="optim.remainders",
    )
