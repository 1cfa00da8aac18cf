"""Changes to a catalog that move no data: choosing and casting tensors.

Others have files of their own: ``core.changes.rename``, ``core.changes.tie``, ``core.changes.restack``,
``core.changes.quantize``; ``core.convert.apply_changes`` applies all of them in their order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace

from core.arrays.dtypes import dtype_of
from core.catalog.catalog import Catalog, TensorMeta
from core.catalog.facets import MegatronModel
from core.catalog.key_patterns import LIST_THEM, matcher
from core.catalog.mapping_attributes import attributes_of
from core.catalog.optimizer_keys import MASTERS, MOMENTS, state_of
from core.changes.quantize import companion
from core.changes.rename import add_prefix as add_prefix
from core.changes.rename import is_optimizer_key as is_optimizer_key
from core.changes.rename import owned_entries, with_parameters
from core.changes.rename import rename as rename
from core.changes.rename import renamed as renamed
from core.changes.rename import strip_prefix as strip_prefix
from core.changes.tie import aliases_among
from core.changes.tie import tie as tie
from core.changes.tie import untie as untie
from core.errors import UsageError
from core.pickle.inert import TensorLeaf, walk
from core.pickle.nesting import REMOVED, map_leaves


@dataclass(frozen=True, slots=True)
class Selection:
    """A catalog after choosing, and what was left out.

    Args:
        catalog: the remaining entries.
        left_out: keys of tensors and objects that the globs excluded, in order.
    """

    catalog: Catalog
    left_out: tuple[str, ...]


def select(catalog: Catalog, *, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Selection:
    """Keeps the entries that match an ``include`` glob (all, if there is none) and no ``exclude`` glob.

    The optimizer's entries of a parameter go with it, wherever ``exclude`` takes it out.

    Args:
        include, exclude: patterns of ``core.catalog.key_patterns`` over whole keys. They choose tensors and objects
            alike.

    Raises:
        UsageError: an ``include`` glob matches nothing, or nothing remains.
    """
    if not include and not exclude:
        return Selection(catalog, ())
    every = [*catalog.tensors, *catalog.objects]
    wanted = [matcher(glob) for glob in include]
    unwanted = [matcher(glob) for glob in exclude]
    for glob, matches in zip((*include, *exclude), (*wanted, *unwanted), strict=True):
        if not any(map(matches, every)):
            raise UsageError(f"no tensor or object matches {glob!r}", hint=LIST_THEM)

    out = {key for key in every if any(m(key) for m in unwanted)}
    left = {key for key in out if key in catalog.tensors and not is_optimizer_key(key)}
    if left:
        owned = owned_entries(catalog)
        out |= {key for key, entry in owned.items() if entry.tensor in left}
        names = left | {entry.parameter for entry in owned.values() if entry.tensor in left}
        catalog = with_parameters(catalog, dict.fromkeys(names, ()))

    def is_kept(key: str) -> bool:
        return (not wanted or any(m(key) for m in wanted)) and key not in out

    return restricted(catalog, is_kept)


def restricted(catalog: Catalog, is_kept: Callable[[str], bool]) -> Selection:
    """Return the entries whose keys are kept, and what belongs to them.

    Raises:
        UsageError: no tensor remains.
    """
    every = [*catalog.tensors, *catalog.objects]
    tensors = {key: meta for key, meta in catalog.tensors.items() if is_kept(key)}
    if not tensors:
        raise UsageError("the globs leave no tensor", hint=LIST_THEM)
    objects = {key: item for key, item in catalog.objects.items() if is_kept(key)}
    skeleton = catalog.skeleton
    if skeleton is not None:
        skeleton = map_leaves(skeleton, lambda entry: entry.leaf if is_kept(entry.key) else REMOVED)
    optimizer = catalog.optimizer if any(map(state_of, tensors)) else None
    model = catalog.facet(MegatronModel)
    values = [
        catalog.common,
        None if model is None else model.rng_states,
        [] if optimizer is None else [optimizer.step, optimizer.entries],
        [attribute.value for attribute in attributes_of(skeleton)],
        *(item.value for item in objects.values()),
    ]
    hidden_keys = {leaf.key for leaf in walk(values) if isinstance(leaf, TensorLeaf)}
    hidden_keys |= {item.raw_key for item in objects.values() if item.raw_key is not None}
    hidden_keys |= set(catalog.carried.values())
    kept = replace(
        catalog,
        tensors=tensors,
        objects=objects,
        hidden={key: meta for key, meta in catalog.hidden.items() if key in hidden_keys},
        skeleton=skeleton,
        aliases=aliases_among(catalog.aliases, tensors),
        optimizer=optimizer,
    )
    return Selection(kept, tuple(key for key in every if not is_kept(key)))


def without_optimizer(catalog: Catalog) -> Selection:
    """Everything but the optimizer's state."""
    gone = [key for key in (*catalog.tensors, *catalog.objects) if is_optimizer_key(key)]
    common = catalog.common
    if common is not None and "optimizer" in common:
        catalog = replace(catalog, common={name: item for name, item in common.items() if name != "optimizer"})
    keys = set(gone)
    return restricted(catalog, lambda key: key not in keys)


