"""What holds for the tensors of a model of any family: what is compared where there is no table of its names.

* sizes that most configurations state (``core.hf.proof.common_sizes``);
* layers and experts against their sisters (``core.hf.proof.sister_layers``);
* an output layer, where the configuration says in words that it is not tied to the embedding;
* quantized weights against ``quantization_config``.

Names are not compared: which tensors a family has, nothing here knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from core.arrays.dtypes import dtype_of
from core.catalog.catalog import TensorMeta
from core.changes.quantize import is_float8
from core.hf.proof.common_sizes import contradictions, embeddings_of
from core.hf.proof.problem import Problem
from core.hf.proof.quantization import Scheme, is_sign, scheme_of
from core.hf.proof.sister_layers import deviations

_WITH_OUTPUT = ("ForCausalLM", "LMHeadModel")
_OUTPUT = re.compile(r"(^|.*\.)(lm_head|output|embed_out|head|output_layer|output_projection)\..*")


def problems_of(
    tensors: Mapping[str, TensorMeta], config: Mapping[str, object], *, has_own_file: bool
) -> Iterator[Problem]:
    """Yield what contradicts the configuration, or the other layers of the model.

    Args:
        tensors: the tensors of the checkpoint, by key.
        config: the parsed ``config.json``; of other software, which names no ``model_type``, nothing is known.
        has_own_file: a file beside it says how the weights are quantized.
    """
    if not isinstance(config.get("model_type"), str):
        return
    text = config.get("text_config")
    scheme = scheme_of(config) or (scheme_of(text) if isinstance(text, Mapping) else None)
    narrow = [meta for meta in tensors.values() if _is_narrow(meta)]
    yield from contradictions(tensors, config)
    yield from _of_output(tensors, config)
    yield from _of_quantization(tensors, scheme, narrow, has_own_file=has_own_file)
    yield from deviations(tensors, config, is_quantized=scheme is not None or has_own_file or bool(narrow))


def _of_output(tensors: Mapping[str, TensorMeta], config: Mapping[str, object]) -> Iterator[Problem]:
    """Yield a problem if embeddings are said not to be tied, and nothing else has the vocabulary's rows."""
    stated = config.get("architectures")
    architecture = str(stated[0]) if isinstance(stated, list) and stated else ""
    embeddings = embeddings_of(tensors)
    if config.get("tie_word_embeddings") is not False or not architecture.endswith(_WITH_OUTPUT):
        return
    if len(embeddings) != 1 or any(map(_OUTPUT.fullmatch, tensors)):
        return
    (embedding,) = embeddings
    if not any(embedding.shape[0] in meta.shape for meta in tensors.values() if meta.key != embedding.key):
        yield Problem(
            kind="ties",
            message="config.json says that the embeddings are not tied, but there is no output layer",
            key=embedding.key,
            expected="an output layer, or tie_word_embeddings",
            found="neither",
            is_lack=True,
        )


def _of_quantization(
    tensors: Mapping[str, TensorMeta], scheme: Scheme | None, narrow: list[TensorMeta], *, has_own_file: bool
) -> Iterator[Problem]:
    """Yield a problem if the configuration and the tensors disagree about whether there are quantized weights."""
    signs = [key for key in tensors if is_sign(key)]
    if scheme is None and signs and narrow and not has_own_file:
        yield Problem(
            kind="quantization",
            message=f"quantized weights ({len(signs):,} tensors of them), but config.json has no quantization_config",
            key=signs[0],
            expected="quantization_config",
            found="none",
        )
    if scheme is not None and scheme.is_never_wide and not signs and not narrow:
        yield Problem(
            kind="quantization",
            message=f"config.json says that the weights are quantized ({scheme.method}), but none is",
            expected=f"weights of {scheme.method}",
            found="weights that are not quantized",
        )


def _is_narrow(meta: TensorMeta) -> bool:
    """Return whether a tensor may hold quantized weights."""
    return len(meta.shape) > 1 and (is_float8(meta.dtype) or dtype_of(meta.dtype).kind != "float")
