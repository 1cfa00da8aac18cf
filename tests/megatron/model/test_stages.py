"""The distribution of layers over pipeline stages: against megatron-core, and whole models at
uneven layouts.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest

from core.errors import CorruptError, UnsupportedError, UsageError
from core.megatron.model.pipeline import (
    LayerSplit,
    Pipeline,
    layout_text,
    parse_layout,
    split_layers,
)
from core.megatron.model.pipeline_args import changes_for, layout_of, pipeline_of
from core.pickle.inert import Global, Inert
from tests.support.asked import asked

Options = dict[str, object]


@pytest.mark.parametrize(
    ("options", "pipeline", "counts"),
    [
        ({"n_layers": 8, "pp": 2}, {}, ((4, 4),)),
        ({"n_layers": 8, "pp": 2, "vpp": 2}, {}, ((2, 2), (2, 2))),
        ({"n_layers": 10, "pp": 4}, {"first": 2, "last": 2}, ((2, 3, 3, 2),)),
        ({"n_layers": 10, "pp": 3}, {"first": 4}, ((4, 3, 3),)),
        ({"n_layers": 10, "pp": 2}, {"first": 4, "last": 6}, ((4, 6),)),
        ({"n_layers": 10, "pp": 2, "vpp": 2}, {"first": 4, "last": 6}, ((2, 3), (2, 3))),
        ({"n_layers": 6, "pp": 2}, {"counts_embedding": True, "counts_loss": True}, ((3, 3),)),
        ({"n_layers": 7, "pp": 4}, {"counts_embedding": True}, ((1, 2, 2, 2),)),
        ({"n_layers": 7, "pp": 2, "vpp": 2}, {"counts_loss": True}, ((2, 2), (2, 1))),
        ({"n_layers": 6, "pp": 1}, {"counts_embedding": True, "counts_loss": True}, ((6,),)),
        ({"n_layers": 8, "pp": 3}, {"has_embedding_stage": True}, ((0, 4, 4),)),
        (
            {"n_layers": 6, "pp": 2, "vpp": 2},
            {"layout": ("Et", "tt", "", "tttL")},
            ((1, 2), (0, 3)),
        ),
    ],
)
def test_layers_per_chunk(
    options: dict[str, int], pipeline: Options, counts: tuple[tuple[int, ...], ...]
) -> None:
    assert split_layers(**options, pipeline=Pipeline(**pipeline)).counts == counts  # type: ignore[arg-type]


def test_layers_of_virtual_stages_are_numbered_chunk_by_chunk() -> None:
    split = split_layers(8, pp=2, vpp=2)
    assert [split.offset(v, p) for v in range(2) for p in range(2)] == [0, 2, 4, 6]
    assert [split.chunk_of(layer) for layer in (0, 3, 4, 7)] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 1, 1),
    ]


@pytest.mark.parametrize("n_mtp", [0, 1])
def test_layers_that_do_not_divide_name_the_sizes_and_the_options_that_do(n_mtp: int) -> None:
    with pytest.raises(
        UnsupportedError, match=r"61 layers cannot be divided evenly among 16 pipeline stages"
    ) as caught:
        split_layers(61, pp=16, n_mtp=n_mtp)
    hint = caught.value.hint or ""
    assert "PP sizes that work: 1, 61;" in hint
    assert "--decoder-first-pipeline-num-layers" in hint
    example = hint.rpartition("such as ")[2].strip("'")
    split = split_layers(61, pp=16, pipeline=Pipeline(layout=parse_layout(example)), n_mtp=n_mtp)
    assert split.counts == ((3, *[4] * 13, 3, 3),)


@pytest.mark.parametrize(
    ("n_layers", "pp", "pipeline"),
    [
        (10, 2, {"first": 4, "last": 4}),
        (4, 1, {"first": 2, "last": 2}),
        (6, 3, {"first": 3, "last": 3}),
        (6, 3, {"first": 8}),
        (4, 1, {"has_embedding_stage": True}),
        (6, 2, {"layout": ("Ettt", "ttL")}),
        (6, 2, {"layout": ("Ettt", "t", "ttL")}),
        (4, 2, {"layout": ("tt", "EttL")}),
        (4, 2, {"layout": ("Ett", "Ltt")}),
        (4, 2, {"layout": ("Ett", "ttLL")}),
        (4, 2, {"layout": ("Ett", "ttmL")}),
    ],
)
def test_distributions_that_do_not_fit_are_refused(
    n_layers: int, pp: int, pipeline: Options
) -> None:
    with pytest.raises(UsageError):
        split_layers(n_layers, pp=pp, pipeline=Pipeline(**pipeline))  # type: ignore[arg-type]


def test_ways_to_distribute_layers_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="cannot be combined"):
        Pipeline(first=2, counts_loss=True)
    with pytest.raises(UsageError, match="cannot be combined"):
        Pipeline(layout=("E", "L"), last=2)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("E|(t|)*3,m|L", ("E", "t", "t", "t", "m", "L")),
        ("Et*3|(tt|)*29,m|L", ("Ettt", *["tt"] * 29, "m", "L")),
        ("E||t|,|L", ("E", "", "t", "", "L")),
        ("E (t|)*2 t*2 | L", ("Et", "t", "tt", "L")),
        ("EttL", ("EttL",)),
        ("E(|t)*2|*2L", ("E", "t", "t", "", "L")),
    ],
)
def test_layout_strings(text: str, layout: tuple[str, ...]) -> None:
    assert parse_layout(text) == layout
    assert parse_layout(layout_text(layout)) == layout


@pytest.mark.parametrize(
    "text", ["E|x|L", "E(t|L", "Et*|L", "E|(t*99999999)*99999999|L", "E" + "(t*9)*9" * 9000]
)
def test_layout_strings_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_layout(text)


def layer_type(number: int) -> Inert:
    return Inert("reduce", Global("megatron.core.transformer.enums", "LayerType"), (number,))


def layer_layout(state: dict[str, object]) -> Inert:
    cls = Global(
        "megatron.core.transformer.pipeline_parallel_layer_layout", "PipelineParallelLayerLayout"
    )
    return Inert("newobj", cls, state=state)


@pytest.mark.parametrize(
    "value",
    [
        "Et|t|m|L",
        [["embedding", "decoder"], ["decoder"], ["mtp"], ["loss"]],
        [["E", "t"], ["t"], ["m"], ["L"]],
        [[layer_type(1), layer_type(4)], [layer_type(4)], [layer_type(5)], [layer_type(2)]],
        layer_layout({"input_data": "Et|t|m|L"}),
        layer_layout({"input_data": [["Embedding", "decoder "], ["decoder"], ["mtp"], ["loss"]]}),
        layer_layout(
            {
                "layout": [
                    [[layer_type(1), layer_type(4)], [layer_type(5)]],
                    [[layer_type(4)], [layer_type(2)]],
                ]
            }
        ),
    ],
)
def test_layout_arguments_are_read_without_calling_them(value: object) -> None:
    assert layout_of(value) == ("Et", "t", "m", "L")


@pytest.mark.parametrize(
    "value",
    [
        7,
        {"a": 1},
        [["encoder"]],
        [[layer_type(3)]],
        layer_layout({}),
        layer_layout({"layout": "E"}),
        ["E"],
    ],
)
def test_layout_arguments_that_are_none_are_corrupt(value: object) -> None:
    with pytest.raises(CorruptError, match="training arguments"):
        pipeline_of({"pipeline_model_parallel_layout": value})


def test_arguments_of_a_new_distribution_replace_those_of_the_old_one() -> None:
    fields: dict[str, object] = {
        "decoder_first_pipeline_num_layers": 3,
        "num_layers_in_first_pipeline_stage": 3,
        "decoder_last_pipeline_num_layers": None,
        "account_for_loss_in_pipeline_split": False,
    }
    assert changes_for(fields, Pipeline(first=3)) == {}
    assert changes_for(fields, Pipeline()) == {
        "decoder_first_pipeline_num_layers": None,
        "num_layers_in_first_pipeline_stage": None,
    }
    changed = changes_for(fields, Pipeline(layout=("Et", "tL")))
    assert changed["pipeline_model_parallel_layout"] == "Et|tL"
    assert changed["decoder_first_pipeline_num_layers"] is None
    assert changes_for(fields, Pipeline(counts_embedding=True, counts_loss=True)) == {
        "decoder_first_pipeline_num_layers": None,
        "num_layers_in_first_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    }


# --- megatron-core ---


def configurations() -> list[Options]:
    """Distributions of all kinds, those that Megatron refuses among them."""
    cases: list[Options] = []
    for n, pp, vpp in product((1, 2, 3, 4, 6, 8, 9, 12, 15), (1, 2, 3, 4), (None, 2, 3)):
        if pp == 1 and vpp is not None:
            continue
        base: Options = {
            "num_layers": n,
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": vpp,
        }
        for embedding, loss in product((False, True), repeat=2):
            more = {
                "account_for_embedding_in_pipeline_split": embedding,
                "account_for_loss_in_pipeline_split": loss,
            }
            cases.append(base | more)
        if pp > 1 and n > 2:
            for first, last in product((None, 1, 2, 3, 4, 6), repeat=2):
                if first is not None or last is not None:
                    cases.append(
                        base
                        | {
                            "num_layers_in_first_pipeline_stage": first,
                            "num_layers_in_last_pipeline_stage": last,
                        }
                    )
    return cases + layouts()


def layouts() -> list[Options]:
    """Layout strings: random cuts, empty chunks, repetitions, with and without multi-token
    prediction.
    """
    random.seed(7)
    cases: list[Options] = []
    for _ in range(300):
        n, n_mtp = random.randint(1, 9), random.choice((0, 0, 1, 2))
        pp, vpp = random.randint(1, 4), random.choice((1, 2, 3))
        if pp == 1:
            vpp = 1
        body = "t" * n
        cuts = sorted(random.choices(range(n + 1), k=pp * vpp - 1))
        parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
        parts[0] = f"E{parts[0]}"
        where = random.randint(
            max(0, max(i for i, part in enumerate(parts) if "t" in part)), len(parts) - 1
        )
        parts[where] += "m" * n_mtp
        parts[-1] += "L"
        cases.append(
            {
                "num_layers": n + (random.random() < 0.05),
                "mtp_num_layers": n_mtp or None,
                "pipeline_model_parallel_size": pp,
                "pipeline_model_parallel_layout": random.choice(
                    ("|".join(parts), layout_text(parts))
                ),
            }
        )
    return cases


def ours(options: Mapping[str, object]) -> tuple[LayerSplit, list[int]]:
    """(split, layers of multi-token prediction per chunk) of Megatron's options."""
    pp = options["pipeline_model_parallel_size"]
    vpp = options.get("virtual_pipeline_model_parallel_size") or 1
    pipeline = pipeline_of(options)
    parts = pipeline.layout or ()
    if parts:
        vpp = len(parts) // pp  # type: ignore[operator]
    split = split_layers(
        options["num_layers"],  # type: ignore[arg-type]
        pp=pp,  # type: ignore[arg-type]
        vpp=vpp,  # type: ignore[arg-type]
        pipeline=pipeline,
        n_mtp=options.get("mtp_num_layers") or 0,  # type: ignore[arg-type]
    )
    return split, [part.count("m") for part in parts]


