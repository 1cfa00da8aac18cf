"""Whether the shards of all ranks fit together and fit the checkpoint: every violation is named, on
every rank.
"""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing._ranks.integrity import check_irregular, check_sharding
from core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from core.dist_checkpointing.validation import (
    StrictHandling,
    adjust_non_strict_load,
    determine_global_metadata,
    maybe_report_missing_and_unexpected_keys,
    parse_strict_flag,
    validate_integrity_and_strict_load,
    validate_sharded_objects_handling,
    validate_sharding_integrity,
)
from core.errors import CheckpointingException, MissingShardError, UnsupportedError, UsageError
from tests.dist_checkpointing.own_strategies import OwnCommonSave, OwnSave
from tests.dist_checkpointing.ranks import run_ranks


def _part(
    index: tuple[int, ...] = (0,),
    grid: tuple[int, ...] = (2,),
    local: tuple[int, ...] = (4,),
    *,
    key: str = "w",
    dtype: torch.dtype = torch.float32,
    flat: tuple[int, int] | None = None,
    **options: Any,
) -> ShardedTensor:
    """A shard of a grid, without data."""
    pad = (1,) * options.get("prepend_axis_num", 0)
    extents = pad + local
    return ShardedTensor(
        key,
        None,
        dtype,
        local,
        options.pop("global_shape", tuple(n * e for n, e in zip(grid, extents, strict=True))),
        tuple(i * e for i, e in zip(index, extents, strict=True)),
        options.pop("axis_fragmentations", grid),
        flattened_range=None if flat is None else slice(*flat),
        **options,
    )


def _irregular(
    offset: tuple[int, ...], local: tuple[int, ...], shape: tuple[int, ...], **options: Any
) -> Any:
    return ShardedTensor("u", None, torch.float32, local, shape, offset, None, **options)


def _object(index: int = 0, n: int = 2, **options: Any) -> ShardedObject:
    return ShardedObject(options.pop("key", "rng"), None, (n,), (index,), **options)


