"""core.megatron.reshard.to_ranks: rank files of another topology must equal those that
Megatron saved there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from core.errors import UnsupportedError
from core.files.store import LocalStore
from core.formats.megatron import format as megatron
from core.megatron.model.args import fields_of, replaced
from core.megatron.model.topology import Topology
from core.megatron.placement.expert_kind import with_expert_kind
from core.megatron.reshard.to_ranks import shard
from core.megatron.reshard.unshard import unshard
from core.pickle.equality import are_same
from core.pickle.inert import TensorLeaf, as_mapping, attributes
from core.verbs.convert.run import Job, TopologyChange, run
from tests.megatron.support.megatron_gold import (
    DENSE,
    EXPERTS,
    GROUPED,
    RULES,
    VIRTUAL,
    dist_files,
    filled,
    global_form,
    rank_files,
    stored,
    topology,
)
from tests.support.facets import ranks_of
from tests.support.materialize import write_files
from tests.support.rank_files import MODEL_FILE, assert_same_weights, load_rank_file, rank_dirs

PAIRS = [(model, a, b) for model, cases in (DENSE | EXPERTS).items() for a in cases for b in cases]
PAIRS += [("dense_gqa", a, b) for a in VIRTUAL for b in (*DENSE["dense_gqa"], *VIRTUAL)]
PAIRS += [("dense_gqa", a, b) for a in DENSE["dense_gqa"] for b in VIRTUAL]
RUN_FIELDS = {"save", "no_save_optim", "lr_decay_iters"}
"""Arguments that tell where a run saved, not what."""


def model_arrays(catalog: object) -> dict[str, object]:
    assert isinstance(catalog, dict)
    return {name: data for name, data in catalog.items() if ":model" in name}


@pytest.mark.each_value
@pytest.mark.parametrize(("model", "a", "b"), PAIRS)
def test_resharded_tensors_equal_those_that_megatron_saved(
    golden: Path, model: str, a: str, b: str
) -> None:
    store, source = global_form(golden, model, a)
    target = shard(source, topology(b), rules=RULES)
    arrays_made = model_arrays(filled(target, source, store))
    wanted_store, wanted = rank_files(golden, model, b)
    expected = model_arrays(stored(wanted, wanted_store))
    assert set(arrays_made) == set(expected)
    for name, data in expected.items():
        assert arrays_made[name].shape == data.shape  # type: ignore[attr-defined]
        assert (arrays_made[name] == data).all(), name  # type: ignore[attr-defined]


@pytest.mark.each_value
@pytest.mark.parametrize(("model", "a", "b"), PAIRS)
def test_files_have_the_entries_of_those_that_megatron_saved(
    golden: Path, model: str, a: str, b: str
) -> None:
    _, source = global_form(golden, model, a)
    target = shard(source, topology(b), rules=RULES)
    ranks, wanted = ranks_of(target), ranks_of(rank_files(golden, model, b)[1])
    assert {coords: folder for coords, (folder, _) in ranks.items()} == {
        coords: folder for coords, (folder, _) in wanted.items()
    }
    same_grid = topology(a).tp == topology(b).tp and topology(a).pp == topology(b).pp
    keeps_rng = same_grid and set(topology(b).ranks()) <= set(topology(a).ranks())
    for coords in ranks:
        ours, theirs = as_mapping(ranks[coords][1]), as_mapping(wanted[coords][1])
        assert ours is not None and theirs is not None
        assert list(ours) == [name for name in theirs if keeps_rng or name != "rng_state"]
        for name in ours:
            if str(name).startswith("model"):
                assert list(as_mapping(ours[name]) or {}) == list(as_mapping(theirs[name]) or {})
                assert are_same(attributes(ours[name]), attributes(theirs[name]))
                assert are_same(ours[name], theirs[name])
            elif name != "args" and name != "rng_state":
                assert are_same(ours[name], theirs[name]), name


@pytest.mark.each_value
@pytest.mark.parametrize(("model", "a", "b"), PAIRS)
def test_arguments_equal_those_of_megatron(golden: Path, model: str, a: str, b: str) -> None:
    _, source = global_form(golden, model, a)
    args = shard(source, topology(b), rules=RULES).args
    wanted = rank_files(golden, model, b)[1].args
    ours, theirs = fields_of(args), fields_of(wanted)
    assert list(ours) == list(theirs)
    assert [
        name for name in ours if name not in RUN_FIELDS and not are_same(ours[name], theirs[name])
    ] == []


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("family", "model", "case", "b"),
    [
        ("mcore_torch_dist", "dense_gqa", "tp2_pp2", "tp2_pp2"),
        ("mcore_torch_dist", "dense_gqa", "tp2_pp2_vpp2", "tp4_pp1"),
        ("mcore_torch_dist", "dense_gelu", "tp2_pp2", "tp1_pp2"),
        ("mcore_torch_dist", "dense_gelu", "tp1_pp1", "tp4_pp1"),
        ("mcore0161_torch_dist", "dense_gelu", "tp2_pp2", "tp1_pp1"),
        ("mcore0121_torch_dist", "dense_gqa", "tp2_pp2", "tp1_pp2"),
        ("mcore_torch_dist", "dense_gqa", "tp1_pp1", "tp2_pp2_vpp2"),
        ("mcore_torch_dist", "moe_seq", "tp1_pp1", "tp2_pp1_ep2_etp1"),
        ("mcore_torch_dist", "moe_seq", "tp2_pp2_ep2", "tp1_pp2_ep2"),
        ("mcore_torch_dist", "moe_seq", "tp2_pp2_ep2", "tp1_pp1_ep4"),
        ("mcore0121_torch_dist", "moe_seq", "tp2_pp2_ep2", "tp2_pp1"),
    ],
)
def test_torch_dist_gives_the_rank_files_that_megatron_saved(
    golden: Path, family: str, model: str, case: str, b: str
) -> None:
    store, catalog = dist_files(golden, family, model, case)
    source = unshard(catalog, rules=RULES)
    target = shard(source, topology(b), rules=RULES)
    values = model_arrays(filled(target, source, store))
    wanted_store, wanted = rank_files(golden, model, b)
    expected = model_arrays(stored(wanted, wanted_store))
    assert set(values) == set(expected)
    assert all((values[name] == data).all() for name, data in expected.items())  # type: ignore[attr-defined]
    ours, theirs = ranks_of(target), ranks_of(wanted)
    for coords in ours:
        a_root, b_root = as_mapping(ours[coords][1]) or {}, as_mapping(theirs[coords][1]) or {}
        for chunk in (name for name in b_root if str(name).startswith("model")):
            assert list(as_mapping(a_root[chunk]) or {}) == list(as_mapping(b_root[chunk]) or {})
        assert [name for name in b_root if name not in a_root] == (
            [] if "rng_state" in a_root else ["rng_state"]
        )
        assert ("rng_state" in a_root) == (
            topology(case).tp == topology(b).tp and topology(case).pp == topology(b).pp
        )


@pytest.mark.each_value
@pytest.mark.parametrize("a", GROUPED)
@pytest.mark.parametrize("b", GROUPED)
def test_grouped_experts_stay_those_that_megatron_saved(
    golden: Path, tmp_path: Path, a: str, b: str
) -> None:
    sizes = topology(b)
    run(
        Job(
            src=golden / "mcore0121_legacy" / "moe_grouped" / a,
            dst=tmp_path / "out",
            topology=TopologyChange(tp=sizes.tp, pp=sizes.pp, ep=sizes.ep),
            is_reshard=True,
            verify=True,
            fsync=False,
        )
    )
    wanted = golden / "mcore0121_legacy" / "moe_grouped" / b
    assert_same_weights(tmp_path / "out", wanted)
    for folder, path in rank_dirs(tmp_path / "out").items():
        args = load_rank_file(path / MODEL_FILE)["args"]
        assert args.moe_grouped_gemm is True, folder


@pytest.mark.each_value
@pytest.mark.parametrize("a", GROUPED)
@pytest.mark.parametrize("b", EXPERTS["moe_seq"])
def test_grouped_experts_become_the_single_ones_that_megatron_saved(
    golden: Path, a: str, b: str
) -> None:
    store, source = global_form(golden, "moe_grouped", a)
    source = with_expert_kind(source, "sequential", rules=RULES)
    target = shard(source, topology(b), rules=RULES)
    values = model_arrays(filled(target, source, store))
    wanted_store, wanted = rank_files(golden, "moe_seq", b)
    expected = model_arrays(stored(wanted, wanted_store))
    assert set(values) == set(expected)
    assert all((values[name] == data).all() for name, data in expected.items())  # type: ignore[attr-defined]
    ours, theirs = ranks_of(target), ranks_of(wanted)
    for coords in theirs:
        a_model, b_model = (
            (as_mapping(ranks[coords][1]) or {})["model"] for ranks in (ours, theirs)
        )
        assert list(as_mapping(a_model) or {}) == list(as_mapping(b_model) or {})
    assert fields_of(target.args)["moe_grouped_gemm"] is False
    assert any("the experts are converted to sequential" in note for note in target.notes)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Topology(ep=3), r"4 experts are not divisible by EP 3.*EP sizes that work: 1, 2, 4$"),
        (
            Topology(etp=2),
            r"ETP 2 does not divide TP 1, so several Megatron ranks would write the same file",
        ),
        (Topology(tp=2, ep=2, etp=4), r"ETP 4 does not divide TP 2"),
        (Topology(tp=3), r"4 attention heads are not divisible by TP 3"),
    ],
)
def test_sizes_that_experts_cannot_have_are_refused(
    golden: Path, wanted: Topology, message: str
) -> None:
    _, source = global_form(golden, "moe_seq", "tp2_pp1_ep2")
    with pytest.raises(UnsupportedError, match=message):
        shard(source, wanted, rules=RULES)


def test_random_states_stay_with_their_ranks_if_the_grid_stays(golden: Path) -> None:
    store, source = global_form(golden, "dense_gqa", "tp2_pp2_vpp2")
    target = shard(source, Topology(tp=2, pp=2), rules=RULES)
    arrays = filled(target, source, store)
    wanted_store, wanted = rank_files(golden, "dense_gqa", "tp2_pp2_vpp2")
    expected = {
        name: data for name, data in stored(wanted, wanted_store).items() if ":rng_state." in name
    }
    assert expected
    for name, data in expected.items():
        assert (arrays[name] == data).all(), name
    for folder, root in ranks_of(target).values():
        state = (as_mapping(root) or {})["rng_state"]
        assert isinstance(state, list)
        leaf = state[0]["torch_rng_state"]
        assert isinstance(leaf, TensorLeaf) and leaf.key.startswith(f"{folder}:rng_state.0.")


def test_random_states_are_left_out_with_a_note_if_the_grid_changes(golden: Path) -> None:
    _, source = global_form(golden, "dense_gqa", "tp2_pp2")
    target = shard(source, Topology(tp=4), rules=RULES)
    assert tuple(str(entry) for entry in target.dropped if entry.is_listed) == (
        "rng_state (saved with TP2 PP2, not TP4 PP1; start Megatron with --no-load-rng)",
    )
    assert not target.hidden


def test_padding_rows_move_unchanged_where_the_destination_has_as_many(golden: Path) -> None:
    store, source = global_form(golden, "dense_gqa", "tp2_pp1", target_tp=2)
    target = shard(source, Topology(tp=2, pp=2), rules=RULES)
    assert not any(tensor.flexible for tensor in target.tensors.values())
    values = filled(target, source, store)
    wanted_store, wanted = rank_files(golden, "dense_gqa", "tp2_pp2")
    expected = model_arrays(stored(wanted, wanted_store))
    assert all((values[name] == data).all() for name, data in expected.items())  # type: ignore[attr-defined]


def test_an_unknown_vocabulary_needs_a_size_or_a_word(golden: Path) -> None:
    _, catalog = rank_files(golden, "dense_gqa", "tp4_pp1")
    silent = replace(catalog, args=replaced(catalog.args, {"vocab_size": None}))
    source = unshard(silent, rules=RULES)
    assert source.tensors["output_layer.weight"].shape == (512, 64)
    assert shard(source, Topology(tp=4), rules=RULES).tensors["output_layer.weight"].shape == (
        512,
        64,
    )
    with pytest.raises(UnsupportedError, match=r"--vocab-size"):
        shard(source, Topology(tp=2), rules=RULES)
    sized = unshard(silent, rules=RULES, vocab_size=300)
    assert shard(sized, Topology(tp=2), rules=RULES).tensors["output_layer.weight"].shape == (
        384,
        64,
    )
    padded = unshard(silent, rules=RULES, keep_padded_vocab=True)
    target = shard(padded, Topology(tp=2), rules=RULES)
    assert target.tensors["output_layer.weight"].shape == (512, 64)
    assert fields_of(target.args)["padded_vocab_size"] == 512


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Topology(tp=3), r"8 attention heads are not divisible by TP 3"),
        (Topology(tp=16), r"TP sizes that work: 1, 2, 4, 8$"),
        (
            Topology(pp=3),
            r"4 layers cannot be divided evenly among 3 pipeline stages.*work: 1, 2, 4",
        ),
        (
            Topology(pp=2, vpp=4),
            r"4 layers cannot be divided evenly among 2 pipeline stages of 4 model chunks",
        ),
        (
            Topology(vpp=2),
            r"several model chunks per stage \(VPP 2\) need more than one pipeline stage",
        ),
        (Topology(ep=2), r"no experts .* expert parallel"),
        (Topology(tp=2, etp=1), r"no experts .*TP2 PP1 ETP1.*--etp-new"),
    ],
)
def test_sizes_that_do_not_work_are_refused_with_those_that_do(
    golden: Path, wanted: Topology, message: str
) -> None:
    _, source = global_form(golden, "dense_gqa", "tp2_pp1")
    with pytest.raises(UnsupportedError, match=message):
        shard(source, wanted, rules=RULES)


def test_more_tensor_ranks_than_query_groups_work(golden: Path) -> None:
    store, source = global_form(golden, "dense_gqa", "tp2_pp2")
    target = shard(source, Topology(tp=8), rules=RULES)
    assert filled(target, source, store)[
        "mp_rank_07:model.decoder.layers.0.self_attention.linear_qkv.weight"
    ].shape == (16, 64, 2)


@pytest.mark.parametrize(
    ("model", "a", "b"), [("dense_gqa", "tp2_pp2", "tp4_pp1"), ("dense_gelu", "tp1_pp1", "tp2_pp2")]
)
def test_laid_out_files_read_back(golden: Path, tmp_path: Path, model: str, a: str, b: str) -> None:
    import zlib

    store, source = global_form(golden, model, a)
    target = shard(source, topology(b), rules=RULES)
    arrays = {name: data.tobytes() for name, data in filled(target, source, store).items()}
    files = {}
    images = megatron.lay_out(target)
    for image in images:
        content = bytearray(image.size)
        for placed in image.arrays:
            content[placed.offset : placed.offset + placed.array.n_bytes] = arrays[
                placed.array.name
            ]
        for offset, data in image.literals(lambda name: zlib.crc32(arrays[name])):
            content[offset : offset + len(data)] = data
        files[image.path] = bytes(content)
    assert files["latest_checkpointed_iteration.txt"] == b"10"
    assert [image.path for image in images if image.is_metadata] == [
        "latest_checkpointed_iteration.txt"
    ]
    folder = write_files(files, tmp_path)
    read_store = LocalStore(folder / "iter_0000010")
    again = megatron.read(read_store)
    wanted_store, wanted = rank_files(golden, model, b)
    assert list(again.tensors) == list(wanted.tensors)
    ours, theirs = (
        model_arrays(stored(again, read_store)),
        model_arrays(stored(wanted, wanted_store)),
    )
    assert all((ours[name] == data).all() for name, data in theirs.items())  # type: ignore[attr-defined]
