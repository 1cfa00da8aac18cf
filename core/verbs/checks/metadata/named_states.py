"""CK403, CK404, CK409: check that named optimizer states have a parameter, and its shape.

::

    optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight  Megatron
    app.optim.state.model.layers.0.mlp.up_proj.weight.exp_avg     torch state dicts, saved by FSDP
    optimizer.state.0.exp_avg                                     numbered, in plain torch files:
                                                                  states are only compared with
                                                                  each other

A model may have several optimizers (Muon next to Adam), so a state counts as missing only if it is
one of a set that most parameters have, and this parameter has no state outside that set.

torchtitan trains the query, key and value weights as one parameter, ``qkv_linear.wqkv``, and splits
only the weights when it saves (``wq``, ``wk``, ``wv``): the states keep the shape and the name of
that parameter.

Source: torch 2.13 ``torch/distributed/checkpoint/state_dict.py``; checkpoints of torchtitan 0.3.0;
``core.megatron.optimizer.sharded.read``; tests/golden.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import TorchDistFacts
from core.engine.catalog.optimizer_keys import MASTERS, MOMENTS, is_optimizer_key
from core.engine.catalog.tensor import Tensor
from core.errors import CheckpointingException
from core.values import dataclass
from core.verbs.checks.finding import Finding, get_code
from core.verbs.checks.subject import Check, Subject

NO_PARAMETER = get_code("CK409")


_NAMES = "|".join(sorted(MOMENTS | MASTERS, key=len, reverse=True))
_MEGATRON_KEY = re.compile(
    rf"(?P<at>(?:chained_\d+\.)?optimizer\.state\.)(?P<state>{_NAMES})\.(?P<param>.+)", re.DOTALL
)
_TORCH_KEY = re.compile(rf"(?P<at>(?:.*\.)?state\.)(?P<param>.+)\.(?P<state>{_NAMES})", re.DOTALL)

_FUSED, _PARTS = ".wqkv.", ("wq", "wk", "wv")
"""torchtitan's fused parameter, and the parts as which its weights are saved."""


@dataclass(frozen=True, slots=True)
class _NamedStates:
    """The named optimizer states of a checkpoint.

    Args:
        keys_of: parameter name → state name → name of the state's tensor.
        model_tensors: parameter name → name of the model's tensor, where there is one.
        joined: parameter name → the parameter that is saved as several tensors of the model.
        are_model_names: parameter names correspond to tensor names of the model.
        shapes: state and model tensors with the shapes that they have in the model.
        usual: moments that more than half of the parameters have; empty if there is no such set.
        has_masters: some parameters have an fp32 master weight.
    """

    keys_of: Mapping[str, Mapping[str, str]]
    model_tensors: Mapping[str, str]
    joined: Mapping[str, Tensor]
    are_model_names: bool
    shapes: Mapping[str, Tensor]
    usual: frozenset[str]
    has_masters: bool


def check_named_states(subject: Subject) -> Iterator[Finding]:
    """Compare named optimizer states with the parameters, and parameters with each other."""
    catalog = subject.salvaged.catalog
    if catalog is None or catalog.is_rank_local:
        return
    states = _collect_states(catalog)
    if states is None:
        return
    problems = {err.key for err in subject.salvaged.problems}
    for name, keys in states.keys_of.items():
        first_key = next(iter(keys.values()))
        file = _file_of(catalog, first_key)
        tensor = states.model_tensors.get(name)
        meta = states.joined.get(name)
        if tensor is not None:
            meta = states.shapes.get(tensor, catalog.tensors.get(tensor))

        # The parameter must be in the model.
        if states.are_model_names and meta is None and name not in problems:
            yield NO_PARAMETER.finding(
                f"the optimizer has {', '.join(sorted(keys))} for a parameter that is not in the "
                "model",
                file=file,
                key=first_key,
                expected=f"the tensor {name}",
                found="no such tensor",
            )
        owner = name if tensor is None else tensor
        yield from _check_shapes(catalog, keys, owner, meta, states.shapes)

        # The states must be complete, unless entries of the metadata were lost anyway. A parameter
        # with other moments has another optimizer.
        missing = (
            states.usual - keys.keys() if MOMENTS & keys.keys() <= states.usual else frozenset()
        )
        # Only parameters in half precision need a master weight.
        if states.has_masters and meta is not None and not MASTERS & keys.keys():
            from core.megatron.optimizer.groups import HALF

            if meta.dtype in HALF:
                missing |= {"master weight"}
        if missing and not problems:
            from core.verbs.checks.metadata.optimizer import STATES

            yield STATES.finding(
                f"the optimizer has no {' or '.join(sorted(missing))} for this parameter",
                file=file,
                key=tensor or name,
                expected=", ".join(sorted(states.usual)),
                found=", ".join(sorted(keys)),
            )


