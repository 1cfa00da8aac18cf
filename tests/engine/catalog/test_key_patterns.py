from __future__ import annotations

import pytest

from core.engine.catalog.key_patterns import find_shared_prefix, fold_keys, folded, matching, ranges
from core.errors import UsageError

KEYS = [f"decoder.layers.{i}.mlp.weight" for i in range(12)] + [
    "embedding.weight",
    "embedding.weightless",
    "a[0].b",
]


def test_a_name_selects_itself_and_what_is_below_it() -> None:
    assert matching(KEYS, "embedding") == ["embedding.weight", "embedding.weightless"]
    assert matching(KEYS, "embedding.weight") == ["embedding.weight"]
    assert matching(KEYS, "decoder.layers.1") == ["decoder.layers.1.mlp.weight"]


def test_stars_match_dots_and_a_pattern_selects_below_as_well() -> None:
    assert matching(KEYS, "*.weight") == [key for key in KEYS if key.endswith(".weight")]
    assert matching(KEYS, "decoder.*.mlp") == KEYS[:12]
    assert matching(KEYS, "embedding.weigh?") == ["embedding.weight"]


def test_folded_layers_can_be_pasted_as_they_are_shown() -> None:
    assert matching(KEYS, "decoder.layers.[0-11].mlp.weight") == KEYS[:12]
    assert matching(KEYS, "decoder.layers.[0,10-11].mlp.weight") == [KEYS[0], KEYS[10], KEYS[11]]
    assert matching(KEYS, "decoder.layers.[0-10:5]") == [KEYS[0], KEYS[5], KEYS[10]]


def test_brackets_with_letters_are_character_classes() -> None:
    assert matching(KEYS, "[ed]*.weight") == [*KEYS[:12], "embedding.weight"]
    assert matching(KEYS, "[!e]*.weight") == KEYS[:12]
    assert matching(["a-b", "a^b"], "a[-^]b") == ["a-b", "a^b"]


def test_a_key_with_special_characters_selects_itself_first() -> None:
    assert matching(KEYS, "a[0].b") == ["a[0].b"]


def test_bad_ranges_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="not a valid number range"):
        matching(KEYS, "layers.[5-2]")
    with pytest.raises(UsageError, match="not a valid number range"):
        matching(KEYS, "layers.[0-99999999]")


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([0], "0"),
        ([0, 1, 2], "0-2"),
        ([0, 2, 4], "0-4:2"),
        ([1, 2, 5, 7, 8], "1-2,5,7-8"),
        ([3, 1], "1,3"),
        ([0, 2, 10**17], "0,2,100000000000000000"),
    ],
)
def test_numbers_are_written_as_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text
    keys = [f"x.{n}" for n in (*range(12), 10**17)]
    assert matching(keys, f"x.[{text}]") == [f"x.{n}" for n in sorted(numbers)]


def test_lines_about_equal_keys_of_layers_and_experts_become_one() -> None:
    lines = [
        f"decoder.layers.{n}.mlp.experts.{e}._extra_state (packed)"
        for n in range(4)
        for e in range(8)
    ]
    assert folded(lines, end=" (") == [
        "decoder.layers.[0-3].mlp.experts.[0-7]._extra_state (packed)"
    ]
    assert folded(lines[3:4], end=" (") == lines[3:4]
    uneven = [
        "a.0.x.1 (why)",
        "a.0.x.2 (why)",
        "a.1.x.1 (why)",
        "a.1.x.1 (else)",
        "b",
        "a.2 and 5 more",
    ]
    assert folded(uneven, end=" (") == [
        "a.0.x.[1-2] (why)",
        "a.1.x.1 (why)",
        "a.1.x.1 (else)",
        "b",
        "a.2 and 5 more",
    ]


def test_numbers_inside_names_and_outside_of_keys_do_not_fold() -> None:
    lines = [
        "x.fc1: 4 rows",
        "x.fc2: 4 rows",
        "y.1: 4 rows",
        "y.2: 5 rows",
        "mp_rank_00: z",
        "mp_rank_01: z",
    ]
    assert folded(lines, end=": ") == lines
    assert folded([], end=": ") == []


def test_very_long_numbers_are_names() -> None:
    keys = [f"layers.{digit * 5000}.w" for digit in "12"] + ["layers.3.w"]
    assert [label for label, _ in fold_keys(dict.fromkeys(keys))] == keys
    assert matching(keys, "layers.[0-9].w") == keys[-1:]


def test_keys_of_one_kind_fold_and_keep_their_members() -> None:
    kinds = {
        f"layers.{layer}.experts.{expert}.w": "wide" if layer == 2 else "narrow"
        for layer in range(3)
        for expert in range(2)
    }
    folded_keys = fold_keys({"embed": "narrow", **kinds, "final": "narrow"})
    assert [label for label, _ in folded_keys] == [
        "embed",
        "layers.[0-1].experts.[0-1].w",
        "layers.2.experts.[0-1].w",
        "final",
    ]
    assert sorted(key for _, keys in folded_keys for key in keys) == sorted(
        ["embed", *kinds, "final"]
    )
    # Every label is a pattern that selects its members.
    for label, keys in folded_keys:
        assert matching(["embed", *kinds, "final"], label) == keys


def test_the_shared_prefix_leaves_a_component_of_each_key() -> None:
    assert find_shared_prefix(["app.model.b.c", "app.model.a"]) == "app.model."
    assert find_shared_prefix(["app.model.a", "app.model.ab"]) == "app.model."
    assert find_shared_prefix(["a.b", "a"]) == find_shared_prefix(["ab", "ac"]) == ""
    assert find_shared_prefix(["a.b.c"]) == "a.b." and find_shared_prefix([]) == ""
