"""Handle keys that differ only by a prefix, as ``model.layers.0…`` and ``layers.0…`` do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from shlex import quote

from core.engine.changes.rename import rename_entries
from core.errors import UsageError
from core.verbs.diff.sides import Side

_SAMPLED = 2000
"""Number of keys, about, that are searched for a common prefix."""


def without_prefixes(a: Side, b: Side, prefixes: Sequence[str]) -> tuple[Side, Side]:
    """Remove prefixes from one or both sides, whichever makes more keys match.

    Raises:
        UsageError: no key of either side begins with a prefix, or two keys become equal.
    """
    for prefix in prefixes:
        stripped = [_strip(side, prefix) for side in (a, b)]
        if stripped == [None, None]:
            raise UsageError(f"--strip-prefix: no key of either checkpoint begins with {prefix!r}")
        short_a, short_b = stripped[0] or a, stripped[1] or b
        candidates = ((short_a, short_b), (short_a, b), (a, short_b))
        a, b = max(
            candidates,
            key=lambda pair: len(pair[0].catalog.tensors.keys() & pair[1].catalog.tensors.keys()),
        )
    return a, b


def _strip(side: Side, prefix: str) -> Side | None:
    """Remove a prefix from the keys of a side; return None if no tensor's key begins with it.

    Raises:
        UsageError: two keys become equal.
    """
    if not prefix or not any(key.startswith(prefix) for key in side.catalog.tensors):
        return None
    # A key that is nothing but the prefix keeps its name: no key may be empty.
    keys = (*side.catalog.tensors, *side.catalog.objects)
    new_of = {key: key.removeprefix(prefix) or key for key in keys}
    duplicate = next((key for key, n in Counter(new_of.values()).items() if n > 1), None)
    if duplicate is not None:
        raise UsageError(
            f"--strip-prefix: without {prefix!r}, two keys would both become {duplicate!r}"
        )
    entries = {new_of.get(name, name): value for name, value in side.entries.items()}
    return replace(side, catalog=rename_entries(side.catalog, new_of), entries=entries)


def prefix_hint(a: Collection[str], b: Collection[str]) -> str | None:
    """Return a note that proposes ``--strip-prefix``, or None.

    The option is proposed if at most half of the keys are in both checkpoints, and more than half
    match after removing a prefix.
    """
    # "Half" is that of the checkpoint with fewer keys: the other may have an optimizer as well.
    n_fewer = min(len(a), len(b))
    if n_fewer == 0 or sum(key in b for key in a) * 2 > n_fewer:
        return None
    for name, other, longer, shorter in (("A", "B", a, b), ("B", "A", b, a)):
        prefix = _prefix(longer, set(shorter))
        if prefix is not None:
            n = sum(key.startswith(prefix) and key[len(prefix) :] in shorter for key in longer)
            if n * 2 > n_fewer:
                return (
                    f"the keys of {n} tensors begin with {prefix!r} in {name}, but not in {other}; "
                    f"to compare them, pass --strip-prefix {quote(prefix)}"
                )
    return None


def _prefix(longer: Collection[str], shorter: set[str]) -> str | None:
    """Find the prefix whose removal most often turns a key into one of the other side's.

    A prefix ends with a dot. Of many keys only a sample is searched.
    """
    counts: Counter[str] = Counter()
    for key in sorted(longer)[:: max(1, len(longer) // _SAMPLED)]:
        at = key.find(".")
        while at >= 0:
            if key[at + 1 :] in shorter:
                counts[key[: at + 1]] += 1
                break
            at = key.find(".", at + 1)
    return counts.most_common(1)[0][0] if counts else None
