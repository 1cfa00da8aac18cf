"""The distribution of a model's layers over pipeline stages and model chunks.

Chunks are numbered with the virtual stages outermost: chunk ``v * PP + p`` is model chunk v of
stage p, and its first layer follows the last layer of the previous chunk. So the number of layers
in each chunk describes a distribution::

    8 layers, PP 2, VPP 2             chunk     0       1       2       3
    even                                        2       2       2       2
    10 layers, first 2, last 2, PP 4            2       3       3       2
    embedding and loss count, PP 2, VPP 2: 6    1       2       2       1
    layout "Et|tt||tttL"  (6 layers)            1       2       0       3

In V-shaped schedules every second virtual stage runs backwards: chunk 0 of stage p is the p-th one,
chunk 1 of stage p is number ``2 * PP - 1 - p``, so the first stage has the embedding and the loss.

A layout string has one part for every chunk, separated by ``|``: ``E`` is the embedding, ``t`` a
layer, ``m`` a multi-token prediction layer, ``L`` the loss; ``(…)*n`` and ``x*n`` repeat, commas
are ignored. Embedding and loss must be its first and last letters; Megatron builds them in the
first and last chunk even if these are empty.

Source: megatron-core 0.16.1 ``transformer/transformer_block.py`` ``get_num_layers_to_build``,
``transformer/pipeline_parallel_layer_layout.py``, ``transformer/transformer_config.py`` (for
refusals); for the stage with nothing but the embedding, Megatron-LM
``megatron/legacy/model/transformer.py``. tests/megatron/model/test_stages.py compares with
megatron-core. Layout strings: not in megatron-core 0.12, in 0.15 and later. V-shaped: schedules of
forks (``core.megatron.model.pipeline_args``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

from core.errors import UnsupportedError, UsageError
from core.values import dataclass

LETTERS = "ELtm"
"""Embedding, loss, layer, multi-token prediction layer."""
OPTIONS = (
    "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers or "
    "--pipeline-model-parallel-layout"
)
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
    """The settings that distribute a run's layers; by default, evenly.

    Args:
        first, last: number of layers in the first and last stage, if set (uneven pipelines); in a
            V-shaped pipeline, in the first and last chunk.
        counts_embedding, counts_loss: the embedding (the loss) counts as one layer of the first
            (last) chunk.
        layout: letters of every chunk, in the order of the chunks' numbers, or None.
        has_embedding_stage: the first stage has no layers (``standalone_embedding_stage`` of older
            Megatron).
        is_v_shaped: every second virtual stage runs from the last pipeline stage to the first.

    Raises:
        UsageError: two of the options contradict each other.
    """

    first: int | None = None
    last: int | None = None
    counts_embedding: bool = False
    counts_loss: bool = False
    layout: tuple[str, ...] | None = None
    has_embedding_stage: bool = False
    is_v_shaped: bool = False

    def __post_init__(self) -> None:
        given = {
            "a layer count for the first or last pipeline stage": self.first is not None
            or self.last is not None,
            "counting the embedding or loss as a layer": self.counts_embedding or self.counts_loss,
            "a pipeline layout": self.layout is not None,
            "a separate pipeline stage for the embedding": self.has_embedding_stage,
        }
        options = [option for option, is_given in given.items() if is_given]
        if len(options) > 1:
            raise UsageError(
                f"{options[0]} and {options[1]} cannot be combined",
                hint="use only one of the two, as Megatron requires",
            )

    def __str__(self) -> str:
        if self.layout is not None:
            return f"layout {layout_text(self.layout)}"
        parts = ["V-shaped"] * self.is_v_shaped + [
            f"{name} {count}"
            for name, count in (("first", self.first), ("last", self.last))
            if count is not None
        ]
        parts += ["embedding counts"] * self.counts_embedding + ["loss counts"] * self.counts_loss
        parts += ["embedding alone"] * self.has_embedding_stage
        return ", ".join(parts)

    @property
    def is_even(self) -> bool:
        """True for the default, without any setting."""
        return self == Pipeline()

    def at(self, *, has_pp: bool, has_vpp: bool) -> Pipeline:
        """Return the settings that still apply at other sizes.

        Args:
            has_pp, has_vpp: the number of stages (of model chunks per stage) is the same.
        """
        if has_pp and (has_vpp or self.layout is None):
            return self if has_vpp else replace(self, is_v_shaped=False)
        return Pipeline(counts_embedding=self.counts_embedding, counts_loss=self.counts_loss)


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """The number of layers in every model chunk.

    Layers are numbered over all chunks, virtual stages outermost: the offset of a chunk is the sum
    of all previous counts in the order of ``chunks``.

    Args:
        counts: ``counts[vp_rank][pp_rank]``, in layers.
        is_v_shaped: every second virtual stage runs from the last pipeline stage to the first.
    """

    counts: tuple[tuple[int, ...], ...]
    is_v_shaped: bool = False

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """(vp_rank, pp_rank) of every chunk, in the order of the model."""
        return _chunks(len(self.counts), len(self.counts[0]), self.is_v_shaped)

    @property
    def n_layers(self) -> int:
        """Number of layers in all chunks."""
        return sum(map(sum, self.counts))

    def offset(self, vp_rank: int, pp_rank: int) -> int:
        """Return the global number of a chunk's first layer."""
        before = self.chunks[: self.chunks.index((vp_rank, pp_rank))]
        return sum(self.counts[v][p] for v, p in before)

    def chunk_of(self, layer: int) -> tuple[int, int, int]:
        """Return (vp_rank, pp_rank, local number) of a global layer.

        Raises:
            ValueError: the model has no such layer.
        """
        places = _places(self)
        if not 0 <= layer < len(places):
            raise ValueError(f"layer {layer} is not one of the {len(places)} layers")
        return places[layer]


