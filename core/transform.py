"""Changes to a catalog that move no data: choosing, renaming and casting tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from core.catalog import Catalog, Fragment, TensorMeta
from core.dtypes import dtype_of
from core.errors import UsageError
from core.inert import ObjectLeaf, TensorLeaf, as_mapping, walk
from core.select import matcher
from core.skeleton import REMOVED, Entry, entries, mapped, nested


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

    Args:
        include, exclude: patterns of ``core.select`` over whole keys. They choose tensors and objects alike.

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
            raise UsageError(f"no tensor or object matches {glob!r}", hint="list the keys with: ckpt inspect --flat")

    def is_kept(key: str) -> bool:
        return (not wanted or any(m(key) for m in wanted)) and not any(m(key) for m in unwanted)

    return _kept(catalog, is_kept)


def _kept(catalog: Catalog, is_kept: Callable[[str], bool]) -> Selection:
    """The entries whose keys are kept, and what belongs to them."""
    every = [*catalog.tensors, *catalog.objects]
    tensors = {key: meta for key, meta in catalog.tensors.items() if is_kept(key)}
    if not tensors:
        raise UsageError("the globs leave no tensor", hint="list the keys with: ckpt inspect --flat")
    objects = {key: item for key, item in catalog.objects.items() if is_kept(key)}
    skeleton = catalog.skeleton
    if skeleton is not None:
        skeleton = mapped(skeleton, lambda entry: entry.leaf if is_kept(entry.key) else REMOVED)
    values = [catalog.attrs.get("common"), *(item.value for item in objects.values())]
    hidden_keys = {leaf.key for leaf in walk(values) if isinstance(leaf, TensorLeaf)}
    hidden_keys |= {item.raw_key for item in objects.values() if item.raw_key is not None}
    kept = replace(
        catalog,
        tensors=tensors,
        objects=objects,
        hidden={key: meta for key, meta in catalog.hidden.items() if key in hidden_keys},
        skeleton=skeleton,
        attrs={**catalog.attrs, "aliases": _among(catalog.attrs.get("aliases"), tensors)},
    )
    return Selection(kept, tuple(key for key in every if not is_kept(key)))


def _among(aliases: object, tensors: Mapping[str, TensorMeta]) -> dict[str, str]:
    """The aliases among the tensors that remain; the first of them stands for each group."""
    known = aliases if isinstance(aliases, Mapping) else {}
    first_of: dict[str, str] = {}
    kept: dict[str, str] = {}
    for key in tensors:
        group = known.get(key, key)
        first = first_of.setdefault(group, key)
        if first != key:
            kept[key] = first
    return kept


def without_optimizer(catalog: Catalog) -> Selection:
    """Everything but the optimizer's state."""
    gone = [key for key in (*catalog.tensors, *catalog.objects) if is_optimizer_key(key)]
    common = as_mapping(catalog.attrs.get("common"))
    if common is not None and "optimizer" in common:
        catalog = catalog.with_attrs(common={name: item for name, item in common.items() if name != "optimizer"})
    keys = set(gone)
    return _kept(catalog, lambda key: key not in keys)


def rename(catalog: Catalog, rules: Sequence[tuple[str, str]]) -> tuple[Catalog, list[tuple[str, str]]]:
    """Renames tensors and objects by regular expressions, applied one after the other with ``re.sub``.

    Args:
        rules: ``(pattern, replacement)`` pairs.

    Returns:
        The catalog, and (old, new) for every key that changed.

    Raises:
        UsageError: a pattern is not a regular expression, matches nothing, or two keys become one.
    """
    compiled = []
    for pattern, replacement in rules:
        try:
            compiled.append((re.compile(pattern), replacement))
        except re.error as err:
            raise UsageError(f"--rename: {pattern!r} is not a regular expression: {err}") from err
    if not compiled:
        return catalog, []
    new_of: dict[str, str] = {}
    used = [False] * len(compiled)
    for key in (*catalog.tensors, *catalog.objects):
        new = key
        for number, (expression, replacement) in enumerate(compiled):
            try:
                changed = expression.sub(replacement, new)
            except (re.error, IndexError) as err:
                raise UsageError(f"--rename: {replacement!r} does not fit {expression.pattern!r}: {err}") from err
            used[number] |= changed != new
            new = changed
        if not new:
            raise UsageError("--rename leaves an empty name", key=key)
        new_of[key] = new
    for (expression, _), was_used in zip(compiled, used, strict=True):
        if not was_used:
            raise UsageError(f"--rename: {expression.pattern!r} matches no key")
    old_of: dict[str, str] = {}
    for old, new in new_of.items():
        if new in old_of:
            raise UsageError(f"--rename makes {old_of[new]!r} and {old!r} one key", key=new)
        old_of[new] = old
    return renamed(catalog, new_of), [(old, new) for old, new in new_of.items() if old != new]


