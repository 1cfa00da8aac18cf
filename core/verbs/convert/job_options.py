"""Build a job from options, under the names and with the values of the command line.

``ckpt convert --tp-new 4 --rename 'a=b'`` and ``core.convert(…, tp_new=4, rename={"a": "b"})`` both
end here: an option is a field of ``Job``, or has a place below.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import NoEffect, UsageError, did_you_mean, flag_of, refuse_without_effect
from core.files.url import refuse_url
from core.verbs.convert.job import PIPELINE_OPTIONS, SIZES, Job, TopologyChange

if TYPE_CHECKING:
    from core.megatron.model.pipeline import Pipeline
    from core.megatron.model.version import MegatronVersion

Texts = str | Iterable[str]
"""One or several texts."""
Pairs = Texts | Iterable[tuple[str, str]] | Mapping[str, str]
"""Texts such as ``A=B``, or what they stand for."""
GlobPairs = Texts | Iterable[tuple[str | None, str]] | Mapping[str | None, str]
"""The same of ``GLOB=WORD``, or ``WORD`` without a glob (None) for all keys."""
_NO_OPTIONS = frozenset(
    {
        "src",
        "dst",
        "topology",
        "is_reshard",
        "memory_bytes",
        "beside_bytes",
        "device",
        "merge",
    }
)
"""Fields of a job that are no options, or have other names as such."""
OPTIONS = (
    *(f"{name}_new" for name in SIZES),
    *PIPELINE_OPTIONS,
    *(field.name for field in fields(Job) if field.name not in _NO_OPTIONS),
    "memory",
)
"""Names of all options of a job."""
_NUMBERS = frozenset(
    (
        *(f"{name}_new" for name in SIZES),
        *SIZES,
        *(option for option in PIPELINE_OPTIONS if option.startswith("decoder")),
        *(field.name for field in fields(Job) if field.type in ("int", "int | None")),
    )
)
"""Options that are whole numbers."""
AUTO = "auto"
"""Value of ``--unstack-layers`` that selects the stacked tensors by their usual names."""
CHOICES = {
    "transformer_impl": ("local", "transformer_engine"),
    "experts": ("sequential", "grouped", "te-grouped"),
    "unknown": ("refuse", "replicate"),
    "rng": ("keep", "drop"),
    "missing_chunks": ("fill", "error"),
    "on_replica_mismatch": ("error", "first"),
}
"""Option → its possible values."""
_CONFLICTS = (("keep_padded_vocab", "vocab_size"), ("stack_layers", "unstack_layers"))

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_LEAST_MEMORY_BYTES = 1 << 20
"""A lower memory limit, which nothing could run in, lacks its unit."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def implied_format(dst: Path | None, names: str | None) -> str | None:
    """Return the target format that Hugging Face's names or the suffix of a file imply, or None."""
    if names is not None and names.startswith("hf"):
        return "hf"
    from core.formats.registry import format_of_suffix

    return None if dst is None else format_of_suffix(dst.suffix)


