"""How a model's layers are distributed over pipeline stages and model chunks.

Chunks are numbered with the virtual stages outermost: chunk ``v * PP + p`` is model chunk v of
stage p, and its first
layer is the one behind all layers of the chunks before it. So only the number of layers of each chunk has to be known::

    8 layers, PP 2, VPP 2             chunk     0       1       2       3
    even                                        2       2       2       2
    10 layers, first 2, last 2, PP 4            2       3       3       2
    embedding and loss count, PP 2, VPP 2: 6    1       2       2       1
    layout "Et|tt||tttL"  (6 layers)            1       2       0       3

A layout string has one part for every chunk, ``|`` between them: ``E`` the embedding, ``t`` a
layer, ``m`` a layer of multi-token prediction, ``L`` the loss; ``(…)*n`` and ``x*n`` repeat, commas
mean nothing. Embedding and loss must be its first and last letters; Megatron builds them in the
first and last chunk even where these are empty.

Source: megatron-core 0.16.1 ``transformer/transformer_block.py`` ``get_num_layers_to_build``,
``transformer/pipeline_parallel_layer_layout.py``, ``transformer/transformer_config.py`` (what is
refused); for the stage of the embedding alone Megatron-LM ``megatron/legacy/model/transformer.py``.
tests/megatron/model/test_stages.py compares with megatron-core. Layout strings: not in
megatron-core 0.12, in 0.15 and later.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from core.errors import UnsupportedError, UsageError

LETTERS = "ELtm"
"""Embedding, loss, layer, layer of multi-token prediction."""
OPTIONS = "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers or --pipeline-model-parallel-layout"
_WORDS = {
    "embedding": "E",
    "loss": "L",
    "decoder": "t",
    "mtp": "m",
    "e": "E",
    "l": "L",
    "t": "t",
    "m": "m",
}
_MAX_LETTERS = 1 << 16


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A run's distribution of its layers; the default is evenly.

    Args:
        first, last: layers of the first and last stage, where they were set (uneven pipelines).
        counts_embedding, counts_loss: the embedding (the loss) counts as one layer of the first
            (last) chunk.
        layout: the letters of every chunk, in the order of their numbers, or None.
        has_embedding_stage: the first stage has no layers (``standalone_embedding_stage`` of older
            Megatron).

    Raises:
        UsageError: two of the options contradict each other.
    """

    first: int | None = None
    last: int | None = None
    counts_embedding: bool = False
    counts_loss: bool = False
    layout: tuple[str, ...] | None = None
    has_embedding_stage: bool = False

    def __post_init__(self) -> None:
        given = {
            "layers of the first or last pipeline stage": self.first is not None
            or self.last is not None,
            "embedding or loss that count as a layer": self.counts_embedding or self.counts_loss,
            "a pipeline layout": self.layout is not None,
            "a pipeline stage for the embedding alone": self.has_embedding_stage,
        }
        options = [option for option, is_given in given.items() if is_given]
        if len(options) > 1:
            raise UsageError(
                f"{options[0]} and {options[1]} exclude each other",
                hint="Megatron takes one of them",
            )

    def __str__(self) -> str:
        if self.layout is not None:
            return f"layout {layout_text(self.layout)}"
        parts = [
            f"{name} {count}"
            for name, count in (("first", self.first), ("last", self.last))
            if count is not None
        ]
        parts += ["embedding counts"] * self.counts_embedding + ["loss counts"] * self.counts_loss
        parts += ["embedding alone"] * self.has_embedding_stage
        return ", ".join(parts)

    @property
    def is_even(self) -> bool:
        """True for the default, which says nothing."""
        return self == Pipeline()

    def at(self, *, has_pp: bool, has_vpp: bool) -> Pipeline:
        """Return the part of the distribution that still means something at other sizes.

        Args:
            has_pp, has_vpp: whether the number of stages (of model chunks a stage) is still the
                same.
        """
        if has_pp and (has_vpp or self.layout is None):
            return self
        return Pipeline(counts_embedding=self.counts_embedding, counts_loss=self.counts_loss)


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """The number of layers in every model chunk.

    Layers are numbered over all chunks, virtual stages outermost: the offset of a chunk is the sum
    of all counts before it in (vp, pp) order.

    Args:
        counts: ``counts[vp_rank][pp_rank]``, in layers.
    """

    counts: tuple[tuple[int, ...], ...]

    @property
    def n_layers(self) -> int:
        """Layers of the entire model."""
        return sum(map(sum, self.counts))

    def offset(self, vp_rank: int, pp_rank: int) -> int:
        """Return the global number of a chunk's first layer."""
        before = sum(map(sum, self.counts[:vp_rank]))
        return before + sum(self.counts[vp_rank][:pp_rank])

    def chunk_of(self, layer: int) -> tuple[int, int, int]:
        """Return (vp_rank, pp_rank, local number) of a global layer.

        Raises:
            ValueError: the model has no such layer.
        """
        places = _places(self.counts)
        if not 0 <= layer < len(places):
            raise ValueError(f"layer {layer} of {len(places)}")
        return places[layer]


