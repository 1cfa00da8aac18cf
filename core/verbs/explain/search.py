"""Find the sections of pages that answer a question typed as words.

A section is a heading of a Markdown page with the text up to the next one. Sections are ranked by
the weights of the words that they share with the question (BM25), and by the passage (a
paragraph, a list item, a row of a table) that has most of them, which is what is shown. Nothing is
kept between runs: reading all pages takes less time than Python's start.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from html import unescape

from core.values import dataclass

_HEADING = re.compile(r"(#{1,4}) +(.+)")
_ANCHOR = re.compile(r'<a id="[^"]+"></a>')
_WORD = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+)*")
_ENDING = re.compile(r"(?<=\w{3})(?:ations?|ings?|ions?|ed|es|e|s)$")
CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n\n).)+?)(?<!`)\1(?!`)", re.DOTALL)
"""A span of code in a paragraph."""
_EMPHASIS = re.compile(r"(\*{1,2})(?=[^\s*])(.+?)(?<=[^\s*])\1", re.DOTALL)
_LIST_ITEM = re.compile(r"^(?=[-*] |\| )", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_STOP_WORDS = frozenset(
    "a about after all am an and any are as at be been but by can cannot ckpt checkpoint "
    "checkpoints could did do does doesn don for from get give go had has have how i if in into "
    "is it its just ll make many me most much my need no not of on one only or our out please say "
    "should so some than that the their them then there these they this to too up use using "
    "want was we were what when where which while who why will with would you your".split()
)
_SYNONYMS = (
    ("continue", "resume", "restart"),
    ("crash", "ctrl", "interrupt", "kill", "abort", "sigterm"),
    ("auth", "credential", "login", "password"),
    ("code", "status"),
    ("corrupt", "damage", "broken"),
    ("disk", "space", "room"),
    ("gpu", "rank", "card"),
    ("hf", "hugging", "huggingface", "transformer"),
    ("bfloat16", "bf16"),
    ("fp32", "float32"),
    ("fp16", "float16"),
    ("fp8", "float8"),
    ("memory", "oom", "ram", "cpu"),
    ("oom", "kill"),
    ("loss", "spike", "jump", "diverge"),
    ("resharding", "reshard"),
    ("moe", "expert"),
    ("fewer", "other", "different", "another", "less", "more"),
    ("average", "merge"),
    ("quickly", "fast", "slow", "speed"),
    ("ci", "github", "gitlab", "jenkins"),
    ("newest", "latest", "last"),
    ("check", "verify", "validate", "intact"),
    ("prove", "verify", "same", "identical", "correct", "right"),
    ("convert", "conversion", "export"),
    ("aws", "s3"),
    ("gcs", "google", "gs"),
    ("fsdp", "fsdp2"),
    ("delete", "remove", "prune"),
    ("drop", "without"),
)
_SYNONYM_WEIGHT = 0.8
"""Weight of a synonym, in parts of the word's."""
_LEAST_COVERED = 0.5
"""Least share of the weight of a question that a section must have."""
_PART_WEIGHT = 0.25
"""Weight of ``max``, ``shard`` and ``size`` in a question with ``max_shard_size``."""
_LEAST_OF_BEST = 0.35
"""Least score of a further section, in parts of that of the best one."""
_SATURATION, _LENGTH_SHARE = 1.2, 0.7
"""BM25's k1 and b."""
_IN_TITLE = 2
"""How often a word of a page's title and name counts in each of its sections."""


@dataclass(frozen=True, slots=True)
class PageSection:
    """A part of a page.

    Args:
        page: name of the page, such as ``stores``.
        title: title of the page.
        heading: heading of the section; the title in the first section.
        level: number of ``#`` of the heading.
        text: its Markdown up to the next heading, without it.
        weight: factor of its score: pages of tasks answer more questions than references do.
    """

    page: str
    title: str
    heading: str
    level: int
    text: str
    weight: float

    @property
    def anchor(self) -> str:
        """The last part of a link to the section, spelled as code hosts do."""
        return re.sub(r"[^\w\- ]", "", plain_text(self.heading).lower()).strip().replace(" ", "-")


@dataclass(frozen=True, slots=True)
class PageMatch:
    """A section that shares words with a question, and its passage that shares most."""

    section: PageSection
    passage: str


def plain_text(markdown: str) -> str:
    """Return a passage without the marks of links, code, emphasis and tables, on one line.

    What stands in code keeps its characters.
    """
    spans: list[str] = []

    def set_aside(match: re.Match[str]) -> str:
        spans.append(match[2].strip().replace(r"\|", "|"))
        return f"\0{len(spans) - 1}\0"

    text = CODE_SPAN.sub(set_aside, markdown.strip())
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    if text.startswith("|"):
        text = text.strip("|").replace("|", " · ")
    text = re.sub(r"^(?:[-*] +|#+ +)|</?\w+>|&emsp;", "", text)
    text = _EMPHASIS.sub(r"\2", _EMPHASIS.sub(r"\2", text))
    text = re.sub(r"\\([*_|])", r"\1", unescape(text))
    text = re.sub(r"\0(\d+)\0", lambda match: spans[int(match[1])], text)
    return " ".join(text.split()).strip("· ")


