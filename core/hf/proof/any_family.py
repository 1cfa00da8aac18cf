"""Compare the tensors of a model of an unknown family with its configuration.

* sizes that most configurations contain (``core.hf.proof.common_sizes``);
* the towers of a composite model, whose names are known (``core.hf.towers.completeness``);
* layers and experts against each other (``core.catalog.sister_layers``);
* an output layer, if the configuration declares it untied from the embedding;
* quantized weights against ``quantization_config``.

Other names are not compared: those of an unknown family are unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice

from core.arrays.dtypes import dtype_of, is_float8
from core.catalog.sister_layers import find_deviations
from core.catalog.tensor import Tensor
from core.hf.proof.common_sizes import embeddings_of, find_size_problems
from core.hf.proof.problem import Problem
from core.hf.proof.quantization import QuantizationScheme, is_sign, scheme_of
from core.hf.towers.completeness import find_missing_hf_tensors

_MOST_MISSING = 1000
"""Maximum number of missing tensors to list: a damaged configuration may describe any number."""
_WITH_OUTPUT = ("ForCausalLM", "LMHeadModel")
_OUTPUT = re.compile(r"(^|.*\.)(lm_head|output|embed_out|head|output_layer|output_projection)\..*")


def find_problems(
    tensors: Mapping[str, Tensor], config: Mapping[str, object], *, has_own_file: bool
) -> Iterator[Problem]:
    """Yield the contradictions between tensors and configuration, and between layers of the model.

    Args:
        tensors: tensors of the checkpoint, by name.
        config: parsed ``config.json``; one without a ``model_type`` (of other software) is not
            compared.
        has_own_file: a separate file declares how the weights are quantized.
    """
    if not isinstance(config.get("model_type"), str):
        return
    text = config.get("text_config")
    scheme = scheme_of(config) or (scheme_of(text) if isinstance(text, Mapping) else None)
    # Matrices that may contain quantized numbers. Vectors of integers are usually buffers.
    narrow = [
        meta
        for meta in tensors.values()
        if len(meta.shape) > 1 and (is_float8(meta.dtype) or dtype_of(meta.dtype).kind != "float")
    ]
    yield from find_size_problems(tensors, config)
    yield from _check_output_layer(tensors, config)
    yield from _check_quantization(tensors, scheme, narrow, has_own_file=has_own_file)
    is_quantized = scheme is not None or has_own_file or bool(narrow)
    missing: list[str] = []
    if not is_quantized:
        missing += islice(find_missing_hf_tensors(tensors.keys(), config), _MOST_MISSING)
    for name in missing:
        yield Problem(
            kind="missing",
            message="the tensor is missing",
            key=name,
            expected="a tensor of the model",
            found="no such tensor",
            is_lack=True,
        )
    for deviation in find_deviations(tensors, config, is_quantized=is_quantized):
        # What the table has named is not repeated, nor is its layer.
        if not any(f"{name}.".startswith(f"{deviation.key}.") for name in missing):
            yield Problem(
                kind="layers" if deviation.is_layer else "sisters",
                message=deviation.message,
                key=deviation.key,
                expected=deviation.expected,
                found=deviation.found,
                is_lack=deviation.is_lack,
            )


def _check_output_layer(
    tensors: Mapping[str, Tensor], config: Mapping[str, object]
) -> Iterator[Problem]:
    """Yield a problem if the configuration requires an output layer that is missing."""
    architectures = config.get("architectures")
    architecture = (
        str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    )
    embeddings = embeddings_of(tensors)
    if config.get("tie_word_embeddings") is not False or not architecture.endswith(_WITH_OUTPUT):
        return
    if len(embeddings) != 1 or any(map(_OUTPUT.fullmatch, tensors)):
        return
    # Under whatever name, an output layer has as many rows (or columns) as the embedding.
    ((embedding_key, embedding),) = embeddings.items()
    if not any(
        embedding.shape[0] in meta.shape for key, meta in tensors.items() if key != embedding_key
    ):
        yield Problem(
            kind="ties",
            message="config.json declares untied embeddings, but the output layer is missing",
            key=embedding_key,
            expected="an output layer, or tie_word_embeddings",
            found="neither",
            is_lack=True,
        )


def _check_quantization(
    tensors: Mapping[str, Tensor],
    scheme: QuantizationScheme | None,
    narrow: list[Tensor],
    *,
    has_own_file: bool,
) -> Iterator[Problem]:
    """Yield a problem if configuration and tensors disagree on whether weights are quantized."""
    signs = [key for key in tensors if is_sign(key)]
    if scheme is None and signs and narrow and not has_own_file:
        yield Problem(
            kind="quantization",
            message=f"quantized weights ({len(signs):,} tensors), "
            "but config.json has no quantization_config",
            key=signs[0],
            expected="quantization_config",
            found="none",
        )
    if scheme is not None and scheme.is_never_wide and not signs and not narrow:
        yield Problem(
            kind="quantization",
            message=f"config.json declares quantized weights ({scheme.method}), "
            "but none are quantized",
            expected=f"weights of {scheme.method}",
            found="weights that are not quantized",
        )