def renamed(catalog: Catalog, new_of: Mapping[str, str]) -> Catalog:
    """The catalog under new keys.

    Args:
        new_of: old key → new key, for every tensor and object; the new keys are unique.
    """
    old_of = {new: old for old, new in new_of.items()}

    def fragments_of(key: str) -> list[Fragment]:
        return [replace(fragment, key=key) for fragment in catalog.fragments(old_of.get(key, key))]

    aliases, mcore_data = catalog.attrs.get("aliases"), catalog.attrs.get("mcore_data")
    attrs = dict(catalog.attrs)
    if isinstance(aliases, Mapping):
        attrs["aliases"] = {new_of.get(a, a): new_of.get(b, b) for a, b in aliases.items()}
    if isinstance(mcore_data, Mapping):
        attrs["mcore_data"] = {new_of.get(key, key): value for key, value in mcore_data.items()}
    return replace(
        catalog,
        tensors={new_of[key]: replace(meta, key=new_of[key]) for key, meta in catalog.tensors.items()},
        objects={new_of[key]: replace(item, key=new_of[key]) for key, item in catalog.objects.items()},
        fragments_of=fragments_of,
        skeleton=None if catalog.skeleton is None else _moved(catalog.skeleton, new_of),
        attrs=attrs,
    )


def _moved(skeleton: object, new_of: Mapping[str, str]) -> object:
    """A skeleton under new keys.

    A leaf whose new key begins with the path of its old container stays in it; any other goes to the root, under its
    whole new key.
    """

    def with_key(leaf: object, key: str) -> object:
        return replace(leaf, key=key) if isinstance(leaf, (TensorLeaf, ObjectLeaf)) else leaf

    if all(new_of.get(entry.key, entry.key) == entry.key for entry in entries(skeleton)):
        return skeleton
    leaves: dict[tuple[object, ...], object] = {}
    for entry in entries(skeleton):
        new = new_of.get(entry.key, entry.key)
        leaf = with_key(entry.leaf, new)
        leaves[_new_path(entry, new)] = leaf
    return nested(leaves)


def _new_path(entry: Entry, new: str) -> tuple[object, ...]:
    if new == entry.key:
        return entry.path
    for depth in range(len(entry.path) - 1, 0, -1):
        prefix = ".".join(map(str, entry.path[:depth])) + "."
        if new.startswith(prefix) and len(new) > len(prefix):
            return (*entry.path[:depth], new[len(prefix) :])
    return (new,)


_OPTIMIZER = re.compile(
    r"(^|\.)(optimizer|optimizers|optim|optimizer_states?)\."
    r"|(^|\.)(exp_avg|exp_avg_sq|fp32_param|momentum_buffer|max_exp_avg_sq|fp32_from_fp16_params)(\.|$)"
)
_KEPT_PRECISION = re.compile(r"(^|\.)(expert_bias|e_score_correction_bias|A_log|D|inv_freq)$|_scale_inv$|_amax$")


def is_optimizer_key(key: str) -> bool:
    """Whether a key names optimizer state (moments, masters, steps) rather than a model's tensor."""
    return _OPTIMIZER.search(key) is not None


def cast_of(rules: Sequence[tuple[str | None, str]], keys: Iterable[str] | None = None) -> Callable[[TensorMeta], str]:
    """The dtype that each tensor is to have.

    Args:
        rules: ``(glob, dtype)`` pairs, later ones win; a glob of None means the model's floating-point tensors of at
            least 16 bits, but not optimizer state, router biases, scales and others that are kept in their precision on
            purpose, which only a glob reaches.

        keys: the tensors there are; None leaves unchecked that every glob matches one.

    Raises:
        UnsupportedError: a dtype is not known.
        UsageError: a glob matches nothing.
    """
    present = None if keys is None else list(keys)
    for glob, _ in rules:
        if glob is not None and present is not None and not any(map(matcher(glob), present)):
            raise UsageError(f"--dtype: no tensor matches {glob!r}", hint="list the keys with: ckpt inspect --flat")
    parsed = [(None if glob is None else matcher(glob), dtype_of(name).name) for glob, name in rules]

    def dtype_for(meta: TensorMeta) -> str:
        chosen = meta.dtype
        for matches, dtype in parsed:
            if matches is not None:
                if matches(meta.key):
                    chosen = dtype
                continue
            found = dtype_of(meta.dtype)
            is_weight = found.kind == "float" and found.itemsize >= 2
            if is_weight and not is_optimizer_key(meta.key) and not _KEPT_PRECISION.search(meta.key):
                chosen = dtype
        return chosen

    return dtype_for
