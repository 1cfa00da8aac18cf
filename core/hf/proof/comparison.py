"""Compare the tensors of a checkpoint with the model that a ``config.json`` describes.

The comparison has two uses: a conversion refuses the first problem (``core.hf.proof.proof``),
``ckpt validate`` reports all of them.

* known families (``hf/tables``): every name, shape and element type; the numbers of layers and
  experts; tied embeddings; quantized weights against ``quantization_config``;
* other families: everything that does not depend on their names (``core.hf.proof.any_family``).

These are not problems: a tied head that is stored nevertheless, buffers that follow from the
configuration, names without the prefix ``model.`` (a model without a head) or with ``transformer.``
(a question-answering model), tensors of another head than the language model's, multi-token
prediction layers that were omitted.

Source: transformers 5.23.0 ``modeling_utils.py`` ``from_pretrained``; models that it wrote, in
tests/hf.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from core.arrays.box import Shape
from core.arrays.dtypes import dtype_of, is_float8
from core.engine.catalog.tensor import Tensor
from core.errors import CorruptError
from core.hf.config_json.experts import dense_layers
from core.hf.config_json.hybrid import completed, count_predictions
from core.hf.family import Family
from core.hf.name_tables import BODY
from core.hf.proof.expected import (
    Described,
    Expected,
    declares_tie,
    expected_head,
    expected_tensors,
    find_model_class,
    stated_experts,
)
from core.hf.proof.problem import Kind, Problem
from core.hf.proof.quantization import (
    OWN_FILES,
    QuantizationScheme,
    find_owner,
    is_cache_scale,
    is_sign,
    scale_key,
    scheme_of,
)
from core.hf.values import CONFIG, count_of
from core.values import dataclass

_LAYER = re.compile(r"model\.(?:layers|h)\.(\d{1,6})\.")
_EXPERT = re.compile(r"model\.layers\.\d{1,6}\.(?:\w+\.)*experts\.(\d{1,6})\.")
_STACKED = re.compile(
    r"model\.layers\.\d{1,6}\.(?:(?:\w+\.)*experts\.(?:gate_up_proj|up_proj|down_proj)(_blocks)?"
    r"|moe\.(?:gate|up|down)_proj\.weight)"
)
_ROUTER = re.compile(r"model\.layers\.\d{1,6}\.(mlp|mixer|block_sparse_moe|moe)\.gate\.weight")
_BODY_PARTS = tuple(
    """
    embed_tokens. layers. norm. rotary_emb. embeddings. norm_f. wte. wpe. h. ln_f. embed_in.
    final_layer_norm.
    """.split()
)
_BODY_OF_ANSWERS = "transformer."
"""The prefix of most question-answering models in place of ``model.``."""


def find_differences(
    tensors: Mapping[str, Tensor], config: Mapping[str, object], *, files: Collection[str] = ()
) -> tuple[Problem, ...]:
    """Find all differences between tensors and their configuration, causes before consequences.

    Args:
        tensors: tensors of a checkpoint, by name.
        config: parsed ``config.json``.
        files: names of the files in the same directory, one of which may declare the quantization.
    """
    model = find_model_class(config)
    has_own_file = any(name in files for name in OWN_FILES)
    try:
        if model is None:
            from core.hf.proof.any_family import find_problems

            return tuple(find_problems(tensors, config, has_own_file=has_own_file))
        return tuple(_find_all(_prepare_case(tensors, config, model), has_own_file=has_own_file))
    except CorruptError as err:  # a missing or invalid size
        return (Problem(kind="config", message=err.message),)


@dataclass(frozen=True, slots=True)
class _Counts:
    """Declared and stored numbers of layers and experts of a model.

    Args:
        layers, experts: numbers that the configuration declares.
        stored_layers, stored_experts: last number with a tensor, plus one.
        mtp: number of multi-token prediction layers with tensors, which follow the others.
    """

    layers: int
    experts: int
    stored_layers: int
    stored_experts: int
    mtp: int


@dataclass(frozen=True, slots=True)
class _Case:
    """The tensors of a checkpoint, and the model of a known family that they should form.

    Args:
        config: parsed ``config.json``.
        model: family and class of the model that it describes.
        stored: name in a language model → tensor.
        key_of: name in a language model → key of the tensor.
        body: prefix of the stored names in place of ``model.``.
        counts: numbers of layers and experts.
        scheme: declared quantization of the weights, or None.
        expected: tensors of the model, up to the smaller of the declared and stored counts.
        unmatched: names in ``stored`` that are not the name of an expected tensor.
        owner_of: name in ``unmatched`` that belongs to a quantized weight → module of the weight.
        quantized: modules with quantized weights.
    """

    config: Mapping[str, object]
    model: Described
    stored: Mapping[str, Tensor]
    key_of: Mapping[str, str]
    body: str
    counts: _Counts
    scheme: QuantizationScheme | None
    expected: tuple[Expected, ...]
    unmatched: tuple[str, ...]
    owner_of: Mapping[str, str]
    quantized: frozenset[str]

    def is_quantized(self, name: str) -> bool:
        """Return whether a weight is quantized: stored as, or together with, other tensors."""
        return name.removesuffix(".weight") in self.quantized


def _prepare_case(
    tensors: Mapping[str, Tensor], config: Mapping[str, object], model: Described
) -> _Case:
    """Match the stored tensors with those of the described model.

    Raises:
        CorruptError: the configuration lacks a size.
    """
    # Give all models the names of a language model, and count their parts.
    config = completed(config, model.family)
    # The body's prefix is empty in models that were saved without a head.
    own = tuple(dict.fromkeys((model.family.body, BODY)))
    bodies = (*own, _BODY_OF_ANSWERS, "") if "qa_outputs.weight" in model.head else (*own, "")
    body = next(
        (body for body in bodies if any(key.startswith(_body_prefixes(body)) for key in tensors)),
        own[0],
    )
    scheme = scheme_of(config)
    key_of = {_as_language_model(key, body): key for key in tensors}
    stored = {name: tensors[key] for name, key in key_of.items()}
    counts = _count_parts(stored, config, model.family)
    # Describe the model with the smaller of the declared and stored counts: a difference in counts
    # is one problem, not one per tensor.
    routed = {
        tensor.shape[0] for key, tensor in stored.items() if _ROUTER.fullmatch(key) and tensor.shape
    }
    is_as_declared = counts.stored_experts == counts.experts or counts.experts in routed
    of_family = expected_tensors(
        config,
        model.family,
        n_layers=min(counts.layers, counts.stored_layers),
        n_experts=min(counts.experts, counts.stored_experts),
        n_rows_router=counts.experts if is_as_declared else counts.stored_experts,
        n_mtp=counts.mtp,
    )
    expected = (*of_family, *expected_head(config, model))
    # Names that remain may belong to quantized weights.
    accepted = {name for item in expected for name in item.names}
    accepted |= {item.stack[0] for item in expected if item.stack is not None}
    unmatched = tuple(key for key in stored if key not in accepted)
    modules = {name.removesuffix(".weight").removesuffix(".bias") for name in accepted}
    is_quantized = scheme is not None or any(map(is_sign, unmatched))
    owners = ((key, find_owner(key, modules)) for key in unmatched) if is_quantized else ()
    owner_by_key = {key: owner for key, owner in owners if owner is not None}
    quantized = frozenset(owner_by_key.values())
    return _Case(
        config,
        model,
        stored,
        key_of,
        body,
        counts,
        scheme,
        expected,
        unmatched,
        owner_by_key,
        quantized,
    )


def _find_all(case: _Case, *, has_own_file: bool) -> Iterator[Problem]:
    """Yield all problems; a single one if no tensor has a name of the family."""
    if not any(name.startswith(BODY) for name in case.stored):
        first = next((f"; the first tensor is {name!r}" for name in case.stored), "")
        yield Problem(
            kind="missing",
            message=f"no tensor has a name that {case.model.family.model_type} models use{first}",
            key=case.expected[0].names[0],
            expected=f"{len(case.expected):,} tensors",
            found="none of them",
            is_lack=True,
        )
        return
    yield from _check_counts(case)
    yield from _check_quantization(case, has_own_file=has_own_file)
    for item in case.expected:
        yield from _check_expected(case, item)
    yield from _find_unexpected(case)


def _check_counts(case: _Case) -> Iterator[Problem]:
    """Yield a problem if the number of layers or experts differs from the declared one."""
    counts = case.counts
    kinds: tuple[tuple[Kind, int, int, re.Pattern[str]], ...] = (
        ("layers", counts.layers, counts.stored_layers, _LAYER),
        ("experts", counts.experts, counts.stored_experts, _EXPERT),
    )
    for kind, declared, stored, pattern in kinds:
        if declared != stored:
            matches = ((pattern.match(name), key) for name, key in case.key_of.items())
            yield Problem(
                kind=kind,
                message=f"{CONFIG} declares {declared:,} {kind}, but the checkpoint has tensors "
                f"for {stored:,}",
                key=next(
                    (key for match, key in matches if match and int(match[1]) == stored - 1), None
                ),
                expected=f"{declared} {kind}",
                found=str(stored),
                is_lack=stored < declared,
            )


def _check_expected(case: _Case, item: Expected) -> Iterator[Problem]:
    """Yield the problems of one tensor that the model should have."""
    # It is stored under one of its names.
    name = next((name for name in item.names if name in case.stored), None)
    if name is not None:
        yield from _check_stored(case, case.stored[name], name, item.shape)
        return
    # Or it is an expert in a tensor that stacks all of its layer, checked with the first of them. A
    # wrong number of experts is reported separately.
    if item.stack is not None and item.stack[0] in case.stored:
        if item.names[0].rpartition(".experts.")[2].partition(".")[0] == "0":
            name, (_, *extents) = item.stack
            shape = (case.counts.stored_experts, *extents)
            yield from _check_stored(case, case.stored[name], name, shape)
        return
    # Otherwise it is missing, which is a problem unless it repeats another tensor, is the output
    # layer of a model without one, or is replaced by tensors of a quantized weight.
    if item.is_optional:
        return
    family = case.model.family
    if item.names[0] == _as_language_model(family.first[0].hf[0], family.body):
        # The output layer stands for the embedding that it is tied to.
        if family.head in case.stored and declares_tie(case.config, family):
            return
    if item.names[0] == case.model.family.head:
        if case.model.has_head and not case.is_quantized(item.names[0]):
            yield Problem(
                kind="ties",
                message=f"{CONFIG} declares untied embeddings, but the output layer is missing",
                key=item.names[0],
                expected="the tensor, or tie_word_embeddings",
                found="neither",
                is_lack=True,
            )
        return
    names = item.names if item.stack is None else (*item.names, item.stack[0])
    if not any(map(case.is_quantized, names)):
        first = item.names[0]
        yield Problem(
            kind="missing",
            message="the tensor is not in the checkpoint",
            key=case.body + first.removeprefix(BODY) if first.startswith(BODY) else first,
            expected=f"the tensor, {item.shape}",
            found="no such tensor",
            is_lack=True,
        )


def _check_stored(case: _Case, tensor: Tensor, name: str, shape: Shape) -> Iterator[Problem]:
    """Yield the problems of a stored tensor.

    Args:
        tensor: the tensor.
        name: name of the tensor in a model with a head.
        shape: shape that it should have.
    """
    # Packed numbers have another shape than the weight, which depends on the method.
    is_packed = dtype_of(tensor.dtype).kind != "float"
    if is_packed and (case.scheme is not None or case.is_quantized(name)):
        return
    if is_packed:
        yield Problem(
            kind="dtype",
            message=f"the tensor is {tensor.dtype}, but {CONFIG} declares no quantization",
            key=case.key_of[name],
            expected="floating-point numbers",
            found=tensor.dtype,
        )
    if tensor.shape != shape:
        is_tied_head = name == case.model.family.head and declares_tie(
            case.config, case.model.family
        )
        tied = ", because it ties the output layer to the embedding" if is_tied_head else ""
        yield Problem(
            kind="ties" if is_tied_head else "shape",
            message=f"the tensor has shape {tensor.shape}, but {CONFIG} implies {shape}{tied}",
            key=case.key_of[name],
            expected=str(shape),
            found=str(tensor.shape),
        )
    if case.scheme is not None and is_float8(tensor.dtype):
        yield from _check_scales(case, tensor, name, case.scheme)


def _check_scales(
    case: _Case, tensor: Tensor, name: str, scheme: QuantizationScheme
) -> Iterator[Problem]:
    """Yield the problems of the scales of a float8 weight."""
    key = scale_key(name, case.stored)
    if key is None and scheme.needs_scales:
        yield Problem(
            kind="quantization",
            message=f"a {tensor.dtype} weight has no scales",
            key=case.key_of[name],
            expected=f"{case.key_of[name]}_scale_inv",
            found="no such tensor",
            is_lack=True,
        )
    elif key is not None and not scheme.fits(case.stored[key].shape, tensor.shape):
        yield Problem(
            kind="quantization",
            message=f"the scales have shape {case.stored[key].shape}, which does not fit a weight "
            f"of shape {tensor.shape} in blocks of {scheme.block}",
            key=case.key_of[key],
            expected=f"one scale for each block of {scheme.block}",
            found=str(case.stored[key].shape),
        )


def _check_quantization(case: _Case, *, has_own_file: bool) -> Iterator[Problem]:
    """Yield a problem if configuration and tensors disagree on whether weights are quantized."""
    signs = [key for key in case.owner_of if is_sign(key)]
    if case.scheme is None and signs and not has_own_file:
        yield Problem(
            kind="quantization",
            message=f"the checkpoint contains quantized weights ({len(signs):,} tensors), but "
            f"{CONFIG} has no quantization_config",
            key=case.key_of[signs[0]],
            expected="quantization_config",
            found="none",
        )
    narrow = (
        is_float8(tensor.dtype) or dtype_of(tensor.dtype).kind != "float"
        for tensor in case.stored.values()
    )
    if (
        case.scheme is not None
        and case.scheme.is_never_wide
        and not case.owner_of
        and not any(narrow)
    ):
        yield Problem(
            kind="quantization",
            message=f"{CONFIG} declares quantized weights ({case.scheme.method}), "
            "but none are quantized",
            expected=f"weights quantized with {case.scheme.method}",
            found="weights that are not quantized",
        )


def _find_unexpected(case: _Case) -> Iterator[Problem]:
    """Yield the tensors that the model does not have."""
    counts = case.counts
    for name in case.unmatched:
        # Tensors of quantized weights and buffers are allowed, as are heads that the body does not
        # have.
        is_known = name in case.owner_of or (case.scheme is not None and is_cache_scale(name))
        is_ignored = any(pattern.search(name) for pattern in case.model.family.ignored)
        if is_known or is_ignored or not (case.model.has_head or name.startswith(BODY)):
            continue
        # Surplus layers and experts are reported once, as a wrong number.
        layer, expert = _LAYER.match(name), _EXPERT.match(name)
        is_counted = layer is not None and int(layer[1]) >= counts.layers + counts.mtp
        if is_counted or (expert is not None and int(expert[1]) >= counts.experts > 0):
            continue
        yield Problem(
            kind="unexpected",
            message=f"the {case.model.family.model_type} model that {CONFIG} describes has no such "
            "tensor",
            key=case.key_of[name],
            expected="no such tensor",
            found=f"{case.stored[name].dtype} {case.stored[name].shape}",
        )


def _body_prefixes(body: str) -> tuple[str, ...]:
    """Return the prefixes by which names of a model's body are recognised."""
    if body not in ("", _BODY_OF_ANSWERS):
        return (body,)
    return tuple(body + part for part in _BODY_PARTS)