@lru_cache(maxsize=64)
def _places(counts: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, int, int], ...]:
    """Return (vp_rank, pp_rank, local number) of every layer."""
    return tuple(
        (v, p, n)
        for v, row in enumerate(counts)
        for p, count in enumerate(row)
        for n in range(count)
    )


def split_layers(
    n_layers: int, *, pp: int, vpp: int = 1, pipeline: Pipeline | None = None, n_mtp: int = 0
) -> LayerSplit:
    """Distribute layers over pipeline stages and model chunks as Megatron does.

    Args:
        n_layers: layers of the model.
        n_mtp: layers of multi-token prediction, which only a layout string distributes.
        pp, vpp: pipeline stages, and model chunks a stage.
        pipeline: how; None for evenly.

    Raises:
        UnsupportedError: the layers do not divide; says which pipeline sizes do.
        UsageError: what ``pipeline`` says does not fit the layers or the stages.
    """
    how = pipeline or Pipeline()
    if how.layout is not None:
        split = _by_layout(n_layers, pp, vpp, how.layout, n_mtp=n_mtp)
    elif how.first is not None or how.last is not None:
        split = _by_stage(_uneven(n_layers, pp, how), vpp)
    elif how.has_embedding_stage:
        if pp == 1:
            raise UsageError("a pipeline stage for the embedding alone needs more than one stage")
        split = _by_stage(
            [0, *_even(n_layers, pp - 1, vpp, n_others=0, n_before=1, n_mtp=n_mtp)], vpp
        )
    else:
        n_others = how.counts_embedding + how.counts_loss
        split = _without_ends(
            _by_stage(_even(n_layers, pp, vpp, n_others=n_others, n_mtp=n_mtp), vpp), how
        )
    if split.n_layers != n_layers:
        raise UsageError(
            f"the pipeline stages hold {split.n_layers} layers, but the model has {n_layers}"
        )
    return split