def _collect_states(catalog: Catalog) -> _NamedStates | None:
    """Group the named optimizer states by parameter; return None if there are none."""
    keys_of: dict[str, dict[str, str]] = {}
    for key in filter(is_optimizer_key, catalog.tensors):
        match = _MEGATRON_KEY.fullmatch(key) or _TORCH_KEY.fullmatch(key)
        if match is not None:
            keys_of.setdefault(match["param"], {})[match["state"]] = key
    if not keys_of:
        return None
    # Megatron stores some states flattened or transposed; without its metadata, the stored shapes
    # have to do.
    shapes = catalog.tensors
    if catalog.facet(TorchDistFacts) is not None:
        from core.megatron.optimizer.sharded.read import in_true_shapes

        with suppress(CheckpointingException):
            state_keys = [key for keys in keys_of.values() for key in keys.values()]
            shapes = in_true_shapes(catalog, state_keys).tensors
    moments = Counter(frozenset(MOMENTS & keys.keys()) for keys in keys_of.values())
    most_frequent, n_parameters = moments.most_common(1)[0]
    model_tensors, joined, are_model_names = _match_model_tensors(catalog, keys_of)
    return _NamedStates(
        keys_of,
        model_tensors,
        joined,
        are_model_names,
        shapes,
        usual=most_frequent if 2 * n_parameters > len(keys_of) else frozenset(),
        has_masters=any(MASTERS & keys.keys() for keys in keys_of.values()),
    )


def _match_model_tensors(
    catalog: Catalog, keys_of: Mapping[str, Mapping[str, str]]
) -> tuple[dict[str, str], dict[str, Tensor], bool]:
    """Match parameters with tensors of the model.

    The model's tensors may have a prefix that the optimizer omits (``app.model.``); the most
    frequent one is taken.

    Returns:
        parameter name → tensor name; parameter name → parameter, for those that are saved as
        several tensors; and whether most parameter names are names of the model.
    """
    # Try the complete name of each tensor and every suffix after a dot, and count the prefixes in
    # front of those that are parameter names.
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
        return {}, {}, False
    prefix, n_matches = min(prefixes.items(), key=lambda item: (-item[1], len(item[0])))
    tensors = {name: prefix + name for name in keys_of if prefix + name in catalog.tensors}
    joined = {}
    for name in keys_of:
        head, fused, tail = name.rpartition(_FUSED)
        parts = [catalog.tensors.get(f"{prefix}{head}.{part}.{tail}") for part in _PARTS]
        metas = [tensor for tensor in parts if tensor is not None and tensor.shape]
        if fused and len(metas) == len(_PARTS):
            n_rows = sum(tensor.shape[0] for tensor in metas)
            joined[name] = replace(metas[0], shape=(n_rows, *metas[0].shape[1:]))
    return tensors, joined, 2 * n_matches > len(keys_of)


def _check_shapes(
    catalog: Catalog,
    keys: Mapping[str, str],
    owner: str,
    tensor: Tensor | None,
    shapes: Mapping[str, Tensor],
) -> Iterator[Finding]:
    """Compare the shapes of a parameter's states with its own, or else with the first state's."""
    expected = tensor or shapes[next(iter(keys.values()))]
    for key in keys.values():
        shape = shapes[key].shape
        # FSDP flattens states. Older versions of Megatron split or transpose those of experts, and
        # a conversion without the metadata keeps that arrangement.
        is_rearranged = len(shape) != len(expected.shape) or ".experts." in key
        if shape == expected.shape or (is_rearranged and prod(shape) == prod(expected.shape)):
            continue
        from core.verbs.checks.metadata.optimizer import SHAPE

        yield SHAPE.finding(
            "the state's shape does not match its parameter's",
            file=_file_of(catalog, key),
            key=key,
            expected=f"shape {expected.shape}" + ("" if tensor is None else f", like {owner}"),
            found=f"shape {shape}",
        )


def _file_of(catalog: Catalog, key: str) -> str | None:
    """Return a file that holds part of a tensor; None if no file does."""
    arrays = (fragment.array for fragment in catalog.fragments(key))
    return next((array.extent.file for array in arrays if array is not None), None)


CHECKS = (Check(check_named_states),)