def _as_language_model(key: str, body: str) -> str:
    """Return the name of a tensor in a language model."""
    is_of_body = body != BODY and key.startswith(_body_prefixes(body))
    return BODY + key.removeprefix(body) if is_of_body else key


def _count_parts(
    stored: Mapping[str, Tensor], config: Mapping[str, object], family: Family
) -> _Counts:
    """Count the declared and stored layers and experts.

    Raises:
        CorruptError: the configuration lacks a number.
    """
    n_layers = count_of(config, "num_hidden_layers")
    layers = {int(match[1]) for name in stored if (match := _LAYER.match(name)) is not None}
    # Multi-token prediction layers have names of their own, or are numbered after the others and
    # recognised by tensors that only they have.
    marks = [row.hf[0] for row in family.mtp]
    n_mtp = n_numbered = 0
    if "{layer}" in family.mtp_names.layer:
        while any(f"model.layers.{n_layers + n_mtp}.{mark}" in stored for mark in marks):
            n_mtp = n_numbered = n_mtp + 1
    elif marks:
        n_mtp = count_predictions(stored, config, family, n_layers=n_layers)
    # A checkpoint with more ordinary layers than declared is numbered through: what looks like
    # layers behind the multi-token prediction layers includes these.
    n_stored = max(
        (layer + 1 for layer in layers if not n_layers <= layer < n_layers + n_numbered), default=0
    )
    if n_numbered and n_stored > n_layers:
        n_stored -= n_numbered
    n_experts = stated_experts(config, family)
    if n_experts and len(dense_layers(config, family, n_layers=n_stored)) == n_stored > 0:
        n_experts = 0  # all layers are dense, whatever number is declared
    # Experts are stored one by one, or stacked.
    experts = [int(match[1]) + 1 for name in stored if (match := _EXPERT.match(name)) is not None]
    experts += [
        tensor.shape[0]
        for name, tensor in stored.items()
        if (match := _STACKED.fullmatch(name)) and len(tensor.shape) == (4 if match[1] else 3)
    ]
    return _Counts(
        n_layers, n_experts, n_stored, max(experts, default=0) if n_experts else 0, n_mtp
    )
