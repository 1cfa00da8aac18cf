"""Keys that differ by a prefix only (``model.layers.0…`` and ``layers.0…``): taken off when asked, else proposed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from core.changes.rename import renamed
from core.diff.sides import Side
from core.errors import UsageError

_SAMPLED = 2000


def without_prefixes(a: Side, b: Side, prefixes: Sequence[str]) -> tuple[Side, Side]:
    """Both sides without prefixes: each is taken off one side or both, whichever brings more keys together.

    Raises:
        UsageError: no key of either begins with one of them, or two keys become one.
    """
    for prefix in prefixes:
        stripped = [_stripped(side, prefix) if prefix and _has(side, prefix) else None for side in (a, b)]
        if stripped == [None, None]:
            raise UsageError(f"--strip-prefix: no key of either checkpoint begins with {prefix!r}")
        one, other = stripped[0] or a, stripped[1] or b
        a, b = max(((one, other), (one, b), (a, other)), key=lambda pair: _n_common(*pair))
    return a, b


def _n_common(a: Side, b: Side) -> int:
    """Keys of tensors that both have."""
    return len(a.catalog.tensors.keys() & b.catalog.tensors.keys())


def _has(side: Side, prefix: str) -> bool:
    """Whether a tensor's key begins with a prefix."""
    return any(key.startswith(prefix) for key in side.catalog.tensors)


def _stripped(side: Side, prefix: str) -> Side:
    keys = (*side.catalog.tensors, *side.catalog.objects)
    new_of = {key: key[len(prefix) :] if key.startswith(prefix) and key != prefix else key for key in keys}
    seen = Counter(new_of.values())
    twice = next((key for key, n in seen.items() if n > 1), None)
    if twice is not None:
        raise UsageError(f"--strip-prefix: without {prefix!r} two keys become {twice!r}")
    entries = {new_of.get(name, name): value for name, value in side.entries.items()}
    return replace(side, catalog=renamed(side.catalog, new_of), entries=entries)


def prefix_hint(a: Collection[str], b: Collection[str]) -> str | None:
    """A sentence that proposes ``--strip-prefix``, where few keys are in both and a prefix makes most of them so."""
    fewer = min(len(a), len(b))
    if fewer == 0 or sum(key in b for key in a) * 2 > fewer:
        return None
    for name, other, longer, shorter in (("A", "B", a, b), ("B", "A", b, a)):
        prefix = _prefix(longer, set(shorter))
        if prefix is not None:
            n = sum(key.startswith(prefix) and key[len(prefix) :] in shorter for key in longer)
            if n * 2 > fewer:
                return (
                    f"{n} tensors of {name} begin with {prefix!r}, and those of {other} do not: --strip-prefix {prefix}"
                )
    return None


def _prefix(longer: Collection[str], shorter: set[str]) -> str | None:
    """What keys most often have before one of the other side."""
    found: Counter[str] = Counter()
    for key in sorted(longer)[:: max(1, len(longer) // _SAMPLED)]:
        at = key.find(".")
        while at >= 0:
            if key[at + 1 :] in shorter:
                found[key[: at + 1]] += 1
                break
            at = key.find(".", at + 1)
    return found.most_common(1)[0][0] if found else None
