"""Choose and cast tensors of a catalog; no data moves.

Other changes have files of their own: ``core.engine.changes.rename``, ``core.engine.changes.tie``,
``core.engine.changes.restack``, ``core.engine.changes.quantize``;
``core.verbs.convert.apply_changes`` applies all of them in their order.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace

from core.arrays.dtypes import dtype_called, dtype_of
from core.engine.catalog.attributes import ENTRIES, drop_matching_attributes, list_attribute_keys
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.key_patterns import LIST_THEM, find_shared_prefix, matcher
from core.engine.catalog.optimizer_keys import MASTERS, MOMENTS, is_optimizer_key, split_state_key
from core.engine.catalog.removal import find_used_tensors, record_unlisted, remove_entries
from core.engine.catalog.tensor import Tensor
from core.engine.changes.rename import add_prefix as add_prefix
from core.engine.changes.rename import owned_entries, with_parameters
from core.engine.changes.rename import rename as rename
from core.engine.changes.rename import rename_entries as rename_entries
from core.engine.changes.rename import strip_prefix as strip_prefix
from core.errors import UsageError
from core.values import dataclass

_MOST_GLOBS = 4
"""Maximum number of globs that a message proposes for the model or the optimizer."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen entries of a catalog, and the keys of the dropped ones.

    Args:
        catalog: the chosen entries.
        excluded: keys of the tensors and objects that were dropped, in order.
    """

    catalog: Catalog
    excluded: tuple[str, ...]


def select(
    catalog: Catalog, *, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Selection:
    """Keep the entries that match an ``include`` glob, if any is given, and no ``exclude`` glob.

    If ``exclude`` drops a parameter, the optimizer's entries for it are dropped too. Attributes
    leave with their tensors, or by a glob of ``exclude`` that matches nothing else, or begins with
    the name of their entry.

    Args:
        include, exclude: patterns of ``core.engine.catalog.key_patterns`` over whole keys, of
            tensors and objects alike.

    Raises:
        UsageError: a glob matches nothing, or no tensor remains.
    """
    if not include and not exclude:
        return Selection(catalog, ())

    # Every glob must match: one that does not is a typing error.
    keys = [*catalog.tensors, *catalog.objects]
    wanted = [matcher(glob) for glob in include]
    unwanted = [matcher(glob) for glob in exclude]
    attribute_keys = list_attribute_keys(catalog)
    for glob, matches in zip((*include, *exclude), (*wanted, *unwanted), strict=True):
        if not any(map(matches, (*keys, *attribute_keys))):
            raise UsageError(
                f"no tensor or object matches {glob!r}", hint=_name_globs(catalog.tensors)
            )

    # A glob that is about tensors or objects leaves attributes of others alone.
    about_attributes = [
        glob
        for glob, matches in zip(exclude, unwanted, strict=True)
        if glob.startswith(ENTRIES) or not any(map(matches, keys))
    ]
    catalog = drop_matching_attributes(catalog, about_attributes)

    # Exclude the optimizer's entries for the excluded parameters as well.
    excluded = {key for key in keys if any(matches(key) for matches in unwanted)}
    parameters = {key for key in excluded if key in catalog.tensors and not is_optimizer_key(key)}
    if parameters:
        owned = {
            key: entry
            for key, entry in owned_entries(catalog).items()
            if entry.tensor in parameters
        }
        excluded |= owned.keys()
        names = parameters | {entry.parameter for entry in owned.values()}
        catalog = with_parameters(catalog, dict.fromkeys(names, ()))

    def is_kept(key: str) -> bool:
        return (not wanted or any(matches(key) for matches in wanted)) and key not in excluded

    return keep_entries(catalog, is_kept)


def _name_globs(keys: Iterable[str]) -> str:
    """Return the hint for a glob that matches nothing: those of the model and the optimizer."""
    members: dict[str, list[str]] = {"model": [], "optimizer": []}
    for key in keys:
        members["optimizer" if is_optimizer_key(key) else "model"].append(key)
    globs = []
    for part, others in (("model", "optimizer"), ("optimizer", "model")):
        # Without a shared prefix, one glob for each first component: decoder.*, embedding.*.
        shared = find_shared_prefix(members[part])
        prefixes = (
            [shared]
            if shared
            else sorted({"".join(key.partition(".")[:2]) for key in members[part]})
        )
        is_apart = not any(key.startswith(tuple(prefixes)) for key in members[others])
        if is_apart and 0 < len(prefixes) <= _MOST_GLOBS:
            quoted = [shlex.quote(f"{prefix}*") for prefix in prefixes]
            globs.append(
                f"{' and '.join(quoted)} match{'es' if len(quoted) == 1 else ''} the {part}"
            )
    return "; ".join([*globs, LIST_THEM])


def keep_entries(catalog: Catalog, is_kept: Callable[[str], bool]) -> Selection:
    """Keep the entries with these keys, and the hidden tensors that they refer to.

    Args:
        is_kept: predicate for the keys of tensors and objects.

    Raises:
        UsageError: no tensor remains.
    """
    removed = {key: None for key in (*catalog.tensors, *catalog.objects) if not is_kept(key)}
    remaining = remove_entries(catalog, removed.keys())
    if not remaining.tensors:
        raise UsageError("the globs leave no tensors", hint=LIST_THEM)
    # The optimizer's facts remain only as far as their tensors do, and hidden tensors as far as
    # something refers to them.
    if not any(map(split_state_key, remaining.tensors)):
        remaining = replace(remaining, optimizer=None)
    used = find_used_tensors(remaining)
    hidden = {key: tensor for key, tensor in remaining.hidden.items() if key in used}
    # A note about an entry begins with its key.
    notes = tuple(note for note in catalog.notes if note.partition(": ")[0] not in removed)
    remaining = replace(remaining, hidden=hidden, notes=notes)
    return Selection(record_unlisted(remaining, catalog, "as requested"), tuple(removed))


def without_optimizer(catalog: Catalog) -> Selection:
    """Return the catalog without the optimizer's state."""
    common = catalog.common
    if common is not None and "optimizer" in common:
        catalog = replace(
            catalog, common={name: item for name, item in common.items() if name != "optimizer"}
        )
    return keep_entries(catalog, lambda key: not is_optimizer_key(key))


