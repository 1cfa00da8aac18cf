"""CK403, CK404 and CK409 of optimizers whose states have names: does each belong to a parameter, and has its shape?

::

    optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight    Megatron's
    app.optim.state.model.layers.0.mlp.up_proj.weight.exp_avg       torch's state dicts, as FSDP saves them
    optimizer.state.0.exp_avg                                       numbered, in plain torch files: only compared among
                                                                    themselves

Which of several optimizers a parameter has (Muon beside Adam) is not known, so a state is missed only where it is one
of a set that most parameters have, and this one has others of the set.

Source: torch 2.13 ``torch/distributed/checkpoint/state_dict.py``; ``core.megatron.optimizer.sharded.read``;
tests/golden.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from core.catalog.catalog import Catalog, TensorMeta
from core.catalog.optimizer_keys import MASTERS, MOMENTS
from core.changes.rename import is_optimizer_key
from core.checks.check import Check, Code
from core.checks.finding import Finding, Severity
from core.checks.metadata.optimizer import SHAPE, STATES
from core.checks.subject import Subject
from core.errors import CheckpointingException
from core.megatron.optimizer.groups import HALF
from core.megatron.optimizer.sharded.read import in_true_shapes

NO_PARAMETER = Code(
    "CK409", Severity.ERROR, "states of a parameter that is not there", "use an older checkpoint: a tensor was lost"
)

CODES = (NO_PARAMETER,)

_NAMES = "|".join(sorted(MOMENTS | MASTERS, key=len, reverse=True))
_MEGATRONS = re.compile(rf"(?P<at>(?:chained_\d+\.)?optimizer\.state\.)(?P<state>{_NAMES})\.(?P<param>.+)", re.DOTALL)
_TORCHS = re.compile(rf"(?P<at>(?:.*\.)?state\.)(?P<param>.+)\.(?P<state>{_NAMES})", re.DOTALL)


@dataclass(slots=True)
class _Param:
    """A parameter by its states: state → key."""

    keys: dict[str, str] = field(default_factory=dict)
    tensor: str | None = None


def belonging(subject: Subject) -> Iterator[Finding]:
    """Compares states with parameters, and the sets of states that parameters have."""
    catalog = subject.salvaged.catalog
    if catalog is None or catalog.is_rank_local:
        return
    problems = {err.key for err in subject.salvaged.problems}
    params = _params(catalog)
    if not params:
        return
    is_named = _find_tensors(catalog, params)
    shapes = _true_shapes(catalog, [key for param in params.values() for key in param.keys.values()])
    usual = _usual(params)
    has_masters = any(MASTERS & param.keys.keys() for param in params.values())
    for name, param in params.items():
        key = next(iter(param.keys.values()))
        meta = None if param.tensor is None else shapes.get(param.tensor, catalog.tensors.get(param.tensor))
        if is_named and meta is None and name not in problems:
            yield NO_PARAMETER.finding(
                f"the optimizer has {', '.join(sorted(param.keys))} of it, but the model does not have it",
                file=_file_of(catalog, key),
                key=key,
                expected=f"the tensor {name}",
                found="no such tensor",
            )
        yield from _shapes(catalog, param, meta, shapes)
        lost = usual - param.keys.keys() if MOMENTS & param.keys.keys() <= usual else frozenset()
        if has_masters and meta is not None and meta.dtype in HALF and not MASTERS & param.keys.keys():
            lost |= {"a master"}
        if lost and not problems:
            yield STATES.finding(
                f"the optimizer has no {' and no '.join(sorted(lost))} of this parameter",
                file=_file_of(catalog, key),
                key=param.tensor or name,
                expected=", ".join(sorted(usual)),
                found=", ".join(sorted(param.keys)),
            )


def _params(catalog: Catalog) -> dict[str, _Param]:
    """The parameters that have states, by the name that the optimizer has for them."""
    found: dict[str, _Param] = {}
    for key in catalog.tensors:
        if is_optimizer_key(key) and (match := _MEGATRONS.fullmatch(key) or _TORCHS.fullmatch(key)) is not None:
            found.setdefault(match["param"], _Param()).keys[match["state"]] = key
    return found


def _find_tensors(catalog: Catalog, params: Mapping[str, _Param]) -> bool:
    """Notes the tensor of every parameter; returns whether names are those of the model's tensors at all.

    They may be names within the model's container (``app.model.`` before them).
    """
    model = [key for key in catalog.tensors if not is_optimizer_key(key)]
    before = Counter[str]()
    for key in model:
        at = 0
        while True:
            if key[at:] in params:
                before[key[:at]] += 1
            at = key.find(".", at) + 1
            if at == 0:
                break
    if not before:
        return False
    prefix, n = min(before.items(), key=lambda item: (-item[1], len(item[0])))
    for name, param in params.items():
        if prefix + name in catalog.tensors:
            param.tensor = prefix + name
    return 2 * n > len(params)


def _true_shapes(catalog: Catalog, keys: list[str]) -> Mapping[str, TensorMeta]:
    try:
        return in_true_shapes(catalog, keys).tensors
    except CheckpointingException:
        return catalog.tensors


def _usual(params: Mapping[str, _Param]) -> frozenset[str]:
    """The moments that most parameters have, if more than half of them have the same."""
    sets = Counter(frozenset(MOMENTS & param.keys.keys()) for param in params.values())
    usual, n = sets.most_common(1)[0]
    return usual if 2 * n > len(params) else frozenset()


def _shapes(
    catalog: Catalog, param: _Param, meta: TensorMeta | None, shapes: Mapping[str, TensorMeta]
) -> Iterator[Finding]:
    """Compares the shapes of a parameter's states with its own, else with one another."""
    wanted = meta or next(iter(shapes[key] for key in param.keys.values()))
    for key in param.keys.values():
        found = shapes[key].shape
        is_rearranged = len(found) != len(wanted.shape) or ".experts." in key
        if found == wanted.shape or (is_rearranged and prod(found) == prod(wanted.shape)):
            continue  # flattened by FSDP, cut up or transposed by older Megatron, as converted without its metadata
        yield SHAPE.finding(
            "the state has another shape than its parameter",
            file=_file_of(catalog, key),
            key=key,
            expected=f"shape {wanted.shape}" + ("" if meta is None else f" (of {meta.key})"),
            found=f"shape {found}",
        )


def _file_of(catalog: Catalog, key: str) -> str | None:
    """A file that holds something of a tensor."""
    arrays = (piece.array for piece in catalog.fragments(key))
    return next((array.extent.file for array in arrays if array is not None), None)


CHECKS = (Check(belonging),)