A, B = _part((0,)), _part((1,))
FITTING: dict[str, list[list[Any]]] = {
    "one rank holds all": [[A, B]],
    "two ranks": [[A], [B]],
    "lists for tuples": [
        [A],
        [replace(B, axis_fragmentations=[2], local_shape=[4], global_shape=[8], global_offset=[4])],
    ],
    "replicas": [[A], [B], [replace(A, replica_id=1)], [replace(B, replica_id=(0, 1))]],
    "main replica by tuple": [[replace(A, replica_id=(0, 0))], [B]],
    "2-d grid": [[_part((i, j), (2, 3), (4, 2)) for j in range(3)] for i in range(2)],
    "prepended axis": [[_part((i, 0), (2, 1), (3,), prepend_axis_num=1)] for i in range(2)],
    "scalar": [[_part((), (), ())], [_part((), (), (), replica_id=1)]],
    "empty tensor": [[_part((0,), (1,), (0,))], [_part((0,), (1,), (0,), replica_id=1)]],
    "padded": [
        [_part((i,), (2,), (4,), global_shape=(7,), allow_shape_mismatch=True)] for i in range(2)
    ],
    "flattened": [
        [_part((0,), flat=(0, 3))],
        [_part((0,), flat=(3, 4))],
        [_part((1,), flat=(0, 4))],
    ],
    "flattened with replicas": [
        [_part((0,), (1,), flat=(0, 3)), _part((0,), (1,), flat=(1, 3), replica_id=1)],
        [_part((0,), (1,), flat=(3, 4))],
    ],
    "flattened with an empty range": [
        [_part((0,), (1,), flat=(0, 4))],
        [_part((0,), (1,), flat=(4, 4))],
    ],
    "objects": [[_object(0)], [_object(1)], [_object(1, replica_id=1)]],
    "irregular": [[_irregular((0,), (3,), (5,))], [_irregular((3,), (2,), (5,))]],
    "nothing": [[], []],
}
FAULTY: dict[str, tuple[list[list[Any]], str]] = {
    "two main replicas": (
        [[A], [B], [A]],
        r"shape \(4,\) at \(0,\) has 2 main replicas, on ranks 0, 2",
    ),
    "two main replicas on one rank": ([[A, B, B]], r"2 main replicas, on ranks 0"),
    "no shard": (
        [[A], []],
        r"no main replica holds shard \(1,\) of the grid of \(2,\) shards.*no rank holds a copy",
    ),
    "only copies": (
        [[A], [replace(B, replica_id=1)], [replace(B, replica_id=2)]],
        r"ranks 1, 2 hold copies with.* 1, 2",
    ),
    "no main replica at all": ([[replace(A, replica_id=1)]], r"no main replica holds shard \(0,\)"),
    "a hole in a 2-d grid": (
        [[_part((i, j), (2, 3), (4, 2)) for j in range(3) if (i, j) != (1, 1)] for i in range(2)],
        r"shard \(1, 1\) of the grid of \(2, 3\) shards \(1 of 6 missing\)",
    ),
    "dtypes": (
        [[A], [_part((1,), dtype=torch.bfloat16)]],
        r"dtype: torch.float32 on rank 0, but torch.bfloat16 on rank 1",
    ),
    "global shapes": (
        [[A], [_part((1,), (3,))]],
        r"global shape: \(8,\) on rank 0, but \(12,\) on rank 1",
    ),
    "local shapes": (
        [[_part((0,), (2,), (4,))], [_part((2,), (2,), (2,), global_shape=(8,))]],
        r"local shape: \(4,\) on rank 0, but \(2,\) on rank 1",
    ),
    "regular and irregular": (
        [[A], [replace(B, axis_fragmentations=None)]],
        r"regular grid .* on rank 0, but None on rank 1",
    ),
    "grids": (
        [[A], [replace(B, axis_fragmentations=(4,))]],
        r"regular grid .*\(2,\) on rank 0, but \(4,\) on rank 1",
    ),
    "flattened and not": (
        [[A], [_part((1,), flat=(0, 4))]],
        "use of flattened_range: False on rank 0, but True on rank 1",
    ),
    "flattened: a gap": (
        [[_part((0,), (1,), flat=(0, 1))], [_part((0,), (1,), flat=(2, 4))]],
        (
            r"no main replica holds elements 1–2 of the flattened shard of shape \(4,\) at \(0,\), "
            r"which has 4 elements"
        ),
    ),
    "flattened: the end is missing": ([[_part((0,), (1,), flat=(0, 3))]], "elements 3–4"),
    "flattened: the start is missing": ([[_part((0,), (1,), flat=(1, 4))]], "elements 0–1"),
    "flattened: overlap": (
        [[_part((0,), (1,), flat=(0, 3))], [_part((0,), (1,), flat=(2, 4))]],
        "ranks 0 and 1 both hold elements 2–3",
    ),
    "flattened: twice": (
        [[_part((0,), (1,), flat=(0, 4))], [_part((0,), (1,), flat=(0, 4))]],
        "ranks 0 and 1",
    ),
    "flattened: a shard is missing": (
        [[_part((0,), flat=(0, 4))]],
        r"no main replica holds shard \(1,\)",
    ),
    "an object twice": (
        [[_object(0)], [_object(1), _object(0)]],
        r"2 main replicas, on ranks 0, 1 \(tensor rng/shard_0_2",
    ),
    "an object is missing": (
        [[_object(1)], [_object(0, replica_id=1)]],
        "holds 1 of the object.s 2 shards; the shards with a main replica are: shard_1_2",
    ),
    "object shapes": (
        [[_object(0, 2)], [_object(1, 3)]],
        r"global shape: \(2,\) on rank 0, but \(3,\) on rank 1",
    ),
    "tensor and object": (
        [[A], [_object(key="w")]],
        "a ShardedTensor on rank 0, but to a ShardedObject on rank 1",
    ),
    "outside the grid": ([[A], [_part((2,), (2,))]], r"shard \(2,\) is outside the grid of \(2,\)"),
    "shape and grid": (
        [[_part((i,), (2,), (3,), global_shape=(8,))] for i in range(2)],
        (
            r"a grid of \(2,\) shards of shape \(3,\) has shape \(6,\), but the global shape is "
            r"\(8,\)"
        ),
    ),
}


@pytest.mark.parametrize("case", FITTING)
def test_shards_that_fit_pass(case):
    _check(FITTING[case])


@pytest.mark.parametrize("case", FAULTY)
def test_shards_that_do_not_fit_are_named_with_key_shard_and_ranks(case):
    metadata, message = FAULTY[case]
    with pytest.raises(UsageError, match=message) as caught:
        validate_sharding_integrity(metadata)
    assert caught.value.key.split("/")[0] == metadata[0][0].key and isinstance(
        caught.value, CheckpointingException
    )


