"""Find states that belong to the complete matrix of a parameter: SOAP, Shampoo, Adam-mini.

::

    PARAM.GG.0 (rows, rows), GG.1 (columns, columns), Q.0, Q.1     SOAP, and pytorch-optimizer's
    PARAM.L, R, Q_L, Q_R, eigvals_L, eigvals_R                     SOAP of Emerging-Optimizers
    PARAM.pre_cond_0, inv_pre_cond_0, pre_cond_1 …                 Shampoo of pytorch-optimizer
    PARAM.block_0.shampoo.factor_matrices.0, inv_factor_matrices.0 Distributed Shampoo; with FSDP
    PARAM.rank_0-block_0.shampoo.factor_matrices.0                 the blocks of each rank's shard
    PARAM.m, vmean, head_per_gpu           Adam-mini: the first moment of a query or key weight in
                                           the shape (heads, elements of a head), and a mean of
                                           squares for each head
    PARAM.m, vmean, neuron_per_gpu         of other matrices: a mean for each row, (rows, 1)
    PARAM.m, vmean, block_numel            of norms: one mean

Factors of a matrix say nothing about those of its parts, or of a stack that contains it; nor do
means of rows, which Adam-mini takes along the second axis whatever the shape. So they are copied as
they are, and refused where a change gives parameters other shapes.

Source: pytorch-optimizer 4.1.0 and facebookresearch/optimizers of 2026-08, whose states torch 2.13
saved in DCP; Emerging-Optimizers 0.4 ``legacy_soap/soap.py``; adam-mini 1.1.1, whose states are in
tests/golden/adam_mini.tar.xz.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.errors import UnsupportedError

_SOAP = re.compile(r"\.(?:(?:GG|Q)\.\d+|Q_[LR]|eigvals_[LR])$")
_SHAMPOO = re.compile(r"\.(?:(?:inv_)?pre_cond_\d+|(?:inv_)?factor_matrices(?:_\w+)?\.\d+)$")
_MEAN = re.compile(r"\.vmean$")
_NUMBERED = re.compile(r"(^|\.)state\.\d+\.")


def check_factors(keys: Iterable[str], *, option: str) -> None:
    """Raise if an optimizer has factors or block means of parameters, by their names.

    States of numbered parameters do not follow changes of the model, and are not looked at.

    Args:
        keys: keys of a checkpoint's tensors.
        option: the option that gives parameters other shapes.

    Raises:
        UnsupportedError: a state is a factor, or a mean over a block.
    """
    for key in keys:
        if not is_optimizer_key(key) or _NUMBERED.search(key):
            continue
        problem = None
        if _MEAN.search(key):
            problem = "Adam-mini, because its second moments are averages over heads or rows"
        elif _SOAP.search(key) or _SHAMPOO.search(key):
            owner = "SOAP" if _SOAP.search(key) else "Shampoo"
            problem = (
                f"{owner}, because its factors belong to a parameter's complete matrix and cannot "
                "be derived from factors of other shapes"
            )
        if problem is not None:
            raise UnsupportedError(
                f"{option} cannot be used with {problem}",
                key=key,
                hint="drop the optimizer with --no-optim; the weights are carried over exactly, "
                "but training continues with a fresh optimizer",
            )
