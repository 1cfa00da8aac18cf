"""The search of pages for the sections that answer a question."""

from __future__ import annotations

from core.verbs.explain.search import list_words, plain_text, rank_sections, split_sections

PAGE = """# Cats and dogs

Intro about pets.

## Feeding

- Cats eat *fish*.
- Dogs eat [bones](bones.md).

```sh
# not a heading
feed --dog
```

### At night

| who | what |
| --- | --- |
| owl | mice |
"""


def test_headings_inside_of_code_begin_no_section() -> None:
    sections = split_sections("pets", PAGE)
    assert [section.heading for section in sections] == ["Cats and dogs", "Feeding", "At night"]
    assert [section.anchor for section in sections] == ["cats-and-dogs", "feeding", "at-night"]


def test_a_match_has_the_passage_that_shares_most_words() -> None:
    (match, *_) = rank_sections(split_sections("pets", PAGE), "what bones do dogs eat")
    assert match.section.heading == "Feeding" and match.passage == "Dogs eat bones."
    (match, *_) = rank_sections(split_sections("pets", PAGE), "owl mice")
    assert match.passage == "owl · mice"


def test_a_question_with_other_words_matches_nothing() -> None:
    sections = split_sections("pets", PAGE)
    assert rank_sections(sections, "quantum chromodynamics") == []
    assert rank_sections(sections, "") == rank_sections(sections, "how do I") == []
    assert rank_sections([], "cats") == []


def test_words_are_compared_by_their_stems() -> None:
    assert list_words("resuming resumes resumed") == ["resum"] * 3
    assert set(list_words("torch_dist")) == {"torch_dist", "torch", "dist"}
    assert "max_shard_siz" in list_words("--max-shard-size")


def test_the_parts_of_a_compound_word_weigh_less_than_the_word_itself() -> None:
    text = "# A\n\n## One\n\n`--max-shard-size`\n\n## Two\n\nmax of a shard, its size\n"
    matches = rank_sections(split_sections("a", text), "max_shard_size")
    assert [match.section.heading for match in matches] == ["One"]


def test_a_part_whose_stem_is_shorter_than_in_the_compound_is_no_error() -> None:
    (section,) = split_sections("pets", "# Layer-wise layer_wise sleep\n")
    assert rank_sections([section], "layer-wise sleep")


def test_synonyms_are_found_and_count_less_than_the_word() -> None:
    text = "# A\n\n## One\n\nmany ranks\n\n## Two\n\nmany gpus\n\n## Three\n\nnothing\n"
    matches = rank_sections(split_sections("a", text), "gpus")
    assert [match.section.heading for match in matches] == ["Two", "One"]


def test_marks_of_markdown_are_removed_from_passages() -> None:
    assert plain_text("- `--to` [hf](x.md#y), **now**") == "--to hf, now"
    assert plain_text("| `a` | b &#124; c |") == "a · b | c"


def test_code_in_passages_keeps_its_characters() -> None:
    assert plain_text("`--dtype '*.exp_avg*=bf16'` and **all `*.bin` files**") == (
        "--dtype '*.exp_avg*=bf16' and all *.bin files"
    )
    assert plain_text("equal if `|A-B| ≤ ATOL`") == "equal if |A-B| ≤ ATOL"
    assert plain_text(r"| `a\|b` | *c* |") == "a|b · c"
    assert plain_text("`<RANK>` of 2 * 3 and a*b") == "<RANK> of 2 * 3 and a*b"
