"""Quantized weights of Hugging Face models: their method and the tensors of each weight.

``quantization_config`` (``compression_config`` before 2024) names a method. A module ``X`` then
stores these tensors instead of, or in addition to, ``X.weight``:

====================  ==============================================================================
method                tensors of ``X``
====================  ==============================================================================
fp8                   ``weight`` in float8, ``weight_scale_inv`` (one for each block, or for all)
gptq, awq             ``qweight``, ``qzeros``, ``scales``, ``g_idx``
bitsandbytes          ``weight`` in int8 and ``SCB``; or packed in uint8, ``weight.absmax``,
                      ``weight.quant_map`` …
compressed-tensors    ``weight`` and ``weight_scale``, or ``weight_packed``, ``weight_shape`` …
mxfp4                 ``X_blocks`` and ``X_scales``, where ``X`` holds all experts of a layer
others                unknown: every name that begins with ``X.`` is assumed to belong to it
====================  ==============================================================================

Some software stores the method in a separate file (``OWN_FILES``).

Source: transformers 5.23.0 ``quantizers/``, ``integrations/finegrained_fp8.py``; published models
of each kind.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

from core.arrays.box import Shape
from core.values import dataclass

OWN_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files in which AutoGPTQ, AutoAWQ and ModelOpt store the method."""

_SIGNS = re.compile(
    r".*(\.(qweight|qzeros|g_idx|weight_scale|weight_scale_2|weight_packed|SCB|absmax|quant_map)"
    r"|weight_scale_inv)"
)
"""Names that only tensors of quantized weights have."""
_CACHE = re.compile(r".*\.[qkv]_(scale|zero_point)")
"""Scales for cached keys and values, which belong to an attention module."""
_NEVER_WIDE = ("fp8", "gptq", "awq", "fbgemm_fp8")
"""Methods that transformers supports for stored weights only, not for quantizing while loading."""
_SCALES = ("_scale_inv", "_scale")
_MXFP4 = ("_blocks", "_scales")


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """The declared quantization of a model's weights.

    Args:
        method: name of the method, such as ``fp8``.
        block: rows and columns that share a scale; None if not declared.
    """

    method: str
    block: tuple[int, int] | None

    @property
    def needs_scales(self) -> bool:
        """True if each float8 weight has a tensor of scales."""
        return self.method in ("fp8", "fbgemm_fp8")

    @property
    def is_never_wide(self) -> bool:
        """True if the scheme is one whose weights are always stored quantized (``_NEVER_WIDE``)."""
        return self.method in _NEVER_WIDE

    def fits(self, scale: Shape, weight: Shape) -> bool:
        """Return whether scales of this shape can belong to a float8 weight.

        Returns:
            True if the block size is unknown.
        """
        if self.method != "fp8" or self.block is None or len(weight) < 2 or set(scale) <= {1}:
            return True
        blocks = tuple(-(-n // block) for n, block in zip(weight[-2:], self.block, strict=True))
        return scale == (*weight[:-2], *blocks)


def scheme_of(config: Mapping[str, object]) -> QuantizationScheme | None:
    """Parse the quantization that a configuration declares.

    Returns:
        None if it declares none.
    """
    for name in ("quantization_config", "compression_config"):
        section = config.get(name)
        if isinstance(section, Mapping) and section:
            block = section.get("weight_block_size")
            is_pair = (
                isinstance(block, list)
                and len(block) == 2
                and all(type(n) is int and n > 0 for n in block)
            )
            method = str(
                section.get("quant_method", "bitsandbytes" if section.get("load_in_8bit") else "")
            )
            return QuantizationScheme(
                method, (block[0], block[1]) if is_pair and isinstance(block, list) else None
            )
    return None


def is_sign(key: str) -> bool:
    """Return whether only quantized weights have tensors of this name."""
    return _SIGNS.fullmatch(key) is not None


def is_cache_scale(key: str) -> bool:
    """Return whether a tensor scales the cached keys or values of attention."""
    return _CACHE.fullmatch(key) is not None


def scale_key(key: str, keys: Container[str]) -> str | None:
    """Return the name of the scales of a float8 weight among ``keys``; None if there are none."""
    return next((key + suffix for suffix in _SCALES if key + suffix in keys), None)


def find_owner(key: str, modules: Container[str]) -> str | None:
    """Return the module of the quantized weight that a tensor belongs to, or None.

    Args:
        key: such as ``model.layers.0.mlp.up_proj.weight.absmax``.
        modules: names of modules, and of tensors outside modules (stacked experts).
    """
    # The innermost module in the name wins, as modules may be nested.
    end = len(key)
    while (end := key.rfind(".", 0, end)) > 0:
        if key[:end] in modules:
            return key[:end]
    for suffix in (*_SCALES, *_MXFP4):
        if key.endswith(suffix) and key.removesuffix(suffix) in modules:
            return key.removesuffix(suffix)
    return None
