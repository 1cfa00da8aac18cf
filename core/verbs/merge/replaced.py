"""Take the tensors of another checkpoint where it has them, and all others from the first one.

::

    first    model.language_model.layers.0.…  ◀── model.layers.0.…  (a text model, a Megatron run)
             model.visual.…                       stays the first one's

The other checkpoint's tensors must be among those of the first one, in the same shapes. If the
first one is a vision-language model, the other may be its text model (``core.hf.text_model``).
Experts that the first one holds in one tensor of a layer become parts of that tensor again,
transposed if the first one has them so.

Not supported: quantized weights; a tensor of which the other checkpoint has only a part.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from core.engine.catalog.key_patterns import some_of
from core.engine.catalog.removal import record_replaced
from core.errors import UnsupportedError, list_some
from core.hf.tensors.packed import stack_experts, transpose_stacks
from core.verbs.merge.merge import MergedCatalog, MergeSource, origin_note, refuse_quantized


def replace_tensors(
    first: MergeSource,
    other: MergeSource,
    *,
    name_of: Mapping[str, str] | None,
    transposed: Set[str] = frozenset(),
) -> MergedCatalog:
    """Return the first source's catalog with the tensors that another one has.

    Args:
        first: the first source.
        other: the other source, which has some of its tensors.
        name_of: name of a tensor of the other source → in the first one; None if they agree.
        transposed: stacks of matrices in the first source that are transposed there.

    Raises:
        UnsupportedError: the first source lacks a tensor, or has it in another shape; weights are
            quantized; or nothing would be replaced.
    """
    for source in (first, other):
        refuse_quantized(source, None)
    names = {key: key for key in first.catalog.tensors} if name_of is None else dict(name_of)
    catalog = stack_experts(other.catalog, names)
    catalog = transpose_stacks(catalog, {key for key, name in names.items() if name in transposed})

    # Every tensor of the other source must have its place, so that none is lost.
    unknown = [key for key in catalog.tensors if key not in names]
    if unknown or not catalog.tensors:
        raise UnsupportedError(
            f"{len(unknown):,} of {len(catalog.tensors):,} tensors are not in {first.label}"
            + (f": {list_some(unknown)}" if unknown else ""),
            file=other.label,
            hint="first remove them: ckpt convert SRC DST --exclude KEY" if unknown else None,
        )
    key_of = {names[key]: key for key in catalog.tensors}
    shapes = [
        f"{name} is {first.catalog.tensors[name].shape} and {catalog.tensors[key].shape}"
        for name, key in key_of.items()
        if first.catalog.tensors[name].shape != catalog.tensors[key].shape
    ]
    if shapes:
        raise UnsupportedError(
            f"shapes differ between {first.label} and {other.label}: {list_some(shapes)}",
            file=other.label,
        )

    tensors = {
        name: catalog.tensors[key_of[name]] if name in key_of else tensor
        for name, tensor in first.catalog.tensors.items()
    }
    dtypes = [name for name in key_of if tensors[name].dtype != first.catalog.tensors[name].dtype]
    notes = [
        f"{len(key_of):,} of {len(tensors):,} tensors come from {other.label}",
        origin_note(first),
    ]
    if dtypes:
        notes.append(
            f"{some_of(dtypes)}: the dtypes differ; the result uses those of {other.label}"
        )
    result = replace(first.catalog, tensors=tensors)
    return MergedCatalog(record_replaced(result, first.catalog, key_of), tuple(notes))