_KEPT_PRECISION = re.compile(
    r"(^|\.)(expert_bias|e_score_correction_bias|A_log|D|inv_freq|(weight|input|output|activation)_scale)$"
    r"|_scale_inv$|_amax$"
)


_NAMES_STATES = re.compile(rf"optim|(^|[^a-z])state(s?)\.|{'|'.join(sorted(MOMENTS | MASTERS - {'param', 'fp32'}))}")


def _casts(glob: str, quantized: Container[str] = ()) -> Callable[[str], bool]:
    """Whether a glob reaches a tensor: one of the optimizer's, or of a quantized weight, only if the glob names it."""
    matches = matcher(glob)
    names_states = _NAMES_STATES.search(glob) is not None
    last = glob.rpartition(".")[2]

    def casts(key: str) -> bool:
        if not matches(key) or (key in quantized and key.rpartition(".")[2] != last):
            return False
        return names_states or not is_optimizer_key(key)

    return casts


def cast_of(
    rules: Sequence[tuple[str | None, str]], keys: Iterable[str] | None = None, *, quantized: Container[str] = ()
) -> Callable[[TensorMeta], str]:
    """The dtype that each tensor is to have.

    Args:
        rules: ``(glob, dtype)`` pairs, later ones win; a glob of None means the model's floating-point tensors of at
            least 16 bits, but not optimizer state, router biases, scales and others that are kept in their precision on
            purpose, which only a glob reaches. Optimizer state is reached by globs that name it (``optim``, ``state.``,
            ``exp_avg`` …), not by such as ``*.weight``. A cast to float8 rounds and saturates, and makes no scales.
        keys: the tensors there are; None leaves unchecked that every glob matches one.
        quantized: tensors of quantized weights (``core.quantize.schemes``); only a glob that ends with the last part of
            their name reaches them.

    Raises:
        UnsupportedError: a dtype is not known.
        UsageError: a glob matches nothing; and, from the function, that a float8 tensor with scales would be cast.
    """
    present = None if keys is None else dict.fromkeys(keys)
    for glob, _ in rules:
        if glob is not None and present is not None and not any(map(_casts(glob), present)):
            raise UsageError(f"--dtype: no tensor matches {glob!r}", hint=LIST_THEM)
    parsed = [(None if glob is None else _casts(glob, quantized), dtype_of(name).name) for glob, name in rules]
    if any(matches is None and dtype_of(name).itemsize == 1 for matches, name in parsed):
        raise UsageError(
            "--dtype: a whole model is not cast to eight bits, which needs scales",
            hint="say --quantize block or tensor; --dtype GLOB=DTYPE casts without scales",
        )

    def dtype_for(meta: TensorMeta) -> str:
        chosen = meta.dtype
        for matches, dtype in parsed:
            if matches is not None:
                if matches(meta.key):
                    chosen = dtype
                continue
            found = dtype_of(meta.dtype)
            scales = companion(meta, present) if present is not None else None
            if scales is not None:
                raise UsageError(
                    f"--dtype: the model has {meta.dtype} tensors with scales ({scales!r}), which are not cast",
                    key=meta.key,
                    hint="multiply the scales in with --dequantize DTYPE, or cast the other tensors with GLOB=DTYPE",
                )
            is_weight = found.kind == "float" and found.itemsize >= 2 and meta.key not in quantized
            if is_weight and not is_optimizer_key(meta.key) and not _KEPT_PRECISION.search(meta.key):
                chosen = dtype
        scales = companion(meta, present) if present is not None and chosen != meta.dtype else None
        if scales is not None:
            raise UsageError(
                f"--dtype: {meta.dtype} without its scales, {scales!r}, would be other numbers in {chosen}",
                key=meta.key,
                hint="multiply the scales in with --dequantize, or leave this tensor out of --dtype",
            )
        return chosen

    return dtype_for