def test_a_violation_of_a_later_key_is_found_among_many_that_fit():
    fitting = [_part((i,), (4,), key=f"k{n}") for n in range(50) for i in range(4)]
    with pytest.raises(UsageError, match="2 main replicas"):
        validate_sharding_integrity([fitting, [A, B], [B]])


IRREGULAR = {
    "overlap": (
        [[_irregular((0,), (3,), (5,))], [_irregular((2,), (3,), (5,))]],
        r"shape \(3,\) at \(0,\) on rank 0, and the shard of shape \(3,\) at \(2,\) on rank 1",
    ),
    "hole": (
        [[_irregular((0,), (3,), (5,))], [_irregular((4,), (1,), (5,))]],
        r"holds 1 of the 5 elements; the first gap has shape \(1,\) at \(3,\)",
    ),
    "twice": ([[_irregular((0,), (5,), (5,))], [_irregular((0,), (5,), (5,))]], "2 main replicas"),
    "outside": (
        [[_irregular((3,), (3,), (5,))]],
        r"at \(3,\) extends beyond the global shape \(5,\)",
    ),
    "flattened": (
        [[_irregular((0,), (4,), (4,), flattened_range=slice(0, 3))]],
        r"elements 3–4 of the flattened shard",
    ),
}


def _check(metadata: list[list[Any]]) -> None:
    check_sharding(metadata)
    check_irregular(metadata)


@pytest.mark.parametrize("case", IRREGULAR)
def test_shards_without_a_grid_have_to_tile_the_tensor_that_is_saved(case):
    metadata, message = IRREGULAR[case]
    with pytest.raises(UsageError, match=message):
        _check(metadata)


def test_shards_without_a_grid_may_be_loaded_in_part():
    validate_sharding_integrity(IRREGULAR["hole"][0])


def test_a_factory_that_was_not_applied_is_refused():
    factory = ShardedTensorFactory("w", torch.zeros(2), lambda *_: {}, lambda x: x)
    with pytest.raises(UsageError, match="apply factories before"):
        validate_sharding_integrity([[factory]])


def test_many_shards_are_checked_and_a_single_wrong_one_is_found():
    grid = (200, 100)
    shards = [_part((i, j), grid, (1, 1)) for i in range(grid[0]) for j in range(grid[1])]
    random.Random(1).shuffle(shards)
    ranks = [shards[i::8] for i in range(8)]
    validate_sharding_integrity(ranks)
    lost = ranks[3].pop()
    with pytest.raises(
        UsageError, match=rf"shard \({lost.global_offset[0]}, {lost.global_offset[1]}\) of the grid"
    ):
        validate_sharding_integrity(ranks)


def test_a_huge_grid_with_few_shards_is_no_work():
    with pytest.raises(UsageError, match="no main replica holds shard"):
        validate_sharding_integrity([[_part((7, 7), (10**6, 10**6), (1, 1))]])


def test_strict_flags_are_parsed_and_others_refused():
    assert parse_strict_flag("log_all") is StrictHandling.LOG_ALL
    assert parse_strict_flag(StrictHandling.RAISE_ALL) is StrictHandling.RAISE_ALL
    for wrong in ("strict", "", None, True, [1]):
        with pytest.raises(ValueError, match="assume_ok_unexpected, log_unexpected"):
            parse_strict_flag(wrong)


def test_strict_flags_say_what_they_need():
    flags = StrictHandling
    assert {f.value for f in flags if not flags.requires_explicit_ckpt_mismatch_check(f)} == {
        "assume_ok_unexpected"
    }
    exchanging = {"ignore_all", "raise_all", "return_all", "log_all"}
    assert {f.value for f in flags if flags.requires_global_app_metadata(f)} == exchanging
    assert {f.value for f in flags if flags.requires_returning_mismatch_keys(f)} == {
        "return_unexpected",
        "return_all",
    }


STORED = {
    "w": A,
    "more": replace(A, key="more"),
    "rng/shard_0_2": _object(0),
    "rng/shard_1_2": _object(1),
}
REQUESTED = {"a": [A, {"new": replace(A, key="new")}], "state": _object(0)}


