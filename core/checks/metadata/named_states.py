"""CK403, CK404, CK409: named optimizer states belong to a parameter and have its shape.

::

    optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight    Megatron's
    app.optim.state.model.layers.0.mlp.up_proj.weight.exp_avg       torch's state dicts, as FSDP saves them
    optimizer.state.0.exp_avg                                       numbered, in plain torch files: states are only
                                                                    compared with each other

Which of several optimizers a parameter has (Muon next to Adam) is unknown, so a state counts as
missing only if it is one of a set that most parameters have, and this parameter has others of the
set.

Source: torch 2.13 ``torch/distributed/checkpoint/state_dict.py``;
``core.megatron.optimizer.sharded.read``; tests/golden.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    "CK409",
    Severity.ERROR,
    "optimizer states of a missing parameter",
    "use an older checkpoint: a tensor was lost",
)

CODES = (NO_PARAMETER,)

_NAMES = "|".join(sorted(MOMENTS | MASTERS, key=len, reverse=True))
_MEGATRONS = re.compile(
    rf"(?P<at>(?:chained_\d+\.)?optimizer\.state\.)(?P<state>{_NAMES})\.(?P<param>.+)", re.DOTALL
)
_TORCHS = re.compile(rf"(?P<at>(?:.*\.)?state\.)(?P<param>.+)\.(?P<state>{_NAMES})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _ModelMatch:
    """The model's tensors that the optimizer's parameter names stand for.

    Args:
        tensors: parameter name → name of the model's tensor, where there is one.
        are_model_names: parameter names correspond to tensor names of the model.
    """

    tensors: Mapping[str, str]
    are_model_names: bool


def check_named_states(subject: Subject) -> Iterator[Finding]:
    """Compare named optimizer states with the parameters, and parameters with each other."""
    catalog = subject.salvaged.catalog
    if catalog is None or catalog.is_rank_local:
        return
    keys_of = _states_by_parameter(catalog)
    if not keys_of:
        return
    problems = {err.key for err in subject.salvaged.problems}
    model = _match_model_tensors(catalog, keys_of)
    shapes = _true_shapes(catalog, [key for keys in keys_of.values() for key in keys.values()])
    usual = _usual_states(keys_of)
    has_masters = any(MASTERS & keys.keys() for keys in keys_of.values())

    for name, keys in keys_of.items():
        first_key = next(iter(keys.values()))
        file = _file_of(catalog, first_key)
        tensor = model.tensors.get(name)
        meta = None if tensor is None else shapes.get(tensor, catalog.tensors.get(tensor))

        # The parameter must be in the model.
        if model.are_model_names and meta is None and name not in problems:
            yield NO_PARAMETER.finding(
                f"the optimizer has {', '.join(sorted(keys))} for this parameter, but the model does not contain it",
                file=file,
                key=first_key,
                expected=f"the tensor {name}",
                found="no such tensor",
            )
        yield from _check_shapes(catalog, keys, meta, shapes)

        # The states must be complete, unless entries of the metadata were lost anyway.
        missing = _missing_states(keys, meta, usual=usual, has_masters=has_masters)
        if missing and not problems:
            yield STATES.finding(
                f"the optimizer has no {' and no '.join(sorted(missing))} for this parameter",
                file=file,
                key=tensor or name,
                expected=", ".join(sorted(usual)),
                found=", ".join(sorted(keys)),
            )


def _states_by_parameter(catalog: Catalog) -> dict[str, dict[str, str]]:
    """Return parameter name → state name → tensor name, for all named optimizer states."""
    keys_of: dict[str, dict[str, str]] = {}
    for key in catalog.tensors:
        if (
            is_optimizer_key(key)
            and (match := _MEGATRONS.fullmatch(key) or _TORCHS.fullmatch(key)) is not None
        ):
            keys_of.setdefault(match["param"], {})[match["state"]] = key
    return keys_of


def _match_model_tensors(catalog: Catalog, keys_of: Mapping[str, Mapping[str, str]]) -> _ModelMatch:
    """Match parameters with tensors of the model.

    The model's tensors may have a prefix that the optimizer omits (``app.model.``); the most
    frequent one is taken.
    """
    # Try every suffix of each tensor name after a dot, and count the prefixes in front of matching ones.
    prefixes = Counter[str]()
    for key in catalog.tensors:
        if is_optimizer_key(key):
            continue
        start = 0
        while True:
            if key[start:] in keys_of:
                prefixes[key[:start]] += 1
            start = key.find(".", start) + 1
            if start == 0:
                break
    if not prefixes:
        return _ModelMatch({}, are_model_names=False)
    prefix, n_matches = min(prefixes.items(), key=lambda item: (-item[1], len(item[0])))
    tensors = {name: prefix + name for name in keys_of if prefix + name in catalog.tensors}
    return _ModelMatch(tensors, are_model_names=2 * n_matches > len(keys_of))


def _true_shapes(catalog: Catalog, keys: list[str]) -> Mapping[str, TensorMeta]:
    """Return tensors with the shapes that they have in the model; as stored if that cannot be
    determined.
    """
    try:
        return in_true_shapes(catalog, keys).tensors
    except CheckpointingException:
        return catalog.tensors


def _usual_states(keys_of: Mapping[str, Mapping[str, str]]) -> frozenset[str]:
    """Return the set of moments that more than half of the parameters have.

    Empty if there is none.
    """
    sets = Counter(frozenset(MOMENTS & keys.keys()) for keys in keys_of.values())
    usual, n = sets.most_common(1)[0]
    return usual if 2 * n > len(keys_of) else frozenset()


def _missing_states(
    keys: Mapping[str, str], meta: TensorMeta | None, *, usual: frozenset[str], has_masters: bool
) -> frozenset[str]:
    """Return the states that a parameter should have and lacks.

    Args:
        keys: states that the parameter has.
        meta: its tensor in the model; None if unknown.
        usual: moments that most parameters have.
        has_masters: some parameters have an fp32 master.
    """
    missing = usual - keys.keys() if MOMENTS & keys.keys() <= usual else frozenset()
    if has_masters and meta is not None and meta.dtype in HALF and not MASTERS & keys.keys():
        missing |= {"a master"}
    return missing


def _check_shapes(
    catalog: Catalog,
    keys: Mapping[str, str],
    meta: TensorMeta | None,
    shapes: Mapping[str, TensorMeta],
) -> Iterator[Finding]:
    """Compare the shapes of a parameter's states with its own, or else with the first state."""
    expected = meta or shapes[next(iter(keys.values()))]
    for key in keys.values():
        shape = shapes[key].shape
        # FSDP flattens states; older Megatron cuts up or transposes those of experts, and a conversion without the
        # metadata keeps that.
        is_rearranged = len(shape) != len(expected.shape) or ".experts." in key
        if shape == expected.shape or (is_rearranged and prod(shape) == prod(expected.shape)):
            continue
        yield SHAPE.finding(
            "the shape of the state does not match its parameter",
            file=_file_of(catalog, key),
            key=key,
            expected=f"shape {expected.shape}" + ("" if meta is None else f" (of {meta.key})"),
            found=f"shape {shape}",
        )


def _file_of(catalog: Catalog, key: str) -> str | None:
    """Return a file that holds part of a tensor."""
    arrays = (piece.array for piece in catalog.fragments(key))
    return next((array.extent.file for array in arrays if array is not None), None)


CHECKS = (Check(check_named_states),)
