"""How tensor parallelism cut each parameter, as ``universal_checkpoint_info`` says.

The entry of a model file lists regular expressions, which match from the beginning of names::

    affine_map                              boxes, for each parameter (AutoTP of 0.19)
    tp_replicated_parameter_patterns        complete on every rank
    parameter_with_2_sub_params_cat_dim_0   two matrices, each cut along axis 0 (SwiGLU)
    parameter_with_sub_params               several matrices, each cut along one axis (QKV)
    parameter_with_row_parallelism_patterns cut along axis 1
    all others                              cut along axis 0; in an entry without replicated
                                            patterns, what ``is_whole`` proves is whole
    vocabulary_parameter_patterns           of these, rows beyond original_vocab_size are padding

Not supported, refused by name: ``parameter_to_average_patterns`` and scaled pieces, whose values
are computed; boxes that are no slices; regular expressions that could take forever.

Source: DeepSpeed 0.19.8 ``checkpoint/ds_to_universal.py`` (``merge_tp_slices``),
``checkpoint/affine.py``. The tests compare with its result.

Some parameters are whole on every tensor-parallel rank, though no pattern says so:
``universal_checkpoint_info`` before version 0.3, without ``tp_replicated_parameter_patterns``, says
nothing of norms and of biases of row-parallel layers. Joined like column-parallel ones,
they would be as many times too long as there are ranks. In this order, the first that applies:

1. the bias of a layer is cut if the rows of its weight are, and else whole;
2. a vector whose shards add up to the model's hidden size (of the arguments, or else of
   ``config.json``) is cut;
3. what is the same on all ranks is whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import combinations
from typing import TYPE_CHECKING

from core.arrays.box import Box, Shape, c_strides, full_box
from core.engine.catalog.tensor import Tensor
from core.errors import CheckpointingException, CorruptError, UnsupportedError
from core.files.source_store import open_store
from core.formats.deepspeed.files import UNIVERSAL_HINT
from core.formats.deepspeed.model_parallel.join import TensorParallelPiece, begin_alike
from core.formats.huggingface.files import read_config_json
from core.pickle.fields import find_size, list_or_empty, mapping_or_empty
from core.pickle.inert import as_mapping, attributes
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore
    from core.formats.deepspeed.model_states import ModelStates

INFO = "universal_checkpoint_info"
_REPLICATED = "tp_replicated_parameter_patterns"
_AVERAGED = "parameter_to_average_patterns"
_ROW = "parameter_with_row_parallelism_patterns"
_TWO = "parameter_with_2_sub_params_cat_dim_0"
_SUB = "parameter_with_sub_params"
_WIDTHS = "sub_param_shard_widths"
_VOCABULARY = "vocabulary_parameter_patterns"
_ROWS = "original_vocab_size"
_MOST_CHARACTERS = 512
_MOST_REPEATS = 3


@dataclass(frozen=True, slots=True)
class JoinPlan:
    """The pieces of a parameter's shards, and the shape that they fill.

    Args:
        shape: shape of the parameter.
        pieces: pieces of the shards, disjoint in the parameter.
        extras: what a universal checkpoint records of it.
        is_replicated: all ranks have the same.
        n_padding: rows of padding that are left out.
        is_stated: the checkpoint says so; False where the values do.
    """

    shape: Shape
    pieces: Sequence[TensorParallelPiece]
    extras: Mapping[str, object]
    is_replicated: bool = False
    n_padding: int = 0
    is_stated: bool = True


@dataclass(frozen=True, slots=True)
class TensorParallelRules:
    """The entry ``universal_checkpoint_info`` of a model file.

    Args:
        file: name of the file.
        info: the entry; {} if there is none.
    """

    file: str
    info: Mapping[object, object]

    @property
    def is_recorded(self) -> bool:
        """True if the checkpoint has the entry."""
        return bool(self.info)

    def states_axis(self, name: str) -> bool:
        """Return whether the entry says how a parameter is cut.

        An entry without patterns of what is whole on every rank says so only of what it matches;
        with them, all others are cut along axis 0.
        """
        affine = mapping_or_empty(mapping_or_empty(self.info.get("affine_map")).get("params"))
        sub = [
            mapping_or_empty(item).get("patterns") for item in list_or_empty(self.info.get(_SUB))
        ]
        patterns = [*affine, *(pattern for group in sub for pattern in list_or_empty(group))]
        return (
            bool(list_or_empty(self.info.get(_REPLICATED)))
            or any(self._match(kind, name) for kind in (_AVERAGED, _TWO, _ROW, _VOCABULARY))
            or any(self._matches(str(pattern), name) for pattern in patterns)
        )

    def plan(self, name: str, shapes: Sequence[Shape]) -> JoinPlan:
        """Return how a parameter is joined.

        Args:
            shapes: shapes of its shards, by tensor-parallel rank.

        Raises:
            UnsupportedError: its values would have to be computed, or its pieces are no slices.
            CorruptError: the entry contradicts itself or the shapes.
        """
        if len({len(shape) for shape in shapes}) > 1:
            raise self._contradiction(name, shapes)
        if self._match(_AVERAGED, name) is not None:
            raise UnsupportedError(
                "this parameter must be averaged over the tensor-parallel ranks, which ckpt does "
                "not do",
                file=self.file,
                key=name,
                hint=UNIVERSAL_HINT,
            )
        affine = self._affine(name, shapes)
        if affine is not None:
            return self._without_padding(name, affine)
        if self._match(_REPLICATED, name) is not None:
            if len(set(shapes)) > 1:
                raise self._contradiction(name, shapes)
            return self._without_padding(name, plan_whole(shapes[0], is_stated=True))
        extras: dict[str, object]
        if self._match(_TWO, name) is not None and shapes[0]:
            axis, extras = 0, {"cat_dim": 0, "param_n_sub_params": 2}
            # As ``torch.chunk`` divides: the first part is the longer one.
            widths = [[-(-shape[0] // 2) for shape in shapes], [shape[0] // 2 for shape in shapes]]
        elif (sub := self._sub_parameters(name, shapes)) is not None:
            axis, widths, extras = sub
        else:
            axis = 0 if self._match(_ROW, name) is None else 1
            extras = {"cat_dim": axis}
            if any(axis >= len(shape) for shape in shapes):
                raise self._contradiction(name, shapes)
            widths = [[shape[axis] for shape in shapes]]
        return self._without_padding(name, self._cut(name, shapes, axis, widths, extras))

    def _cut(
        self,
        name: str,
        shapes: Sequence[Shape],
        axis: int,
        widths: Sequence[Sequence[int]],
        extras: Mapping[str, object],
    ) -> JoinPlan:
        """Return the plan of a parameter of sub-parameters, each cut along an axis.

        Args:
            widths: per sub-parameter, the extent of each shard's part along the axis.

        Raises:
            CorruptError: the widths do not add up to the shapes.
        """
        others = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
        if len(others) > 1 or any(
            sum(width[tp_rank] for width in widths) != shape[axis]
            or any(width[tp_rank] < 0 for width in widths)
            for tp_rank, shape in enumerate(shapes)
        ):
            raise self._contradiction(name, shapes)
        pieces, end, offsets = [], 0, [0] * len(shapes)
        for width in widths:
            for tp_rank, shape in enumerate(shapes):
                start, to = [0] * len(shape), [0] * len(shape)
                start[axis], to[axis] = offsets[tp_rank], end
                extent = (*shape[:axis], width[tp_rank], *shape[axis + 1 :])
                pieces.append(TensorParallelPiece(tp_rank, Box(tuple(start), extent), tuple(to)))
                offsets[tp_rank] += width[tp_rank]
                end += width[tp_rank]
        return JoinPlan((*shapes[0][:axis], end, *shapes[0][axis + 1 :]), pieces, extras)

    def _sub_parameters(
        self, name: str, shapes: Sequence[Shape]
    ) -> tuple[int, list[list[int]], dict[str, object]] | None:
        """Return the axis, the widths and the extras of a parameter of several sub-parameters.

        Returns:
            None for other parameters.

        Raises:
            UnsupportedError: the recorded shape has other axes than the parameter.
            CorruptError: the entry contradicts itself or the shapes.
        """
        for item in list_or_empty(self.info.get(_SUB)):
            fields = mapping_or_empty(item)
            patterns = [str(pattern) for pattern in list_or_empty(fields.get("patterns"))]
            pattern = next((text for text in patterns if self._matches(text, name)), None)
            if pattern is None:
                continue
            axis, logical = fields.get("partition_dim"), list_or_empty(fields.get("shape"))
            if type(axis) is not int or not 0 <= axis < len(logical):
                raise self._contradiction(name, shapes)
            if len(logical) != len(shapes[0]):
                raise UnsupportedError(
                    f"the sub-parameters are recorded with {len(logical)} axes, but the parameter "
                    f"has {len(shapes[0])} axes",
                    file=self.file,
                    key=name,
                    hint=UNIVERSAL_HINT,
                )
            # Sizes of the sub-parameters, or, before version 0.4, only their number.
            total = sum(shape[axis] for shape in shapes)
            sizes = list_or_empty(logical[axis])
            if not sizes:
                count = logical[axis]
                if type(count) is not int or count < 1 or total % count:
                    raise self._contradiction(name, shapes)
                sizes = [total // count] * count
            recorded = mapping_or_empty(self.info.get(_WIDTHS)).get(pattern)
            widths = [
                [number for number in list_or_empty(width) if type(number) is int]
                for width in list_or_empty(recorded)
            ]
            if not widths:
                tp = len(shapes)
                if any(type(size) is not int or size % tp for size in sizes):
                    raise self._contradiction(name, shapes)
                widths = [[size // tp] * tp for size in sizes if type(size) is int]
            if any(len(width) != len(shapes) for width in widths):
                raise self._contradiction(name, shapes)
            stored = list(logical)
            stored[axis] = tuple(sizes)
            shape = {"patterns": patterns, "shape": tuple(stored), "partition_dim": axis}
            return axis, widths, {"sub_param_shape": shape}
        return None

    def _affine(self, name: str, shapes: Sequence[Shape]) -> JoinPlan | None:
        """Return the plan of a parameter whose pieces are recorded; None for others.

        Raises:
            UnsupportedError: a piece is scaled, or no slice.
            CorruptError: the pieces do not fit the shapes.
        """
        by_pattern = mapping_or_empty(mapping_or_empty(self.info.get("affine_map")).get("params"))
        pattern = next((text for text in by_pattern if self._matches(str(text), name)), None)
        if pattern is None:
            return None
        entry = mapping_or_empty(by_pattern[pattern])
        shape = _shape(entry.get("logical_shape"))
        ranks = mapping_or_empty(entry.get("ranks"))
        pieces, n_elements, is_replicated = [], 0, False
        for tp_rank, shard in enumerate(shapes):
            recorded = mapping_or_empty(ranks.get(tp_rank))
            if _shape(recorded.get("shard_shape")) != shard:
                raise self._contradiction(name, shapes)
            for item in list_or_empty(recorded.get("pieces")):
                piece = mapping_or_empty(item)
                # Of pieces that several ranks have, the first one is taken.
                locations = list_or_empty(piece.get("locations"))
                is_replicated |= len(locations) > 1
                if locations and locations[0] != tp_rank:
                    continue
                extent = _shape(piece.get("shape"))
                start = _start(piece.get("dest"), shard, extent)
                to = _start(piece.get("source"), shape, extent)
                if start is None or to is None or piece.get("scale", 1) != 1:
                    raise UnsupportedError(
                        "a piece of the affine map is scaled or is not a slice of the "
                        "parameter; only slices that are not scaled are supported",
                        file=self.file,
                        key=name,
                        hint=UNIVERSAL_HINT,
                    )
                pieces.append(TensorParallelPiece(tp_rank, Box(start, extent), to))
                n_elements += Box(start, extent).n_elements
        boxes = [Box(piece.to, piece.box.shape) for piece in pieces]
        if n_elements != full_box(shape).n_elements or any(
            (common := box.intersect(other)) is not None and not common.is_empty
            for box, other in combinations(boxes, 2)
        ):
            raise self._contradiction(name, shapes)
        return JoinPlan(shape, pieces, {}, is_replicated=is_replicated and set(shapes) == {shape})

    def _without_padding(self, name: str, plan: JoinPlan) -> JoinPlan:
        """Return a plan without the rows of padding that a vocabulary has.

        Raises:
            CorruptError: the size of the vocabulary is missing.
        """
        if self._match(_VOCABULARY, name) is None:
            return plan
        rows = self.info.get(_ROWS)
        n = plan.shape[0] if plan.shape else 0
        if type(rows) is not int or not 0 < rows <= n:
            raise CorruptError(
                f"{INFO}.{_ROWS} is {rows!r}, but the parameter has {n} rows",
                file=self.file,
                key=name,
            )
        pieces = []
        for piece in plan.pieces:
            n_kept = min(piece.box.shape[0], rows - piece.to[0])
            if n_kept > 0:
                box = Box(piece.box.offset, (n_kept, *piece.box.shape[1:]))
                pieces.append(TensorParallelPiece(piece.tp_rank, box, piece.to))
        return JoinPlan(
            (rows, *plan.shape[1:]),
            pieces,
            {**plan.extras, "vocab_tensor": True},
            plan.is_replicated,
            n - rows,
        )

    def _match(self, kind: str, name: str) -> str | None:
        """Return the pattern of a kind that matches a name, None if none does.

        Raises:
            UnsupportedError: see ``_matches``.
        """
        patterns = map(str, list_or_empty(self.info.get(kind)))
        return next((pattern for pattern in patterns if self._matches(pattern, name)), None)

    def _matches(self, pattern: str, name: str) -> bool:
        """Return whether a pattern matches the beginning of a name.

        Raises:
            UnsupportedError: the pattern is no regular expression, or could take forever.
        """
        n_repeats = len(re.findall(r"(?<!\\)[*+{]", pattern))
        is_nested = re.search(r"(?<!\\)\)[*+{]", pattern) is not None
        try:
            if (
                max(len(pattern), len(name)) > _MOST_CHARACTERS
                or n_repeats > _MOST_REPEATS
                or is_nested
            ):
                raise UnsupportedError(
                    f"the pattern {pattern[:80]!r} is too complex to match against parameter names "
                    "safely",
                    file=self.file,
                    hint=UNIVERSAL_HINT,
                )
            return re.match(pattern, name) is not None
        except re.error as err:
            raise CorruptError(
                f"{INFO} has the pattern {pattern[:80]!r}, which is not a valid regular "
                f"expression: {err}",
                file=self.file,
            ) from err

    def _contradiction(self, name: str, shapes: Sequence[Shape]) -> CorruptError:
        """Return the error about shards that do not fit what is recorded."""
        return CorruptError(
            f"the shard shapes {', '.join(map(str, shapes))} contradict {INFO}",
            file=self.file,
            key=name,
        )


def plan_whole(shape: Shape, *, is_stated: bool) -> JoinPlan:
    """Return the plan of a parameter that every tensor-parallel rank has completely."""
    piece = TensorParallelPiece(0, full_box(shape), (0,) * len(shape))
    return JoinPlan(shape, [piece], {}, is_replicated=True, is_stated=is_stated)


def rules_of(model: ModelStates) -> TensorParallelRules:
    """Return what a model file says about tensor parallelism."""
    return TensorParallelRules(model.state.file, as_mapping(model.state.root.get(INFO)) or {})


def _shape(value: object) -> Shape:
    """Return a recorded shape; () if it is none."""
    return tuple(size for size in list_or_empty(value) if type(size) is int and size >= 0)


def _start(value: object, shape: Shape, extent: Shape) -> Shape | None:
    """Return the first index of a box that is recorded as its first element and strides.

    Returns:
        None if the elements are no box of the shape.
    """
    items = list_or_empty(value)
    if len(items) != 2 or len(extent) != len(shape) or type(items[0]) is not int:
        return None
    strides = c_strides(shape)
    recorded = _shape(items[1])
    if len(recorded) != len(shape) or any(
        stride != dense and size > 1
        for stride, dense, size in zip(recorded, strides, extent, strict=True)
    ):
        return None
    start, rest = [], items[0]
    for stride in strides:
        index, rest = divmod(rest, max(stride, 1))
        start.append(index)
    if rest or any(
        index + size > limit for index, size, limit in zip(start, extent, shape, strict=True)
    ):
        return None
    return tuple(start)


_FIRST_BYTES, _MOST_BYTES = 1 << 12, 1 << 24
"""Bytes of each shard that are compared: first a few, then up to all of an ordinary layer."""
_WEIGHT, _BIAS = ".weight", ".bias"


def read_hidden_size(model: ModelStates, store: ReadStore) -> int | None:
    """Return the hidden size of a model, or None if nothing states it.

    It is in the training arguments of a model file; or else in a ``config.json`` of the directory,
    or of that above, where transformers' Trainer saves it.
    """
    args = model.other_entries.get("args")
    size = (attributes(args) or mapping_or_empty(args)).get("hidden_size")
    if type(size) is int:
        return size
    size = _stated_size(store)
    root = getattr(store, "root", None)
    if size is None and root is not None:
        with closing(open_store(root.parent)) as above:
            size = _stated_size(above)
    return size


def _stated_size(store: ReadStore) -> int | None:
    """Return the hidden size in ``config.json``; None without one that can be read."""
    try:
        config = read_config_json(store) or {}
    except CheckpointingException:
        return None
    parts = (mapping_or_empty(config.get("text_config")), config)
    return find_size(parts, ("hidden_size", "n_embd"))


def is_whole(
    store: ReadStore,
    name: str,
    shards: Sequence[Tensor],
    rules: TensorParallelRules,
    *,
    plans: Mapping[str, JoinPlan],
    hidden_size: int | None,
) -> bool:
    """Return whether every rank has a parameter completely, which no pattern matches.

    Args:
        shards: the parameter by tensor-parallel rank.
        plans: name → how it is joined, for the weights of layers.
        hidden_size: of the model; None if it is unknown.
    """
    shape, tp = shards[0].shape, len(shards)
    if tp == 1 or not shape or any(shard.shape != shape for shard in shards):
        return False
    if rules.states_axis(name):
        return False
    weight = plans.get(name.removesuffix(_BIAS) + _WEIGHT) if name.endswith(_BIAS) else None
    if weight is not None and len(weight.shape) > len(shape) == 1:
        rows = weight.shape[0] + weight.n_padding
        if rows in (shape[0], tp * shape[0]):
            return rows == shape[0]
    if len(shape) == 1 and hidden_size == tp * shape[0]:
        return False
    return all(begin_alike(store, shards, n) for n in (_FIRST_BYTES, _MOST_BYTES))
