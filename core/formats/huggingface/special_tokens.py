"""The special tokens of a tokenizer, as the configuration of a model to be served needs them.

``config.json`` and ``generation_config.json`` tell a server where to begin and stop; a Megatron
checkpoint records neither. The tokenizer's files do::

    tokenizer_config.json    {"bos_token": "<s>", "eos_token": {"content": "</s>", …},
                              "added_tokens_decoder": {"2": {"content": "</s>", …}}, …}
    special_tokens_map.json  the same names, in tokenizers of transformers before 5
    tokenizer.json           {"added_tokens": [{"id": 2, "content": "</s>"}, …],
                              "model": {"vocab": {"<unk>": 0, …} or [["<unk>", 0.0], …]}}
    vocab.json, added_tokens.json   token → number

Not supported: a tokenizer whose numbers are only in a SentencePiece or tiktoken file.

Source: transformers 5.23 (``save_pretrained`` of tokenizers, ``GenerationConfig``).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import TypeGuard

from core.errors import CorruptError, UsageError, list_some
from core.files.json_object import parse_json_object
from core.formats.huggingface.files import CONFIG
from core.pickle.fields import mapping_or_empty
from core.values import dataclass

GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "vocab.json",
    "added_tokens.json",
)
"""The files that say which tokens there are."""
MAX_BYTES = 256 << 20
"""The largest file of a tokenizer that is read; those of vocabularies of 256,000 have 40 MB."""
_MAX_VALUES = 20_000_000
_ROLES = ("bos", "eos", "pad")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens of a tokenizer, and the rows that its vocabulary needs.

    Args:
        ids: numbers of the tokens that have a role: ``bos``, ``eos`` and ``pad``.
        n_rows: number of rows that an embedding needs for the vocabulary and the tokens at which a
            text begins and ends; 0 if no file says.
        added: text → number of the tokens that were added to the vocabulary.
    """

    ids: Mapping[str, int]
    n_rows: int
    added: Mapping[str, int]


def read_special_tokens(files: Mapping[str, bytes]) -> SpecialTokens:
    """Read the special tokens, and the number of all tokens, from a tokenizer's files.

    A file that is not a JSON object says nothing: tokenizers are carried as they are.

    Args:
        files: name → content of those of ``TOKENIZER_FILES`` that exist.
    """
    parsed: dict[str, dict[str, object]] = {}
    for name, data in files.items():
        try:
            parsed[name] = parse_json_object(data, file=name, max_values=_MAX_VALUES)
        except CorruptError:
            continue
    vocabulary, added = dict(_list_vocabulary(parsed)), dict(_list_added(parsed))
    number_of = vocabulary | added
    settings = {
        **parsed.get("special_tokens_map.json", {}),
        **parsed.get("tokenizer_config.json", {}),
    }
    ids: dict[str, int] = {}
    for role in _ROLES:
        token = settings.get(f"{role}_token")
        text = mapping_or_empty(token).get("content", token)
        if isinstance(text, str) and text in number_of:
            ids[role] = number_of[text]
    needed = [*vocabulary.values(), *(ids[role] for role in ("bos", "eos") if role in ids)]
    return SpecialTokens(ids, max(needed, default=-1) + 1, added)


def _list_vocabulary(parsed: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[str, int]]:
    """Yield text and number of each token of the vocabulary."""
    tokenizer = parsed.get("tokenizer.json", {})
    vocabulary = mapping_or_empty(tokenizer.get("model")).get("vocab")
    if isinstance(vocabulary, list):
        texts = (item[0] for item in vocabulary if isinstance(item, list) and item)
        yield from ((text, number) for number, text in enumerate(texts) if isinstance(text, str))
    for tokens in (vocabulary, parsed.get("vocab.json")):
        for text, number in mapping_or_empty(tokens).items():
            if _is_number(number):
                yield str(text), number


def _list_added(parsed: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[str, int]]:
    """Yield text and number of each token that was added to the vocabulary."""
    for text, number in parsed.get("added_tokens.json", {}).items():
        if _is_number(number):
            yield text, number
    added = parsed.get("tokenizer.json", {}).get("added_tokens")
    for item in added if isinstance(added, list) else ():
        content, number = map(mapping_or_empty(item).get, ("content", "id"))
        if isinstance(content, str) and _is_number(number):
            yield content, number
    decoder = parsed.get("tokenizer_config.json", {}).get("added_tokens_decoder")
    for text, item in mapping_or_empty(decoder).items():
        content = mapping_or_empty(item).get("content")
        if isinstance(content, str) and str(text).isdecimal() and len(str(text)) < 10:
            yield content, int(text)


def _is_number(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 31


def check_token_count(tokens: SpecialTokens, config: Mapping[str, object]) -> tuple[str, ...]:
    """Raise UsageError if a tokenizer's vocabulary has tokens for which the model has no row.

    A server would then look up rows beyond the end of the embedding. A few added tokens beyond it
    are usual: published models have them for inputs that they do not take.

    Args:
        tokens: what the tokenizer's files record.
        config: the model's configuration.

    Returns:
        A note on the added tokens without a row; none without any.
    """
    text_config = mapping_or_empty(config.get("text_config"))
    n_rows = config.get("vocab_size", text_config.get("vocab_size"))
    if type(n_rows) is not int:
        return ()
    if tokens.n_rows > n_rows:
        last = max((tokens.n_rows - 1, *tokens.added.values()))
        raise UsageError(
            f"the tokenizer has token IDs up to {last:,}, but the model's vocabulary has only "
            f"{n_rows:,} rows",
            hint="pass this model's tokenizer, or, if rows of real tokens were mistaken for "
            f"padding, pass --vocab-size {last + 1}",
        )
    beyond = [text for text, number in tokens.added.items() if number >= n_rows]
    if not beyond:
        return ()
    note = "the model's vocabulary has no rows for these tokens of its tokenizer"
    return (f"{note}: {list_some(beyond)}",)


def complete_configuration(
    files: Collection[str], config: Mapping[str, object], tokens: SpecialTokens
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Enter a tokenizer's special tokens into the configuration where it has none.

    Args:
        files: names of the files of the model.
        config: the content of its ``config.json``.
        tokens: what the tokenizer's files record.

    Returns:
        The new contents of ``config.json``, if it changes, and ``generation_config.json``, unless
        there is one; and notes.
    """
    changed: dict[str, bytes] = {}
    notes: list[str] = []
    ids = {f"{role}_token_id": number for role, number in tokens.ids.items()}
    text_config = mapping_or_empty(config.get("text_config"))
    settings = {
        name: config.get(name, text_config.get(name))
        for name in (f"{role}_token_id" for role in _ROLES)
    }
    stated = {name: value for name, value in settings.items() if value is not None}
    absent = {name: number for name, number in ids.items() if name not in stated}
    if absent:
        changed[CONFIG] = _to_json({**config, **absent})
        values = ", ".join(f"{name} {number}" for name, number in absent.items())
        notes.append(f"{CONFIG} now has {values}, taken from the tokenizer")
    if GENERATION_CONFIG not in files and "eos" in tokens.ids:
        # Servers prefer this file: what the configuration states must not be lost in it.
        changed[GENERATION_CONFIG] = _to_json(ids | stated)
        notes.append(f"{GENERATION_CONFIG} was created from the tokenizer's special tokens")
    return changed, tuple(notes)


def _to_json(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