@pytest.mark.parametrize(
    ("strict", "missing", "unexpected"),
    [
        ("log_unexpected", set(), {"new"}),
        ("log_all", {"more"}, {"new"}),
        ("return_unexpected", set(), {"new"}),
        ("return_all", {"more"}, {"new"}),
        ("ignore_all", set(), set()),
    ],
)
def test_unexpected_keys_are_left_out_and_reported_as_the_flag_says(
    caplog, strict, missing, unexpected
):
    with caplog.at_level(logging.WARNING):
        result = validate_integrity_and_strict_load(
            REQUESTED,
            StrictHandling(strict),
            False,
            global_metadata=[[A, _object(0), replace(A, key="new")]],
            ckpt_sharded_metadata=STORED,
        )
    assert result == ({"a": [A], "state": _object(0)}, missing, unexpected)
    assert ("new" in caplog.text) == strict.startswith("log") and ("more" in caplog.text) == (
        strict == "log_all"
    )


@pytest.mark.parametrize(
    ("strict", "named"), [("raise_unexpected", ["new"]), ("raise_all", ["new", "more"])]
)
def test_raising_flags_name_the_keys(strict, named):
    with pytest.raises(MissingShardError) as caught:
        validate_integrity_and_strict_load(
            REQUESTED, StrictHandling(strict), False, None, [[A]], ckpt_sharded_metadata=STORED
        )
    assert all(name in str(caught.value) for name in named) and ("more" in str(caught.value)) == (
        "more" in named
    )


def test_nothing_is_compared_by_default():
    result = validate_integrity_and_strict_load(
        REQUESTED, StrictHandling.ASSUME_OK_UNEXPECTED, False
    )
    assert result == (REQUESTED, set(), set())


def test_what_a_check_needs_has_to_be_given():
    with pytest.raises(UsageError, match="ckpt_sharded_metadata"):
        validate_integrity_and_strict_load({}, StrictHandling.LOG_ALL, False)
    with pytest.raises(UsageError, match="global_metadata"):
        validate_integrity_and_strict_load({}, StrictHandling.ASSUME_OK_UNEXPECTED, True)
    with pytest.raises(UsageError, match="found a int"):
        adjust_non_strict_load({"a": 3}, {"w"})


def test_many_keys_are_counted_not_listed(caplog):
    keys = {f"k{n:03d}" for n in range(100)}
    with pytest.raises(MissingShardError, match="k019 and 80 more"):
        maybe_report_missing_and_unexpected_keys(keys, set())
    maybe_report_missing_and_unexpected_keys(set(), keys, raise_error=False)
    assert "and 80 more" in caplog.text
    caplog.clear()
    maybe_report_missing_and_unexpected_keys(set(), set())
    assert not caplog.text


def test_objects_need_a_strategy_that_handles_them():
    validate_sharded_objects_handling(OwnSave(), OwnCommonSave())
    with pytest.raises(UnsupportedError, match=r"neither OwnSave\(own, 3\) nor OwnSave"):
        validate_sharded_objects_handling(OwnSave(), OwnSave())


class _Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _on_ranks(rank: int, world: int) -> dict[str, Any]:
    """Everything of several ranks in one start."""
    outcomes: dict[str, Any] = {}

    def attempt(name: str, work: Any) -> None:
        try:
            outcomes[name] = work()
        except CheckpointingException as err:
            outcomes[name] = f"{type(err).__name__}: {err}"

    local = ShardedTensor.from_rank_offsets("w", torch.ones(4) * rank, (0, rank, world))
    own_leaves, everyone = determine_global_metadata(
        {"a": [local], "o": ShardedObject("o", {1}, (world,), (rank,))}
    )
    outcomes["metadata"] = [
        [(leaf.key, leaf.data, leaf.global_offset) for leaf in leaves] for leaves in everyone
    ]
    assert [leaf.key for leaf in own_leaves] == ["w", "o"] and local.data is not None
    attempt("fitting", lambda: validate_sharding_integrity(everyone))
    doubled = [*everyone, everyone[0]]
    attempt("doubled", lambda: validate_sharding_integrity(doubled))

    def strict(flag: str, requested: set[str]) -> Any:
        wanted = {key: replace(local, key=key, data=None) for key in sorted(requested)}
        own, everyones = determine_global_metadata(wanted)
        stored = {key: replace(A, key=key) for key in ("a", "b", "c")}
        checked, missing, unexpected = validate_integrity_and_strict_load(
            wanted, StrictHandling(flag), False, own, everyones, stored
        )
        return sorted(checked), missing, unexpected

    mine_only = {"a"} if rank else {"b", f"new{rank}"}
    for flag in ("return_all", "return_unexpected", "raise_unexpected", "raise_all"):
        attempt(flag, lambda flag=flag: strict(flag, mine_only))

    logged = _Logged()
    logging.getLogger("core.dist_checkpointing.validation").addHandler(logged)
    common = {"step": 3, "t": torch.arange(3), "args": {"lr": 0.1}}
    validate_sharding_integrity(everyone, common)
    outcomes["equal"] = list(logged.texts)
    common = (
        common | {"step": rank, "t": torch.arange(3) + rank} | ({"more": 1} if rank == 1 else {})
    )
    validate_sharding_integrity(everyone, common)
    outcomes["unequal"] = list(logged.texts)
    attempt(
        "unpickled",
        lambda: validate_sharding_integrity(everyone, {"f": (lambda: 0) if rank == 0 else 1}),
    )
    comm.barrier()
    return outcomes


