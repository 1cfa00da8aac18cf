from __future__ import annotations

from itertools import product

from ckpt_cli.html_report.names import fold_names, shown_name
from tests.support.hostile_names import HOSTILE_NAMES


def expanded(parts: tuple[object, ...]) -> list[str]:
    """The names of a folded row, as the script of a report makes them."""
    runs = [
        [number for first, last in part for number in range(first, last + 1)]
        for part in parts[1::2]
        if isinstance(part, list)
    ]
    texts = parts[::2]
    return [
        "".join(f"{text}{number}" for text, number in zip(texts, [*numbers, ""], strict=True))
        for numbers in product(*runs)
    ]


def test_a_short_name_is_shown_unchanged() -> None:
    assert shown_name("decoder.layers.0.weight") == "decoder.layers.0.weight"


def test_control_characters_and_changes_of_direction_are_spelled() -> None:
    assert shown_name("a\x1b[1m\u202e\n") == "a\\x1b[1m\\u202e\\n"


def test_a_long_name_is_cut_and_its_length_stated() -> None:
    shown = shown_name("x" * 9_990 + ".end_of_it")
    assert shown.endswith(".end_of_it (10,000 characters)")
    assert len(shown) < 250


def test_folded_rows_stand_for_exactly_their_keys() -> None:
    keys = [f"l.{i}.e.{j}.w" for i in (0, 1, 2, 10) for j in (0, 3)]
    keys += ["l.7.e.0.w", "l.0/shard_1", "x 3 y.2", "x 3 y.4", "plain"]
    folded = fold_names(dict.fromkeys(keys))
    assert sorted(key for name in folded for key in name.keys) == sorted(keys)
    for name in folded:
        assert expanded(name.parts) == list(name.keys)


def test_names_of_another_kind_are_not_folded() -> None:
    assert len(fold_names({"l.0.w": 1, "l.1.w": 2, "l.2.w": 1})) == 2


def test_hostile_names_are_folded_without_loss() -> None:
    folded = fold_names(dict.fromkeys(HOSTILE_NAMES))
    assert sorted(key for name in folded for key in name.keys) == sorted(HOSTILE_NAMES)
