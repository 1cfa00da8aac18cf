"""Find optimizer states that are computed from the complete matrix of a parameter: SOAP, Shampoo.

::

    PARAM.GG.0 (rows, rows), GG.1 (columns, columns), Q.0, Q.1     SOAP, and pytorch-optimizer's
    PARAM.L, R, Q_L, Q_R, eigvals_L, eigvals_R                     SOAP of Emerging-Optimizers
    PARAM.pre_cond_0, inv_pre_cond_0, pre_cond_1 …                 Shampoo of pytorch-optimizer
    PARAM.block_0.shampoo.factor_matrices.0, inv_factor_matrices.0 Distributed Shampoo; with FSDP
    PARAM.rank_0-block_0.shampoo.factor_matrices.0                 the blocks of each rank's shard

Factors of a matrix say nothing about those of its parts, or of a stack that contains it. So they
are copied as they are, and refused where a change gives parameters other shapes.

Source: pytorch-optimizer 4.1.0 and facebookresearch/optimizers of 2026-08, whose states torch 2.13
saved in DCP; Emerging-Optimizers 0.4 ``legacy_soap/soap.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from core.changes.rename import is_optimizer_key
from core.errors import UnsupportedError

_SOAP = re.compile(r"\.(?:(?:GG|Q)\.\d+|Q_[LR]|eigvals_[LR])$")
_SHAMPOO = re.compile(r"\.(?:(?:inv_)?pre_cond_\d+|(?:inv_)?factor_matrices(?:_\w+)?\.\d+)$")
_NUMBERED = re.compile(r"(^|\.)state\.\d+\.")


def check_factors(keys: Iterable[str], *, option: str) -> None:
    """Raise if an optimizer has factors of parameters, by their names.

    States of numbered parameters do not follow changes of the model, and are not looked at.

    Args:
        keys: keys of a checkpoint's tensors.
        option: the option that gives parameters other shapes.

    Raises:
        UnsupportedError: a state is a factor.
    """
    for key in keys:
        if not is_optimizer_key(key) or _NUMBERED.search(key):
            continue
        owner = "SOAP" if _SOAP.search(key) else "Shampoo" if _SHAMPOO.search(key) else None
        if owner is not None:
            raise UnsupportedError(
                f"{option}: the optimizer is {owner}, whose factors are those of a parameter's "
                "complete matrix and do not follow from factors of other shapes",
                key=key,
                hint="drop the optimizer with --no-optim; the weights are exact, and training "
                "starts with a fresh optimizer",
            )