def parse_job(
    src: Path, dst: Path | None, options: Mapping[str, Any], *, is_reshard: bool = False
) -> Job:
    """Parse options into a job.

    Args:
        src, dst, is_reshard: as in ``Job``.
        options: option → its value as a text or as what the text stands for; None for an option
            that is not given. Besides those of ``OPTIONS``, sizes that the source is said to have.

    Raises:
        UsageError: options contradict each other, or a value is invalid.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for pair in _CONFLICTS:
        if all(given.get(name) for name in pair):
            flags = " and ".join(map(flag_of, pair))
            raise UsageError(f"{flags} cannot be combined", hint="use only one")
    no_layers = NoEffect(
        ("layer_axis",),
        not (given.get("stack_layers") or given.get("unstack_layers")),
        "no layers are stacked or unstacked",
        "add --stack-layers or --unstack-layers, or omit it",
    )
    refuse_without_effect(given, [no_layers])
    given |= {name: parse_number(given[name], option=name) for name in given.keys() & _NUMBERS}
    check_values(given)

    sizes = {name: given.pop(f"{name}_new", None) for name in SIZES}
    source_sizes = {name: given.pop(name) for name in SIZES if name in given}
    pipeline_options = {name: given.pop(name) for name in PIPELINE_OPTIONS if name in given}
    topology = None
    if source_sizes or pipeline_options or any(size is not None for size in sizes.values()):
        topology = TopologyChange(
            **sizes,
            pipeline=_build_pipeline(pipeline_options),
            pipeline_options=tuple(
                f"no_{name}" if value is False else name for name, value in pipeline_options.items()
            ),
            source=source_sizes,
        )
    if "memory" in given:
        given["memory_bytes"] = parse_memory(given.pop("memory"))
    values = {name: PARSERS[name](given[name]) for name in given.keys() & PARSERS.keys()}
    return Job(src=src, dst=dst, topology=topology, is_reshard=is_reshard, **(given | values))


def check_values(given: Mapping[str, Any]) -> None:
    """Raise if a value is none of its choices, or a number is too small.

    Raises:
        UsageError: a value is invalid.
    """
    for name, value in given.items():
        choices = CHOICES.get(name, (value,))
        if value not in choices:
            raise UsageError(
                f"{name}={value!r} is not one of: {', '.join(choices)}",
                hint=did_you_mean(str(value), choices),
            )
        least = 0 if name in ("iteration", "layer_axis") else 1
        if type(value) is int and value < least:
            raise UsageError(f"{name}={value} is not a whole number ≥ {least}")


def parse_number(number: str | int, *, option: str) -> int:
    """Parse a whole number, which may be of another library's type.

    Raises:
        UsageError: it is none; the message names ``option``.
    """
    try:
        return int(number) if isinstance(number, str) else operator.index(number)
    except (TypeError, ValueError):
        raise UsageError(f"{option}={number!r} is not a whole number") from None


def _build_pipeline(options: Mapping[str, Any]) -> Pipeline | None:
    """Return the distribution of layers over pipeline stages; None if no option concerns it.

    The given options describe the distribution completely; the source's is not consulted.

    Raises:
        UsageError: the options contradict each other, or the layout is invalid.
    """
    if not options:
        return None
    from core.megatron.model.pipeline import Pipeline, parse_layout

    values = {PIPELINE_OPTIONS[name]: value for name, value in options.items()}
    if "layout" in values:
        values["layout"] = parse_layout(values["layout"])
    return Pipeline(**values)


def list_texts(texts: Texts) -> tuple[str, ...]:
    """Return one or several texts as a tuple."""
    return (texts,) if isinstance(texts, str) else tuple(texts)


def _parse_pairs(pairs: Pairs, parse: Callable[[str], tuple[Any, str]]) -> tuple[Any, ...]:
    """Return a mapping, pairs or texts as a tuple of pairs.

    Args:
        parse: parses one text.
    """
    if isinstance(pairs, Mapping):
        return tuple(pairs.items())
    texts = (pairs,) if isinstance(pairs, str) else pairs
    return tuple(parse(pair) if isinstance(pair, str) else tuple(pair) for pair in texts)


def _parse_optim(optim: bool) -> str:
    """Return what ``Job.optim`` calls it to carry the optimizer, or to drop it."""
    return "carry" if optim else "drop"


def _parse_version(text: str | float) -> MegatronVersion:
    """Parse the version of Megatron that is to load the rank files."""
    from core.megatron.model.version import parse_version

    return parse_version(str(text))


def _parse_order(order: str | os.PathLike[str]) -> str:
    """Return the value of ``--param-order``, ``model`` or the path of a file that exists."""
    return str(order) if order == "model" else str(parse_file(order, option="--param-order"))


def _parse_path(path: str | os.PathLike[str]) -> Path:
    """Return a local path."""
    return Path(path)


def parse_file(path: str | os.PathLike[str], *, option: str) -> Path:
    """Return the path of a local file that exists.

    Raises:
        UsageError: the path is a URL, or not a file; the message names ``option``.
    """
    file_path = Path(path)
    refuse_url(file_path)
    if not file_path.is_file():
        raise UsageError(
            f"{option}: file not found", file=str(path), hint="check the spelling of the path"
        )
    return file_path


def parse_memory(size: str | int) -> int:
    """Parse a memory limit such as ``8GiB`` into bytes.

    Raises:
        UsageError: not a size, or so small that a unit is probably missing.
    """
    n_bytes = parse_size(size)
    if n_bytes < _LEAST_MEMORY_BYTES:
        raise UsageError(
            f"{size!r} is a memory limit of only {n_bytes:,} bytes",
            hint="add a unit, such as 8GiB or 512MiB",
        )
    return n_bytes


def parse_size(size: str | int) -> int:
    """Parse a size such as ``512MiB``, ``1GB``, ``1.5g`` or ``65536`` into bytes.

    ``k m g t`` are powers of ten, ``Ki Mi Gi Ti`` powers of two.

    Raises:
        UsageError: it is not a size, or zero.
    """
    match = _SIZE.fullmatch(str(size).strip())
    n_bytes = int(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else 0
    if n_bytes <= 0:
        raise UsageError(
            f"{size!r} is not a valid size",
            hint="use a size such as 512MiB or 1GB, or a number of bytes",
        )
    return n_bytes


def parse_casts(casts: GlobPairs) -> tuple[tuple[str | None, str], ...]:
    """Parse each ``--dtype`` (``bf16`` or ``GLOB=bf16``) into ``(glob or None, dtype)``."""
    return _parse_glob_pairs(casts, value="DTYPE", hint="for example '*.bias=fp32'")


def parse_quantizations(kinds: GlobPairs) -> tuple[tuple[str | None, str], ...]:
    """Parse each ``--quantize`` (``block`` or ``GLOB=block``) into ``(glob or None, kind)``."""
    return _parse_glob_pairs(kinds, value="KIND", hint="KIND is block, tensor or none")


def _parse_glob_pairs(
    pairs: GlobPairs, *, value: str, hint: str
) -> tuple[tuple[str | None, str], ...]:
    """Parse each ``WORD`` or ``GLOB=WORD`` into ``(glob or None, word)``.

    Raises:
        UsageError: a text has neither form; the message names ``value`` and ``hint``.
    """

    def parse(text: str) -> tuple[str | None, str]:
        # Split at the last "=", as a glob may contain one.
        glob, equals, word = text.rpartition("=")
        if not word or (equals and not glob):
            raise UsageError(f"{text!r} is neither {value} nor GLOB={value}", hint=hint)
        return glob if equals else None, word

    return _parse_pairs(pairs, parse)  # type: ignore[arg-type] # its keys may be None


def parse_renames(renames: Pairs) -> tuple[tuple[str, str], ...]:
    """Parse each ``--rename OLD=NEW`` into ``(regex, replacement)``.

    A ``=`` inside OLD is written ``\\=``.

    Raises:
        UsageError: a text is not ``OLD=NEW``.
    """

    def parse(text: str) -> tuple[str, str]:
        # OLD ends at the first "=" without a backslash; re reads the "\=" that remain as "=".
        match = re.fullmatch(r"((?:[^=\\]|\\.)+)=(.*)", text, re.DOTALL)
        if match is None:
            raise UsageError(
                f"--rename: {text!r} is not OLD=NEW",
                hint="write OLD=NEW, where OLD is a regular expression; for example, --rename "
                "'^module\\.=' removes the prefix",
            )
        return match[1], match[2]

    return _parse_pairs(renames, parse)


def parse_key_pairs(pairs: Pairs, *, option: str) -> tuple[tuple[str, str], ...]:
    """Parse each ``A=B`` into ``(first key, second key)``.

    Raises:
        UsageError: a text is not two keys; the message names ``option``.
    """

    def parse(text: str) -> tuple[str, str]:
        first, equals, second = text.partition("=")
        if not (first and equals and second) or "=" in second:
            raise UsageError(
                f"{option}: {text!r} is not KEY=KEY",
                hint=f"for example {option} lm_head.weight=model.embed_tokens.weight",
            )
        return first, second

    return _parse_pairs(pairs, parse)


def parse_unstack_globs(globs: Texts) -> tuple[str, ...] | None:
    """Return the globs of ``--unstack-layers``: () for ``auto``, None without a text.

    Raises:
        UsageError: ``auto`` is given together with a glob.
    """
    texts = list_texts(globs)
    if not texts:
        return None
    if AUTO in texts and len(texts) > 1:
        raise UsageError(
            f"--unstack-layers: {AUTO} and globs cannot be combined", hint="pass only the globs"
        )
    return () if texts == (AUTO,) else texts


PARSERS: Mapping[str, Callable[[Any], object]] = {
    "optim": _parse_optim,
    "config": partial(parse_file, option="--config"),
    "family": partial(parse_file, option="--family"),
    "rules": partial(parse_file, option="--rules"),
    "tokenizer": _parse_path,
    "megatron_version": _parse_version,
    "param_order": _parse_order,
    "include": list_texts,
    "exclude": list_texts,
    "strip_prefix": list_texts,
    "rename": parse_renames,
    "untie": partial(parse_key_pairs, option="--untie"),
    "tie": partial(parse_key_pairs, option="--tie"),
    "unstack_layers": parse_unstack_globs,
    "dtype": parse_casts,
    "quantize": parse_quantizations,
    "max_shard_size": parse_size,
}
"""Option → the parser of its value, where that is not the value of the job's field."""
