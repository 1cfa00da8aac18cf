"""Find the names most similar to one that does not exist, for "did you mean"."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from heapq import nlargest

_NUMBER = re.compile(r"\[[^\]]*\]|\d+")
"""A number, or the brackets of a pattern that stand for some."""
_MAX_NAMES = 20_000
"""Maximum number of names, apart from their numbers, that are looked at."""
_MAX_COMPARED = 60
"""Maximum number of names that are compared letter by letter."""
_MIN_RATIO = 0.6
"""Minimum similarity, as ``difflib`` defines it; the default of ``get_close_matches``."""
_MAX_BEHIND = 0.05
"""Maximum distance from the similarity of the first suggestion."""


def nearest_names(names: Iterable[str], wanted: str, *, n: int = 3) -> list[str]:
    """Return up to ``n`` names that are similar to ``wanted``, the most similar first.

    Bounded for any number of names: those of 100 layers count as one, which is suggested with the
    numbers of ``wanted`` if it exists. A name is also similar if some of its components are, as
    many as ``wanted`` has.
    """
    # Fold names that differ only in numbers, which need not be compared again.
    all_names = dict.fromkeys(names)
    first_of: dict[str, str] = {}
    for name in all_names:
        first_of.setdefault(_NUMBER.sub("#", name), name)
        if len(first_of) == _MAX_NAMES:
            break

    # Preselect by common groups of three letters, which is much faster than difflib.
    target = _NUMBER.sub("#", wanted.replace("*", "").replace("?", "").strip("."))
    grams = _grams(target)
    scores = ((len(grams & _grams(form)) - len(form) / 1000, form) for form in first_of)
    preselected = [form for score, form in nlargest(_MAX_COMPARED, scores) if score > 0]

    # Rank the others by their similarity.
    ranked = sorted(
        ((_similarity(form, target), form) for form in preselected),
        key=lambda pair: (-pair[0], len(pair[1])),
    )
    least = max(_MIN_RATIO, ranked[0][0] - _MAX_BEHIND) if ranked else 1.0
    forms = [form for ratio, form in ranked if ratio >= least][:n]
    numbers = re.findall(r"\d+", wanted)
    return [_with_numbers(form, numbers, all_names) or first_of[form] for form in forms]


def _grams(text: str) -> set[str]:
    """Return the groups of three letters of a text, regardless of case."""
    folded = f" {text.lower()} "
    return {folded[at : at + 3] for at in range(len(folded) - 2)}


def _similarity(form: str, target: str) -> float:
    """Return the similarity of a name, or of its most similar components; 1 if they are equal."""
    matcher = SequenceMatcher(None, "", target.lower(), autojunk=False)
    components = form.lower().split(".")
    n_components = target.count(".") + 1
    windows = {
        ".".join(components[at : at + n_components])
        for at in range(max(1, len(components) - n_components + 1))
    }
    best = 0.0
    for text in (form.lower(), *windows):
        matcher.set_seq1(text)
        if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best:
            best = max(best, matcher.ratio())
    return best


def _with_numbers(form: str, numbers: list[str], names: Iterable[str]) -> str | None:
    """Return the name of a form that has these numbers in this order; None if there is none."""
    texts = form.split("#")
    if len(texts) != len(numbers) + 1:
        return None
    name = "".join(part for pair in zip(texts, [*numbers, ""], strict=True) for part in pair)
    return name if name in names else None