def _even(
    n_layers: int, n_stages: int, vpp: int, *, n_others: int, n_before: int = 0, n_mtp: int = 0
) -> list[int]:
    """Return the layers, and units that count as layers, of each of several equal stages.

    Args:
        n_others: what counts as a layer and is none.
        n_before: stages before these.
        n_mtp: layers of multi-token prediction, for the example in the message.
    """
    n_units = n_layers + n_others
    if n_units % (n_stages * vpp):
        amount = f"{n_layers} layers" + (
            f" (with embedding or loss: {n_units})" if n_others else ""
        )
        chunks = f" of {vpp} model chunks" if vpp > 1 else ""
        sizes = [
            size + n_before for size in range(1, n_units // vpp + 1) if n_units % (size * vpp) == 0
        ]
        works = (
            f"PP sizes that do: {_numbers(sizes)}" if sizes else f"no PP size does with VPP {vpp}"
        )
        example = layout_text(_spread(n_layers, (n_stages + n_before) * vpp, n_mtp))
        raise UnsupportedError(
            f"{amount} do not divide over {n_stages} pipeline stages{chunks}",
            hint=f"{works}; for this one use {OPTIONS}, such as '{example}'",
        )
    return [n_units // n_stages] * n_stages


def _uneven(n_layers: int, pp: int, how: Pipeline) -> list[int]:
    """Return the layers of each stage where the first or the last stage has a count of its own."""
    first, last = how.first, how.last
    n_middle_stages = pp - (first is not None) - (last is not None)
    n_middle = n_layers - (first or 0) - (last or 0)
    given = " and ".join(
        f"{count} layers {place}"
        for place, count in (("first", first), ("last", last))
        if count is not None
    )
    if pp == 1:
        raise UsageError(
            f"{given} of {n_layers} layers: this needs more than one pipeline stage",
            hint="use --pp-new 2 or more",
        )

    # The stages between must get layers, and equally many.
    if min(first or 1, last or 1) < 1 or n_middle_stages < 0 or n_middle < 0:
        raise UsageError(f"cannot split {n_layers} layers over {pp} pipeline stages with {given}")
    if (n_middle == 0) != (n_middle_stages == 0):
        raise UsageError(
            f"{given} leave {n_middle} of {n_layers} layers for {n_middle_stages} other pipeline stages",
            hint="the layers of the first and last stage must leave some for every other one, and only for those",
        )
    if n_middle_stages and n_middle % n_middle_stages:
        raise UnsupportedError(
            f"{n_middle} layers do not divide over the {n_middle_stages} pipeline stages other than the first or last",
            hint=f"with {given}, a remainder that is a multiple of {n_middle_stages} works, "
            "or --pipeline-model-parallel-layout",
        )
    middle = [n_middle // n_middle_stages] * n_middle_stages if n_middle_stages else []
    return [*([first] if first is not None else []), *middle, *([last] if last is not None else [])]


def _by_stage(per_stage: Sequence[int], vpp: int) -> LayerSplit:
    """Cut each stage into model chunks of equally many layers."""
    for stage, count in enumerate(per_stage):
        if count % vpp:
            raise UnsupportedError(
                f"{count} layers of pipeline stage {stage} do not divide over {vpp} model chunks",
                hint="choose another VPP, or use --pipeline-model-parallel-layout",
            )
    return LayerSplit((tuple(count // vpp for count in per_stage),) * vpp)


def _without_ends(split: LayerSplit, how: Pipeline) -> LayerSplit:
    """Return the split without the units that count as a layer: embedding and loss."""
    rows = [list(row) for row in split.counts]
    rows[0][0] -= how.counts_embedding
    rows[-1][-1] -= how.counts_loss
    if rows[0][0] < 0 or rows[-1][-1] < 0:
        raise UsageError("there are not enough layers for embedding and loss to count as layers")
    return LayerSplit(tuple(map(tuple, rows)))


def _by_layout(
    n_layers: int, pp: int, vpp: int, layout: Sequence[str], *, n_mtp: int
) -> LayerSplit:
    """Return the split that a layout string describes.

    Raises:
        UsageError: as for ``split_layers``.
    """
    if len(layout) != pp * vpp:
        raise UsageError(
            f"the pipeline layout has {len(layout)} parts, but PP {pp} × VPP {vpp} are {pp * vpp} model chunks",
            hint="parts are what '|' separates: one for every model chunk",
        )
    problem = _problem_of_layout(n_layers, pp, vpp, layout, n_mtp=n_mtp)
    if problem is not None:
        raise UsageError(f"the pipeline layout {layout_text(layout)} {problem}")
    return LayerSplit(
        tuple(tuple(part.count("t") for part in layout[v * pp : (v + 1) * pp]) for v in range(vpp))
    )


def _problem_of_layout(
    n_layers: int, pp: int, vpp: int, layout: Sequence[str], *, n_mtp: int
) -> str | None:
    """Return what is wrong with the letters of a layout, or None."""
    text = "".join(layout)
    if text[:1] != "E" or text[-1:] != "L" or text.count("E") != 1 or text.count("L") != 1:
        return "does not begin with its only E (embedding) and end with its only L (loss)"
    if text.count("t") != n_layers:
        return f"has {text.count('t')} layers (t), but the model has {n_layers}"
    if text.count("m") != n_mtp:
        return (
            f"has {text.count('m')} layers of multi-token prediction (m), but the model has {n_mtp}"
        )
    if "t" in text.partition("m")[2]:
        return "has layers (t) after those of multi-token prediction (m)"
    with_mtp = [number for number, part in enumerate(layout) if "m" in part]
    if len(with_mtp) > 1 or any(number < pp * (vpp - 1) for number in with_mtp):
        return (
            "has multi-token prediction (m) in several model chunks, or not in its stage's last one"
        )
    return None


def parse_layout(text: str) -> tuple[str, ...]:
    """Return the letters of every chunk of a layout string.

    Raises:
        UsageError: a character that means nothing, or too many of them.
    """
    short = "".join(text.split()).replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        n_letters = len(short) + sum(len(m[1]) * int(m[2][:9]) for m in re.finditer(pattern, short))
        if n_letters > _MAX_LETTERS:
            raise UsageError(
                f"the pipeline layout has more than {_MAX_LETTERS} letters", hint=text[:80]
            )
        short = re.sub(pattern, lambda m: m[1] * int(m[2]), short)
    wrong = sorted(set(short) - set(LETTERS) - {"|"})
    if wrong:
        raise UsageError(
            f"the pipeline layout {text[:80]!r} has {' '.join(wrong)!r}",
            hint="it is made of E t m L, '|' between model chunks, and (…)*n and x*n: 'E|(t|)*3,m|L'",
        )
    return tuple(short.split("|"))


def layout_of_words(rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the letters of every chunk of a layout in words or letters.

    The words are ``embedding``, ``decoder``, ``mtp`` and ``loss``.

    Raises:
        UsageError: a word that means nothing.
    """
    chunks = []
    for row in rows:
        wrong = next((word for word in row if word.strip().lower() not in _WORDS), None)
        if wrong is not None:
            raise UsageError(
                f"the pipeline layout has {wrong!r}",
                hint="it is made of embedding, decoder, mtp and loss",
            )
        chunks.append("".join(_WORDS[word.strip().lower()] for word in row))
    return tuple(chunks)


def layout_text(layout: Sequence[str]) -> str:
    """Return a layout as a string, abbreviating repetitions.

    ``parse_layout`` and Megatron read the same layout from it.
    """
    runs = [(part, len(list(same))) for part, same in groupby(layout[:-1])]
    texts = (f"{_short(part)}|" if n == 1 else f"({_short(part)}|)*{n}" for part, n in runs)
    return "".join(texts) + _short(layout[-1])


def _short(part: str) -> str:
    return "".join(
        f"{letter}*{n}" if n > 3 else letter * n
        for letter, n in ((x, len(list(y))) for x, y in groupby(part))
    )


def _spread(n_layers: int, n_chunks: int, n_mtp: int) -> list[str]:
    """Return a layout whose chunks differ by at most one layer; the ends are the shorter ones."""
    count, rest = divmod(n_layers, n_chunks)
    longer = range(1, rest + 1) if rest < n_chunks - 1 else range(rest)
    parts = ["t" * (count + (place in longer)) for place in range(n_chunks)]
    parts[0] = f"E{parts[0]}"
    parts[-1] += "m" * n_mtp + "L"
    return parts


def _numbers(sizes: Sequence[int]) -> str:
    if len(sizes) > 12:
        return ", ".join(map(str, sizes[:9])) + f", … {sizes[-1]}"
    return ", ".join(map(str, sizes))