def test_counts_and_offsets_are_those_of_megatron_core() -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    questions = configurations()
    script = Path(__file__).parents[2] / "megatron/support/megatron_stages.py"
    answers = asked(script, question=questions)
    n_equal = n_refused = n_ours = 0
    for options, answer in zip(questions, answers, strict=True):
        try:
            split, mtp = ours(options)
        except (UsageError, UnsupportedError, CorruptError):
            # Megatron compares neither the sum of the stages with the model, nor looks for negative
            # counts.
            counts = [] if isinstance(answer, str) else [count for count, _, _ in answer]
            assert sum(counts) != options["num_layers"] or min(counts) < 0, options
            n_refused += 1
            continue
        if isinstance(answer, str):  # it divides by the number of stages in the middle
            assert "ZeroDivision" in answer and options["pipeline_model_parallel_size"] == 2, (
                options,
                answer,
            )
            n_ours += 1
            continue
        splits = [
            [split.counts[v][p], split.offset(v, p)]
            for v in range(len(split.counts))
            for p in range(len(split.counts[0]))
        ]
        assert splits == [answer[:2] for answer in answer], options
        if mtp:
            assert mtp == [n for _, _, n in answer], options
        n_equal += 1
    assert n_equal > 600 and n_refused > 600 and n_ours > 10, (n_equal, n_refused, n_ours)