@lru_cache(maxsize=64)
def _chunks(vpp: int, pp: int, is_v_shaped: bool) -> tuple[tuple[int, int], ...]:
    """Return (vp_rank, pp_rank) of every chunk, in the order of the model."""
    return tuple(
        (v, pp - 1 - p if is_v_shaped and v % 2 else p) for v in range(vpp) for p in range(pp)
    )


@lru_cache(maxsize=64)
def _places(split: LayerSplit) -> tuple[tuple[int, int, int], ...]:
    """Return (vp_rank, pp_rank, local number) of every layer."""
    return tuple((v, p, n) for v, p in split.chunks for n in range(split.counts[v][p]))


def split_layers(
    n_layers: int, *, pp: int, vpp: int = 1, pipeline: Pipeline | None = None, n_mtp: int = 0
) -> LayerSplit:
    """Distribute layers over pipeline stages and model chunks as Megatron does.

    Args:
        n_layers: number of layers in the model.
        n_mtp: number of multi-token prediction layers, which only a layout string distributes.
        pp, vpp: number of pipeline stages, and of model chunks per stage.
        pipeline: settings of the distribution; None for evenly.

    Raises:
        UnsupportedError: the layers do not divide; the hint lists pipeline sizes that do.
        UsageError: the settings do not fit the layers or the stages.
    """
    pipeline = pipeline or Pipeline()
    if pipeline.is_v_shaped and (pipeline.layout is not None or pipeline.has_embedding_stage):
        setting = replace(pipeline, is_v_shaped=False)
        raise UnsupportedError(
            f"ckpt does not know how a V-shaped pipeline distributes layers with '{setting}'",
            hint="save the model in Megatron with --ckpt-format torch_dist, which numbers layers "
            "across the entire model",
        )
    if pipeline.is_v_shaped and (pipeline.first is not None or pipeline.last is not None):
        # The numbers are those of the first and the last chunk, both in the first stage.
        chunks = _chunks(vpp, pp, is_v_shaped=True)
        n_in = dict(zip(chunks, _uneven_stages(n_layers, pp * vpp, pipeline), strict=True))
        split = LayerSplit(tuple(tuple(n_in[v, p] for p in range(pp)) for v in range(vpp)))
    elif pipeline.layout is not None:
        split = _split_by_layout(n_layers, pp, vpp, pipeline.layout, n_mtp=n_mtp)
    elif pipeline.first is not None or pipeline.last is not None:
        split = _split_by_stage(_uneven_stages(n_layers, pp, pipeline), vpp)
    elif pipeline.has_embedding_stage:
        if pp == 1:
            raise UsageError(
                "a separate pipeline stage for the embedding requires at least one more stage"
            )
        stages = _even_stages(n_layers, pp - 1, vpp, n_others=0, n_before=1, n_mtp=n_mtp)
        split = _split_by_stage([0, *stages], vpp)
    else:
        # Embedding and loss take the place of a layer in the first and the last chunk.
        n_others = pipeline.counts_embedding + pipeline.counts_loss
        stages = _even_stages(n_layers, pp, vpp, n_others=n_others, n_mtp=n_mtp)
        counts = [list(row) for row in _split_by_stage(stages, vpp).counts]
        last_vp, last_pp = _chunks(vpp, pp, pipeline.is_v_shaped)[-1]
        counts[0][0] -= pipeline.counts_embedding
        counts[last_vp][last_pp] -= pipeline.counts_loss
        if counts[0][0] < 0 or counts[last_vp][last_pp] < 0:
            raise UsageError(
                "the model has too few layers to count the embedding and loss as layers"
            )
        split = LayerSplit(tuple(map(tuple, counts)))
    if split.n_layers != n_layers:
        raise UsageError(
            f"the pipeline stages have {split.n_layers} layers in total, but the model has "
            f"{n_layers}"
        )
    return replace(split, is_v_shaped=pipeline.is_v_shaped)


