"""Handle keys that differ only by a prefix, as ``model.layers.0…`` and ``layers.0…`` do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from core.changes.rename import rename_entries
from core.diff.sides import Side
from core.errors import UsageError

_SAMPLED = 2000


def without_prefixes(a: Side, b: Side, prefixes: Sequence[str]) -> tuple[Side, Side]:
    """Remove prefixes from one side or from both, whichever makes more keys match.

    Raises:
        UsageError: no key of either side begins with a prefix, or two keys become one.
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
    """Return a side without a prefix of its keys, or None if no tensor's key begins with it.

    Raises:
        UsageError: two keys become one.
    """
    if not prefix or not any(key.startswith(prefix) for key in side.catalog.tensors):
        return None
    keys = (*side.catalog.tensors, *side.catalog.objects)
    new_of = {
        key: key[len(prefix) :] if key.startswith(prefix) and key != prefix else key for key in keys
    }
    duplicate = next((key for key, n in Counter(new_of.values()).items() if n > 1), None)
    if duplicate is not None:
        raise UsageError(f"--strip-prefix: without {prefix!r} two keys become {duplicate!r}")
    entries = {new_of.get(name, name): value for name, value in side.entries.items()}
    return replace(side, catalog=rename_entries(side.catalog, new_of), entries=entries)


def prefix_hint(a: Collection[str], b: Collection[str]) -> str | None:
    """Return a sentence that proposes ``--strip-prefix``, or None.

    It is proposed where few keys are in both checkpoints and removing a prefix makes most of them
    match.
    """
    n_fewer = min(len(a), len(b))
    if n_fewer == 0 or sum(key in b for key in a) * 2 > n_fewer:
        return None
    for name, other, longer, shorter in (("A", "B", a, b), ("B", "A", b, a)):
        prefix = _prefix(longer, set(shorter))
        if prefix is not None:
            n = sum(key.startswith(prefix) and key[len(prefix) :] in shorter for key in longer)
            if n * 2 > n_fewer:
                return (
                    f"{n} tensors of {name} begin with {prefix!r} and those of {other} do not; compare them with "
                    f"--strip-prefix {prefix}"
                )
    return None


def _prefix(longer: Collection[str], shorter: set[str]) -> str | None:
    """Return the prefix that most often turns a key into one of the other side, or None."""
    counts: Counter[str] = Counter()
    for key in sorted(longer)[:: max(1, len(longer) // _SAMPLED)]:
        at = key.find(".")
        while at >= 0:
            if key[at + 1 :] in shorter:
                counts[key[: at + 1]] += 1
                break
            at = key.find(".", at + 1)
    return counts.most_common(1)[0][0] if counts else None
