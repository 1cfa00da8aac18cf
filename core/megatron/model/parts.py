"""The consecutive parts of an axis that is cut: their extents in a model, by a rule.

A rule lists the sizes of its parts, ``parts = ["mamba_inner", "mamba_groups", "mamba_groups", 4]``:
numbers, training arguments, sums and products of these (``"linear_num_key_heads *
linear_key_head_dim"``), and sizes that ``[[size]]`` rules read from shapes. One unknown size per
list follows from the extent of the axis. Of several lists, the first one with a sum equal to the
extent counts::

    in_proj of Mamba-2    (2d + 2gN + h, H)   z, x, B, C, dt   d, h known from out_proj and A_log:
                                                               gN follows
    in_proj of Mamba-1    (2d, H)             z, x             d, h known: no gN fits, so the second
                                                               list counts

Source: Megatron-LM d98e8a64 ``core/resharding/planner.py`` (``partition_sizes``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd

from core.arrays.box import Shape
from core.arrays.sharding import divisors, join_numbers
from core.errors import CorruptError, UnsupportedError
from core.megatron.model.checks import with_gate
from core.megatron.model.facts import ModelFacts
from core.megatron.rules.rules import Rule, Rules
from core.megatron.rules.sizes import PartSize
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class _Fit:
    """The comparison of a list of parts with an extent.

    Args:
        extents: extents of the parts; None if the list does not fit.
        unknown: names of sizes that are unknown.
        total: sum of the known sizes.
    """

    extents: list[int] | None
    unknown: tuple[str, ...] = ()
    total: int = 0


def measure_parts(rule: Rule, extent: int, facts: ModelFacts, *, key: str) -> list[int]:
    """Return the extents of the consecutive parts of an axis.

    Args:
        extent: extent of the axis, over all ranks.

    Raises:
        CorruptError: a gated extent is odd, or the parts do not add up to the extent.
        UnsupportedError: more than one of the sizes is unknown.
    """
    if rule.parts == "named":
        return _named_parts(rule, extent, facts.sizes, key=key)
    if rule.parts != "gated" or not facts.is_gated:
        return [extent]
    if extent % 2:
        raise CorruptError(
            f"a gated MLP must have an even number of rows, but the tensor has {extent}", key=key
        )
    return [extent // 2, extent // 2]


def _named_parts(rule: Rule, extent: int, sizes: Mapping[str, int], *, key: str) -> list[int]:
    """Return the extents of a rule's named parts, from the first of its lists that fits."""
    fits = [_fit(parts, extent, sizes) for parts in rule.segments]
    for fit in fits:
        if fit.extents is not None:
            return fit.extents

    # Explain why no list fits: too many unknown sizes, or another sum.
    unknown = sorted({name for fit in fits if len(fit.unknown) > 1 for name in fit.unknown})
    if unknown:
        raise UnsupportedError(
            f"the arguments do not specify the sizes {', '.join(unknown)}, so the parts of the "
            f"{extent} rows are unknown",
            key=key,
            hint="use --rules FILE with a [[rule]] that lists the sizes as numbers, such as parts "
            "= [8, 8, 4]",
        )
    text = "; ".join(
        f"{' + '.join(part.text for part in parts)} = {fit.total}{' + …' if fit.unknown else ''}"
        for parts, fit in zip(rule.segments, fits, strict=True)
    )
    raise CorruptError(
        f"the parts should add up to the tensor's {extent} rows, but {text}", key=key
    )


def _fit(parts: Sequence[PartSize], extent: int, sizes: Mapping[str, int]) -> _Fit:
    """Compare a list of parts with an extent; a single unknown size is the remainder."""
    values = [part.value(sizes) for part in parts]
    total = sum(value for value in values if value is not None)
    unknown = tuple(
        dict.fromkeys(part.text for part, value in zip(parts, values, strict=True) if value is None)
    )
    if len(unknown) > 1 or (not unknown and total != extent):
        return _Fit(None, unknown, total)

    # The same unknown size may occur several times.
    size, rest = divmod(extent - total, values.count(None)) if unknown else (0, 0)
    if unknown and (size < 1 or rest):
        return _Fit(None, unknown, total)
    return _Fit([size if value is None else value for value in values])


def check_parts(rule: Rule, shape: Shape, facts: ModelFacts, *, key: str) -> None:
    """Raise unless every rank of the source has an equal share of every part.

    Args:
        shape: global shape.

    Raises:
        CorruptError: the parts do not add up to the axis, or do not divide.
        UnsupportedError: more than one of the sizes is unknown.
    """
    axis, n = rule.cut_axis, facts.topology.size_of(rule.group)
    if rule.parts != "named" or axis is None or axis >= len(shape):
        return
    parts = measure_parts(rule, shape[axis], facts, key=key)
    if any(part % n for part in parts):
        raise CorruptError(
            f"the tensor's parts ({', '.join(map(str, parts))} rows) cannot be divided evenly "
            f"among {n} ranks",
            key=key,
            hint="check the sizes in the training arguments, or list them as numbers in a [[rule]] "
            "and pass it with --rules",
        )


def check_units(rule: Rule, n: int, facts: ModelFacts, *, key: str) -> None:
    """Raise unless units that are not cut, such as heads, divide over a number of shards.

    Args:
        n: requested number of shards.

    Raises:
        UnsupportedError: a size does not divide; the error lists the sizes that do.
    """
    sizes = {name: facts.sizes[name] for name in rule.divides if name in facts.sizes}
    for name, size in sizes.items():
        if size % n:
            group = rule.group.upper()
            raise UnsupportedError(
                f"{name} is {size}, which is not divisible by {group} {n}",
                key=key,
                hint=f"{group} sizes that work: {join_numbers(divisors(gcd(*sizes.values())))}",
            )


def with_sizes(facts: ModelFacts, shapes: Mapping[str, Shape], rules: Rules) -> ModelFacts:
    """Return the facts with sizes from shapes, and with ``is_gated`` if shapes show it.

    Args:
        shapes: global shapes by global name.

    Raises:
        CorruptError: two tensors, or a tensor and an argument, contradict each other.
    """
    facts = with_gate(facts, shapes)
    if not rules.sizes:
        return facts

    # Collect the sizes from shapes, which must agree with one another …
    any_size = re.compile("|".join(f"(?:{size.pattern.pattern})" for size in rules.sizes))
    from_shapes: dict[str, tuple[int, str]] = {}
    for name, shape in shapes.items():
        if any_size.search(name) is None:
            continue
        for size in rules.sizes:
            if size.axis >= len(shape) or size.pattern.search(name) is None:
                continue
            value, other = from_shapes.setdefault(size.name, (shape[size.axis], name))
            if shape[size.axis] != value:
                raise CorruptError(
                    f"{size.name} is {shape[size.axis]} according to this tensor, but {value} "
                    f"according to {other}",
                    key=name,
                )

    # … and compare them with those from the arguments.
    sizes = dict(facts.sizes)
    for size in rules.sizes:
        from_args = None if size.args is None else size.args.value(sizes)
        if from_args is not None:
            sizes.setdefault(size.name, from_args)
        if size.name in from_shapes:
            extent, name = from_shapes[size.name]
            if sizes.setdefault(size.name, extent) != extent:
                raise CorruptError(
                    f"{size.name} is {extent} according to this tensor, but {sizes[size.name]} "
                    "according to the arguments",
                    key=name,
                )
    return replace(facts, sizes=sizes)