_KEPT_PRECISION = re.compile(
    r"(^|\.)(expert_bias|e_score_correction_bias|A_log|D|inv_freq"
    r"|(weight|input|output|activation)_scale)$"
    r"|_scale_inv$|_amax$"
)
"""Tensors that models keep in float32 on purpose."""

_NAMES_STATES = re.compile(
    rf"optim|(^|[^a-z])state(s?)\.|{'|'.join(sorted(MOMENTS | MASTERS - {'param', 'fp32'}))}"
)


def _reaches(glob: str, quantized: Container[str] = ()) -> Callable[[str], bool]:
    """Build the predicate for the keys of the tensors that a cast with a glob applies to.

    It applies to optimizer state only if the glob names it, and to tensors of quantized weights
    only if the glob ends with the last part of their names.
    """
    matches = matcher(glob)
    names_states = _NAMES_STATES.search(glob) is not None
    last = glob.rpartition(".")[2]

    def reaches(key: str) -> bool:
        if not matches(key) or (key in quantized and key.rpartition(".")[2] != last):
            return False
        return names_states or not is_optimizer_key(key)

    return reaches


def build_dtype_rule(
    rules: Sequence[tuple[str | None, str]],
    keys: Iterable[str] | None = None,
    *,
    quantized: Container[str] = (),
) -> Callable[[str, Tensor], str]:
    """Build the function that maps each tensor to its dtype after casting.

    Args:
        rules: ``(glob, dtype)`` pairs, later ones win; a glob of None means the model's
            floating-point tensors of at least 16 bits, without optimizer state, router biases,
            scales and others that are kept in their precision on purpose, which only a glob
            reaches. Optimizer state is reached by globs that name it (``optim``, ``state.``,
            ``exp_avg`` …), not by globs such as ``*.weight``. A cast to float8 rounds and
            saturates, and creates no scales.
        keys: the keys of all tensors; None skips the check that every glob matches one.
        quantized: tensors of quantized weights (``core.engine.quantize.schemes``); only a glob that
            ends with the last part of their name reaches them.

    Raises:
        UsageError: a dtype is unknown, a glob matches nothing, or a rule without a glob casts to
            8 bits; raised by the returned function if a float8 tensor with scales would be cast.
    """
    # Parse the rules before anything is read.
    present = None if keys is None else dict.fromkeys(keys)
    for glob, _ in rules:
        if glob is not None and present is not None and not any(map(_reaches(glob), present)):
            raise UsageError(f"--dtype: no tensor matches {glob!r}", hint=LIST_THEM)
    parsed = [
        (None if glob is None else _reaches(glob, quantized), dtype_called(name).name)
        for glob, name in rules
    ]
    if any(matches is None and dtype_called(name).itemsize == 1 for matches, name in parsed):
        raise UsageError(
            "--dtype: casting an entire model to 8 bits needs scales",
            hint="use --quantize block or --quantize tensor; to cast without scales, use "
            "--dtype GLOB=DTYPE",
        )

    def scales_of(key: str, tensor: Tensor) -> str | None:
        if present is None:
            return None
        from core.engine.changes.quantize import companion

        return companion(key, tensor, present)

    def dtype_for(key: str, tensor: Tensor) -> str:
        # The last rule that reaches the tensor wins.
        chosen = tensor.dtype
        for matches, dtype in parsed:
            if matches is not None:
                if matches(key):
                    chosen = dtype
                continue
            facts = dtype_of(tensor.dtype)
            scales = scales_of(key, tensor)
            if scales is not None:
                raise UsageError(
                    f"--dtype: {tensor.dtype} tensors that have scales ({scales!r}) cannot be cast",
                    key=key,
                    hint="apply the scales with --dequantize DTYPE, "
                    "or cast only the other tensors with --dtype GLOB=DTYPE",
                )
            is_weight = facts.kind == "float" and facts.itemsize >= 2 and key not in quantized
            if is_weight and not is_optimizer_key(key) and not _KEPT_PRECISION.search(key):
                chosen = dtype
        # Without its scales a float8 number is not the weight, whichever rule reached it.
        scales = scales_of(key, tensor) if chosen != tensor.dtype else None
        if scales is not None:
            raise UsageError(
                f"--dtype: casting {tensor.dtype} to {chosen} without applying the scales "
                f"{scales!r} "
                "would change the weights",
                key=key,
                hint="apply the scales with --dequantize, or exclude this tensor from --dtype",
            )
        return chosen

    return dtype_for