@pytest.mark.dist
def test_several_ranks_agree_on_what_is_wrong():
    first, second, third = outcomes = run_ranks(3, _on_ranks)
    by_rank = [[("w", None, (4 * rank,)), ("o", None, (rank,))] for rank in range(3)]
    assert all(
        outcome["metadata"] == by_rank and outcome["fitting"] is None for outcome in outcomes
    )
    assert (
        len({outcome["doubled"] for outcome in outcomes}) == 1
        and "on ranks 0, 3" in first["doubled"]
    )
    assert first["return_all"] == (["b"], {"c"}, {"new0"}) and second["return_all"] == (
        ["a"],
        {"c"},
        set(),
    )
    assert first["return_unexpected"] == (["b"], set(), {"new0"}) and third[
        "return_unexpected"
    ] == (
        ["a"],
        set(),
        set(),
    )
    assert (
        first["raise_unexpected"].startswith("MissingShardError: ")
        and "new0" in first["raise_unexpected"]
    )
    assert (
        second["raise_unexpected"].startswith("MissingShardError: rank 0 failed")
        and "new0" in second["raise_unexpected"]
    )
    assert all("not requested by any rank): c" in outcome["raise_all"] for outcome in outcomes)
    assert all(
        outcome["equal"] == [] and "cannot be pickled" in outcome["unpickled"]
        for outcome in outcomes
    )
    assert first["unequal"] == [] and len(second["unequal"]) == len(third["unequal"]) == 1
    assert second["unequal"][0].startswith(
        "Rank 1 common state dict differs from rank 0 common state dict. "
        "Keys only on rank 0: [], Keys only on 1: [('more',)], Mismatched keys: [(('step',), "
    )
    assert (
        "('t',)" in third["unequal"][0]
        and "more" not in third["unequal"][0]
        and "lr" not in third["unequal"][0]
    )


def _verdicts_of_megatron(
    rank: int, world: int, metadata: dict[str, list[list[Any]]]
) -> dict[str, bool]:
    """Case → whether megatron-core accepts it."""
    import warnings

    warnings.simplefilter("ignore")
    from megatron.core.dist_checkpointing import mapping, validation

    def theirs(leaf: Any) -> Any:
        fields = dict(vars(leaf))
        if isinstance(leaf, ShardedObject):
            return mapping.ShardedObject(**fields)
        return mapping.ShardedTensor(**fields)

    verdicts = {}
    for case, ranks in metadata.items():
        try:
            validation.validate_sharding_integrity(
                [[theirs(leaf) for leaf in leaves] for leaves in ranks]
            )
            verdicts[case] = True
        except (AssertionError, AttributeError, IndexError, validation.CheckpointingException):
            verdicts[case] = False
    return verdicts


@pytest.mark.dist
def test_megatron_core_comes_to_the_same_verdicts():
    pytest.importorskip("megatron.core")
    cases = FITTING | {case: metadata for case, (metadata, _) in FAULTY.items()}
    plain = {
        case: ranks
        for case, ranks in cases.items()
        if "flattened" not in case and case not in ("padded", "empty tensor", "lists for tuples")
    }
    (verdicts,) = run_ranks(1, _verdicts_of_megatron, plain)
    ours = {case: case in FITTING for case in plain}
    stricter = {
        "shape and grid",
        "grids",
        "object shapes",
    }  # these it only finds, if at all, while it writes or reads
    assert {case for case in plain if verdicts[case] != ours[case]} <= stricter
