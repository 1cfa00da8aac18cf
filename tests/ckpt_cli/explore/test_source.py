"""What ``ckpt explore`` reads of a checkpoint, without a screen."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_cli.explore.cancellation import Cancellation, Cancelled
from ckpt_cli.explore.names import Entry
from ckpt_cli.explore.source import (
    CheckpointSource,
    Placement,
    SourceOptions,
    find_key_pattern,
    open_source,
)
from core.engine.numbers.statistics import ValueStatistics
from core.errors import UsageError
from core.progress import Progress

BUFFER = "distrib_optim.0.(torch.bfloat16, torch.float32)"
RUN = "mcore_legacy/dense_gqa/tp2_pp2_optim"
OTHER = "mcore_legacy/dense_gqa/tp2_pp1_optim"
WEIGHT = "decoder.layers.0.self_attention.linear_qkv.weight"


def opened(path: Path, **options: int) -> CheckpointSource:
    return open_source(SourceOptions(path=path, **options), lambda n_files: None)  # type: ignore[arg-type]


def ignore(progress: Progress) -> None:
    pass


def entry_of(source: CheckpointSource, *labels: str) -> Entry:
    entry = Entry("module", "", (), (source.tensors,))
    for label in labels:
        entry = next(child for child in entry.children() if child.label == label)
    return entry


def test_a_tensor_is_placed_read_and_measured(golden: Path) -> None:
    source = opened(golden / RUN)
    placement = source.placement(WEIGHT)
    assert isinstance(placement, Placement)
    assert (placement.n_places, placement.n_boxes) == (2, 2)
    assert [shard.ranks for shard in placement.shards.shards] == [("tp0 pp0",), ("tp1 pp0",)]
    assert len(source.values(WEIGHT)) == 24
    statistics = source.statistics(WEIGHT, source.view.tensors[WEIGHT], Cancellation(), ignore)
    assert isinstance(statistics, ValueStatistics)
    assert statistics.n_elements == source.view.tensors[WEIGHT].n_elements


def test_an_iteration_is_chosen_as_by_inspect(golden: Path) -> None:
    assert opened(golden / RUN, iteration=10).checkpoint.iteration == 10
    with pytest.raises(UsageError):
        opened(golden / RUN, iteration=11)


@pytest.mark.parametrize(
    ("labels", "pattern"),
    [
        ((), None),
        (("decoder", "layers", "0"), "decoder.layers.0"),
        (("mp_rank_00",), "mp_rank_00"),
        (("mp_rank_00", BUFFER), f"mp_rank_00:{BUFFER}"),
    ],
)
def test_the_pattern_of_an_entry_is_spelled_like_its_keys(
    golden: Path, labels: tuple[str, ...], pattern: str | None
) -> None:
    source = opened(golden / "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt")
    assert find_key_pattern(entry_of(source, *labels)) == pattern


def test_numbered_states_have_the_names_of_their_parameters(golden: Path) -> None:
    source = opened(golden / RUN)
    state = f"optimizer.state.exp_avg.{WEIGHT}"
    assert source.view.tensors[state].shape == source.view.tensors[WEIGHT].shape
    assert source.placement(state).n_boxes == source.placement(WEIGHT).n_boxes
    assert len(source.values(state)) == 24


def test_a_module_is_compared_across_layouts(golden: Path) -> None:
    source = opened(golden / RUN)
    entry = entry_of(source, "decoder", "layers", "0")
    result = source.compare(entry, golden / OTHER, Cancellation(), ignore)
    assert result.same
    key_of = {id(tensor): key for key, tensor in source.view.tensors.items()}
    assert {tensor.key for tensor in result.tensors} == {
        key_of[id(tensor)] for tensor in entry.tensors()
    }


def test_validation_is_that_of_the_command(golden: Path) -> None:
    assert opened(golden / RUN).validate(Cancellation(), ignore).findings == ()


def test_cancelled_work_ends(golden: Path) -> None:
    source = opened(golden / RUN)
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(Cancelled):
        source.statistics(WEIGHT, source.view.tensors[WEIGHT], cancellation, ignore)
    with pytest.raises(Cancelled):
        source.compare(None, golden / OTHER, cancellation, ignore)
    with pytest.raises(Cancelled):
        source.validate(cancellation, ignore)


def test_opening_can_be_cancelled(golden: Path) -> None:
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(Cancelled):
        open_source(SourceOptions(path=golden / RUN), cancellation.check)