def _even_stages(
    n_layers: int, n_stages: int, vpp: int, *, n_others: int, n_before: int = 0, n_mtp: int = 0
) -> list[int]:
    """Return the number of layers, and of units that count as layers, in each of equal stages.

    Args:
        n_others: number of units that count as a layer (embedding, loss).
        n_before: number of stages before these.
        n_mtp: number of multi-token prediction layers, for the example in the message.
    """
    n_units = n_layers + n_others
    if n_units % (n_stages * vpp) == 0:
        return [n_units // n_stages] * n_stages

    # Name the sizes that work, and a layout that works for these sizes.
    counted = "embedding and loss" if n_others > 1 else "embedding or loss"
    amount = f"{n_layers} layers" + (f" ({n_units} counting the {counted})" if n_others else "")
    chunks = f" of {vpp} model chunks each" if vpp > 1 else ""
    sizes = [
        str(size + n_before) for size in range(1, n_units // vpp + 1) if n_units % (size * vpp) == 0
    ]
    if len(sizes) > 12:
        sizes = [*sizes[:9], f"… {sizes[-1]}"]
    works = (
        f"PP sizes that work: {', '.join(sizes)}" if sizes else f"no PP size works with VPP {vpp}"
    )
    example = layout_text(_spread(n_layers, (n_stages + n_before) * vpp, n_mtp))
    raise UnsupportedError(
        f"{amount} cannot be divided evenly among {n_stages} pipeline stages{chunks}",
        hint=f"{works}; for {n_stages} stages, use {OPTIONS}, such as '{example}'",
    )


def _uneven_stages(n_layers: int, pp: int, pipeline: Pipeline) -> list[int]:
    """Return the number of layers in each stage, with a set number in the first or last stage."""
    ends = [("first", pipeline.first), ("last", pipeline.last)]
    given = " and ".join(
        f"{count} layers in the {place} stage" for place, count in ends if count is not None
    )
    first, last = ([] if count is None else [count] for _, count in ends)
    n_middle_stages = pp - len(first) - len(last)
    n_middle = n_layers - sum(first) - sum(last)
    if pp == 1:
        raise UsageError(
            f"putting {given} requires more than one pipeline stage",
            hint="use --pp-new 2 or more",
        )

    # The other stages must have layers, and the same number of them.
    if min([*first, *last]) < 0 or n_middle_stages < 0 or n_middle < 0:
        raise UsageError(f"cannot split {n_layers} layers over {pp} pipeline stages with {given}")
    if (n_middle == 0) != (n_middle_stages == 0):
        raise UsageError(
            f"putting {given} leaves {n_middle} of {n_layers} layers for the other "
            f"{n_middle_stages} pipeline stages",
            hint="leave at least one layer for every other stage, and none if there is no other "
            "stage",
        )
    if n_middle_stages and n_middle % n_middle_stages:
        raise UnsupportedError(
            f"the remaining {n_middle} layers cannot be divided evenly among the other "
            f"{n_middle_stages} pipeline stages",
            hint=f"choose counts that leave a multiple of {n_middle_stages} layers, or use "
            "--pipeline-model-parallel-layout",
        )
    middle = [n_middle // n_middle_stages] * n_middle_stages if n_middle_stages else []
    return [*first, *middle, *last]


def _split_by_stage(per_stage: Sequence[int], vpp: int) -> LayerSplit:
    """Cut each stage into model chunks with the same number of layers."""
    for stage, count in enumerate(per_stage):
        if count % vpp:
            raise UnsupportedError(
                f"the {count} layers in pipeline stage {stage} cannot be divided evenly among "
                f"{vpp} model chunks",
                hint="choose a different VPP, or use --pipeline-model-parallel-layout",
            )
    return LayerSplit((tuple(count // vpp for count in per_stage),) * vpp)


def _split_by_layout(
    n_layers: int, pp: int, vpp: int, layout: Sequence[str], *, n_mtp: int
) -> LayerSplit:
    """Distribute layers as a layout string describes.

    Raises:
        UsageError: as for ``split_layers``.
    """
    if len(layout) != pp * vpp:
        raise UsageError(
            f"the pipeline layout has {len(layout)} parts, but PP {pp} × VPP {vpp} requires "
            f"{pp * vpp} model chunks",
            hint="use one part for every model chunk, separated by '|'",
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
    """Return the problem with the letters of a layout, as the end of a message, or None."""
    text = "".join(layout)
    if text[:1] != "E" or text[-1:] != "L" or text.count("E") != 1 or text.count("L") != 1:
        return "must begin with its only E (embedding) and end with its only L (loss)"
    if text.count("t") != n_layers:
        return f"has {text.count('t')} layers (t), but the model has {n_layers}"
    if text.count("m") != n_mtp:
        return f"has {text.count('m')} multi-token prediction layers (m), but the model has {n_mtp}"

    # Megatron builds multi-token prediction in one chunk, after all layers.
    if "t" in text.partition("m")[2]:
        return "has decoder layers (t) after multi-token prediction layers (m)"
    with_mtp = [number for number, part in enumerate(layout) if "m" in part]
    if len(with_mtp) > 1 or any(number < pp * (vpp - 1) for number in with_mtp):
        return (
            "has multi-token prediction (m) in several model chunks, or not in its stage's last "
            "chunk"
        )
    return None


def parse_layout(text: str) -> tuple[str, ...]:
    """Return the letters of every chunk of a layout string.

    Raises:
        UsageError: the string contains an unknown character, or more than 65,536 letters.
    """
    # Count the letters before repeating any: 't*999999999' must not fill the memory.
    short = "".join(text.split()).replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        n_letters = len(short) + sum(len(m[1]) * int(m[2][:9]) for m in re.finditer(pattern, short))
        if n_letters > _MAX_LETTERS:
            raise UsageError(
                f"the pipeline layout {text[:80]!r} expands to more than {_MAX_LETTERS} letters",
                hint=text[:80],
            )
        short = re.sub(pattern, lambda m: m[1] * int(m[2]), short)
    unknown = sorted(set(short) - set(LETTERS) - {"|"})
    if unknown:
        raise UsageError(
            f"the pipeline layout {text[:80]!r} contains unknown letters: {' '.join(unknown)!r}",
            hint="use the letters E, t, m and L, '|' between model chunks, and (…)*n or x*n to "
            "repeat, as in 'E|(t|)*3,m|L'",
        )
    return tuple(short.split("|"))


def layout_of_words(rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the letters of every chunk of a layout in words or letters.

    The words are ``embedding``, ``decoder``, ``mtp`` and ``loss``.

    Raises:
        UsageError: a word is unknown.
    """
    chunks = []
    for row in rows:
        unknown = next((word for word in row if word.strip().lower() not in _WORDS), None)
        if unknown is not None:
            raise UsageError(
                f"the pipeline layout contains the unknown layer {unknown!r}",
                hint="use embedding, decoder, mtp and loss",
            )
        chunks.append("".join(_WORDS[word.strip().lower()] for word in row))
    return tuple(chunks)


def layout_text(layout: Sequence[str]) -> str:
    """Return a layout as a string, abbreviating repetitions.

    ``parse_layout`` and Megatron read the same layout from the string.
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
    """Return a layout whose chunks differ by at most one layer; the first and last have fewer."""
    count, rest = divmod(n_layers, n_chunks)
    longer = range(1, rest + 1) if rest < n_chunks - 1 else range(rest)
    parts = ["t" * (count + (place in longer)) for place in range(n_chunks)]
    parts[0] = f"E{parts[0]}"
    parts[-1] += "m" * n_mtp + "L"
    return parts


@dataclass(frozen=True, slots=True)
class Stages:
    """The pipeline stage and model chunk of each part of a model.

    Args:
        pp, vpp: number of pipeline stages, and of model chunks per stage.
        splits: prefix of the layers' names (``decoder.layers.``) → their distribution, the main
            stack first.
        mtp: (vp, pp) of the chunk of multi-token prediction; None for the last one.
    """

    pp: int
    vpp: int
    splits: Mapping[str, LayerSplit]
    mtp: tuple[int, int] | None = None

    def n_layers(self, stack: str) -> int:
        """Return the number of layers in a stack; 0 for a stack that the model does not have."""
        split = self.splits.get(stack)
        return 0 if split is None else split.n_layers

    def count(self, stack: str, vp: int, pp: int) -> int:
        """Return the number of layers of a stack in a chunk."""
        split = self.splits.get(stack)
        return 0 if split is None else split.counts[vp][pp]

    def offset(self, stack: str, vp: int, pp: int) -> int:
        """Return the global number of the first layer of a stack in a chunk."""
        split = self.splits.get(stack)
        return 0 if split is None else split.offset(vp, pp)

    def chunk_of(self, stack: str, layer: int) -> tuple[int, int, int]:
        """Return (vp, pp, local number) of a layer.

        Raises:
            ValueError: the model has no such layer.
        """
        split = self.splits.get(stack)
        if split is None:
            raise ValueError(f"the model has no {stack}{layer}")
        return split.chunk_of(layer)

    def chunk_at(self, place: str) -> tuple[int, int]:
        """Return (vp, pp) of the chunk at a named place of the model.

        Args:
            place: ``first`` or ``last`` for that chunk, ``last_layer`` for the chunk of the main
                stack's last layer, ``mtp`` for that of multi-token prediction.
        """
        if place == "first":
            return (0, 0)
        if place == "mtp" and self.mtp is not None:
            return self.mtp
        if place == "last_layer":
            split = next(iter(self.splits.values()))
            return split.chunk_of(split.n_layers - 1)[:2]
        return next(iter(self.splits.values())).chunks[-1]

    def number_of(self, vp: int, pp: int) -> int:
        """Return the number of a chunk in the order of the model."""
        return next(iter(self.splits.values())).chunks.index((vp, pp))

    def in_one_chunk(self, n_layers: int, where: tuple[int, int]) -> LayerSplit:
        """Return the split of a stack whose layers are all in one chunk, (vp, pp)."""
        return LayerSplit(
            tuple(
                tuple(n_layers * ((v, p) == where) for p in range(self.pp)) for v in range(self.vpp)
            )
        )