def split_sections(page: str, text: str, *, weight: float = 1.0) -> list[PageSection]:
    """Return the sections of a page; headings inside of code are not such."""
    parts: list[tuple[int, str, list[str]]] = []
    is_code = False
    for line in _ANCHOR.sub("", text).splitlines():
        is_code ^= line.startswith("```")
        match = None if is_code else _HEADING.fullmatch(line)
        if match:
            parts.append((len(match[1]), match[2], []))
        elif parts:
            parts[-1][2].append(line)
    title = parts[0][1] if parts else page
    return [
        PageSection(page, title, heading, level, "\n".join(lines), weight)
        for level, heading, lines in parts
    ]


def rank_sections(
    sections: Sequence[PageSection], question: str, *, is_nearest_enough: bool = False
) -> list[PageMatch]:
    """Return the sections that share enough words with a question, the best first.

    Args:
        is_nearest_enough: if there are none, return those that share two words or more.
    """
    spellings_of = _spell_words(question)
    counts = [_count_words(section) for section in sections]
    n_with = Counter(word for count in counts for word in count)
    weight_of = {
        word: math.log(1 + len(sections) / (0.5 + max(map(n_with.__getitem__, spellings))))
        for word, spellings in spellings_of.items()
    }
    compounds = [word for word in spellings_of if "_" in word and n_with[word]]
    # A part that is stemmed a second time may be no word of the question.
    parts_of_compounds = {part for word in compounds for part in list_words(word)} - {*compounds}
    for part in parts_of_compounds & weight_of.keys():
        weight_of[part] *= _PART_WEIGHT
    total = sum(weight_of.values())
    lengths = [sum(n for word, n in count.items() if "_" not in word) for count in counts]
    mean = sum(lengths) / max(1, len(lengths))
    scored: list[tuple[float, PageMatch]] = []
    distant: list[tuple[float, PageMatch]] = []
    for section, count, length in zip(sections, counts, lengths, strict=True):
        parts = _weigh_shared(count, spellings_of)
        covered = sum(weight_of[word] * part for word, part in parts.items()) / (total or 1)
        is_answer = covered >= _LEAST_COVERED
        if not is_answer and (scored or len(parts) < 2 or not is_nearest_enough):
            continue
        norm = _SATURATION * (1 - _LENGTH_SHARE + _LENGTH_SHARE * length / mean)
        heading = _weigh_shared(Counter(list_words(section.heading)), spellings_of)
        score = sum(weight_of[word] * part for word, part in heading.items())
        for word in parts:
            n = max(count[spelling] * part for spelling, part in spellings_of[word].items())
            score += weight_of[word] * n / (n + norm)
        passages = [
            (sum(weight_of[word] * part for word, part in shared.items()), -number, passage)
            for number, passage in enumerate(_split_passages(section))
            if (shared := _weigh_shared(Counter(list_words(passage)), spellings_of))
        ]
        nearness, _, passage = max(passages, default=(0, 0, ""))
        match = PageMatch(section, plain_text(passage))
        ranked = scored if is_answer else distant
        ranked.append((section.weight * covered * (score + nearness), match))
    scored = scored or distant
    scored.sort(key=lambda item: -item[0])
    return [match for score, match in scored if score >= _LEAST_OF_BEST * scored[0][0]]


def list_words(text: str) -> list[str]:
    """Return the stems of the words of a text that say something; ``a_b`` also as ``a``, ``b``.

    ``a-b`` is the same as ``a_b``: the options of a command and those of a library.
    """
    words = [
        part
        for word in _WORD.findall(text.lower().replace("-", "_"))
        for part in dict.fromkeys((word, *word.split("_")))
    ]
    return [_ENDING.sub("", word) for word in words if len(word) > 1 and word not in _STOP_WORDS]


def _spell_words(question: str) -> Mapping[str, Mapping[str, float]]:
    """Return the words of a question, each with the weights of itself and of its synonyms."""
    return {
        word: dict.fromkeys(_synonyms().get(word, ()), _SYNONYM_WEIGHT) | {word: 1.0}
        for word in list_words(question)
    }


@cache
def _synonyms() -> Mapping[str, Collection[str]]:
    """Return the stems of the synonyms of each stem."""
    groups = [[stem for word in group for stem in list_words(word)] for group in _SYNONYMS]
    return {stem: {s for g in groups if stem in g for s in g} for group in groups for stem in group}


def _weigh_shared(
    count: Mapping[str, float], spellings_of: Mapping[str, Mapping[str, float]]
) -> Mapping[str, float]:
    """Return the words of a question that a text has, 1 for the word itself, less for synonyms."""
    parts = {
        word: max((part for spelling, part in spellings.items() if spelling in count), default=0.0)
        for word, spellings in spellings_of.items()
    }
    return {word: part for word, part in parts.items() if part}


def _count_words(section: PageSection) -> Counter[str]:
    """Return how often a section has each word; those of titles count more."""
    count = Counter(list_words(section.text))
    count.update(list_words(section.heading))
    for word in set(list_words(f"{section.title} {section.page.replace('-', ' ')}")):
        count[word] += _IN_TITLE
    return count


def _split_passages(section: PageSection) -> Iterator[str]:
    """Yield the paragraphs, list items and rows of tables of a section, without code."""
    for part in _CODE.sub("", section.text).split("\n\n"):
        for passage in _LIST_ITEM.split(part):
            if passage.strip() and not passage.startswith(("| ---", "See ")):
                yield passage
