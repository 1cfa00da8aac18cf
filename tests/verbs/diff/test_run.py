"""Checkpoints compared: real ones in all layouts, and made ones against torch."""

from __future__ import annotations

import math
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt_cli.app import main
from core.engine.numbers.difference import Tolerance
from core.errors import CapacityError, CheckpointingException, UnsupportedError, UsageError
from core.megatron.reshard.unshard import unshard
from core.megatron.rules.tables import load_rules
from core.opening.objects import loaded
from core.opening.open import open_checkpoint
from core.verbs.convert.run import Job, TopologyChange, run
from core.verbs.diff import tensor_pass as diff_work
from core.verbs.diff.result import Diff, TensorDiff
from core.verbs.diff.run import DiffJob, diff
from tests.support.covering import covering_cases

WEIGHTS = [
    "mcore_legacy/dense_gqa/tp1_pp1",
    "mcore_legacy/dense_gqa/tp4_pp1",
    "mcore_legacy/dense_gqa/tp1_pp2_vpp2",
    "mcore_torch_dist/dense_gqa/tp2_pp2",
    "mcore0161_torch_dist/dense_gqa/tp2_pp2_vpp2",
    "mcore0121_torch_dist/dense_gqa/tp2_pp2",
    "mcore0121_zarr/dense_gqa/tp4_pp1",
]
OPTIMIZERS = [
    "mcore_legacy/dense_gqa/tp1_pp1_optim",
    "mcore_legacy/dense_gqa/tp4_pp1_optim",
    "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt",
    "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_dpreshardable",
    "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_fullyreshardable",
    "mcore0121_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_fully_sharded_model_space",
    "mcore0121_zarr/dense_gqa/tp2_pp2_optim",
]
EXPERTS = [
    "mcore_legacy/moe_seq/tp1_pp1",
    "mcore_legacy/moe_seq/tp2_pp1_ep2_etp1",
    "mcore_legacy/moe_seq/tp1_pp2_ep2",
    "mcore_torch_dist/moe_seq/tp2_pp2_ep2",
    "mcore0121_zarr/moe_seq/tp2_pp2_ep2",
]
OTHERS = [
    ("hf/llama/safetensors_single", "hf/llama/safetensors_sharded"),
    ("hf/llama/safetensors_single", "hf/llama/bin_sharded"),
    ("hf/llama/torch_single/model_zip.pt", "hf/llama/torch_single/model_legacy.pt"),
    ("hf/qwen2_tied/safetensors_single", "hf/qwen2_tied/bin_sharded"),
    ("torch_dcp/fsdp2_dp2", "torch_dcp/fsdp2_dp4"),
    ("torch_dcp/fsdp2_dp2", "torch_dcp/tp2_fsdp2_dp2"),
    ("torch_dcp/hf_storage_dp2", "torch_dcp/hf_storage_consolidated_dp2"),
    ("deepspeed/zero1_dp2_bf16", "deepspeed_universal/zero1_dp2_bf16"),
    ("deepspeed/zero3_dp2_bf16", "deepspeed_universal/zero3_dp2_bf16"),
]


def compare(a: Path, b: Path, **options: Any) -> Diff:
    return diff(DiffJob(a=a, b=b, **options))


def kinds(result: Diff) -> dict[str, int]:
    counts: dict[str, int] = {}
    for tensor in result.tensors:
        counts[tensor.kind] = counts.get(tensor.kind, 0) + 1
    return counts


def only(result: Diff) -> TensorDiff:
    (tensor,) = [candidate for candidate in result.tensors if not candidate.is_same]
    return tensor


@pytest.mark.parametrize(
    ("case", "other"),
    covering_cases(
        (
            pytest.param(*pair)
            for pair in [
                *((group[0], other) for group in (WEIGHTS, OPTIMIZERS, EXPERTS) for other in group),
                *OTHERS,
            ]
        ),
        lambda case, other: {
            "case": case,
            "other": (other.partition("/")[0], "distopt" in other, "optim" in other),
        },
    ),
)
def test_the_same_weights_are_the_same_in_every_format_and_layout(
    golden: Path, case: str, other: str
) -> None:
    result = compare(golden / case, golden / other)
    assert set(kinds(result)) == {"equal"}
    assert result.left_out == ()
    expected = (
        "args.",
        "rng_state",
        "optimizer.param_groups",
    )  # other versions of Megatron have other ones
    assert all(entry.path.startswith(expected) for entry in result.entries), result.entries
    assert compare(golden / case, golden / other, with_entries=False).same


@pytest.mark.parametrize(
    ("case", "other"),
    [
        ("mcore_legacy/dense_gqa/tp2_pp2", "mcore_legacy/dense_gqa/tp4_pp1"),
        ("mcore_legacy/dense_gqa/tp2_pp2_optim", "mcore_torch_dist/dense_gqa/tp2_pp2_optim"),
        ("mcore_legacy/moe_seq/tp1_pp1", "mcore_torch_dist/moe_seq/tp2_pp2_ep2"),
        (
            "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt",
            "mcore_legacy/dense_gqa/tp1_pp1_dp2_distopt",
        ),
    ],
)
def test_arguments_of_the_layout_do_not_make_checkpoints_different(
    golden: Path, case: str, other: str
) -> None:
    result = compare(golden / case, golden / other)
    assert result.same
    assert result.entries == ()
    assert any(entry.path.startswith("args.") for entry in result.of_layout)
    assert result.n_entries > 100


def test_the_iteration_and_settings_count(golden: Path) -> None:
    result = compare(golden / "deepspeed/zero1_dp2_bf16", golden / "deepspeed/zero2_dp2_bf16")
    assert [entry.path for entry in result.entries] == ["ds_config.zero_optimization.stage"]
    assert not result.same


@pytest.mark.each_value
@pytest.mark.parametrize("state", ["", "optimizer.state.exp_avg_sq."])
@pytest.mark.parametrize("case", ["tp2_pp2_optim", "tp2_pp1_dp2_distopt"])
def test_one_flipped_bit_is_found_in_another_layout(
    golden: Path, tmp_path: Path, case: str, state: str
) -> None:
    key, index = f"{state}decoder.layers.2.self_attention.linear_proj.weight", (37, 41)
    copy = tmp_path / "copy"
    shutil.copytree(golden / "mcore_legacy/dense_gqa" / case, copy)
    source = open_checkpoint(copy)
    catalog = unshard(loaded(source.catalog, source.store), rules=load_rules())
    for fragment in catalog.fragments(key):
        box, array = fragment.box, fragment.array
        assert array is not None
        array = array.locate(source.store)
        if all(o <= i < e for o, i, e in zip(box.offset, index, box.end, strict=True)):
            size = array.n_bytes // math.prod(array.shape)
            at = [a + i - o for a, i, o in zip(fragment.at[-2:], index, box.offset, strict=True)]
            steps = (1,) if len(array.shape) == 1 else (array.shape[-1], 1)
            at = (
                at[-len(steps) :]
                if len(steps) == 2
                else [fragment.at[0] + index[1] - box.offset[1]]
            )
            place = array.extent.offset + size * sum(
                i * step for i, step in zip(at, steps, strict=True)
            )
            with (source.path / array.extent.file).open("r+b") as file:
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 1]))
    other = "tp1_pp1_dp2_distopt" if "distopt" in case else "tp4_pp1_optim"
    tensor = only(compare(golden / "mcore_legacy/dense_gqa" / other, copy, with_entries=False))
    assert (tensor.key, tensor.kind) == (key, "values")
    assert tensor.values is not None
    assert tensor.values.first is not None
    assert (
        tensor.values.n_elements,
        tensor.values.n_differing,
        tensor.index_of(tensor.values.first),
    ) == (
        4096,
        1,
        index,
    )


def converted(src: Path, dst: Path, to: str, **options: Any) -> Path:
    run(Job(src=src, dst=dst, to=to, fsync=False, **options))
    return dst


@pytest.mark.parametrize(
    "model", ["dense_gqa/tp2_pp2", "dense_gqa/tp1_pp2_vpp2", "moe_seq/tp2_pp1_ep2"]
)
def test_megatron_and_hugging_face_names_are_brought_together(
    golden: Path, tmp_path: Path, model: str
) -> None:
    source = golden / "mcore_legacy" / model
    hf = converted(source, tmp_path / "hf", "hf")
    for pair in ((source, hf), (hf, source)):
        result = compare(*pair)
        assert result.same
        assert set(kinds(result)) == {"equal"}
        assert any("Megatron's names" in note for note in result.notes)
    with_optimizer = golden / "mcore_legacy/dense_gqa/tp2_pp2_optim"
    if "dense_gqa" in model:
        result = compare(with_optimizer, hf)
        assert result.same
        assert any("optimizer" in note for note in result.notes)


@pytest.mark.parametrize(("rule", "kind"), [(None, "dtype"), (Tolerance(), "close")])
def test_other_dtypes_are_compared_by_value(
    golden: Path, tmp_path: Path, rule: Tolerance | None, kind: str
) -> None:
    source = golden / "hf/llama/safetensors_single"
    wide = converted(source, tmp_path / "wide", "safetensors", dtype=((None, "float32"),))
    result = compare(source, wide, rule=rule, with_entries=False)
    assert set(kinds(result)) == {kind}
    assert all(
        tensor.is_cast and tensor.values is not None and tensor.values.n_differing == 0
        for tensor in result.tensors
    )
    assert result.same == (rule is not None)
    narrow = converted(
        golden / "torch_dcp/fsdp2_dp2", tmp_path / "narrow", "dcp", dtype=((None, "bfloat16"),)
    )
    result = compare(
        golden / "torch_dcp/fsdp2_dp2", narrow, rule=rule, with_entries=False, with_optimizer=False
    )
    assert {tensor.is_cast for tensor in result.tensors} == {True}
    assert not result.same
    assert compare(
        golden / "torch_dcp/fsdp2_dp2", narrow, rule=Tolerance(2**-8), with_entries=False
    ).same


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    if path.suffix == ".pt":
        torch.save(tensors, path)
    else:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    return path


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "a": (700, 130),
        "b": (64,),
        "c": (3, 5, 7),
        "d": (),
        "e": (0, 4),
    }
    tensors = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    return tensors | {
        "half": torch.randn(90, 33, generator=generator).bfloat16(),
        "ids": torch.arange(50),
    }


Change = Callable[[torch.Tensor], torch.Tensor]
CHANGES: list[Change] = [
    lambda t: t,
    lambda t: t + 1,
    lambda t: torch.where(torch.arange(t.numel()).reshape(t.shape) == t.numel() // 2, t * 2 + 1, t),
    lambda t: (t.double() * 1.001).to(t.dtype),
    lambda t: -t,
    lambda t: torch.full_like(t, math.nan) if t.is_floating_point() else t,
]


@pytest.mark.each_value
@pytest.mark.parametrize(
    "rule", [None, Tolerance(1e-5, 1e-8), Tolerance(0.01), Tolerance(0, 1.5, False)]
)
@pytest.mark.parametrize("number", range(len(CHANGES)))
@pytest.mark.parametrize("suffixes", [(".pt", ".pt"), (".safetensors", ".pt")])
def test_every_figure_is_that_of_torch_with_everything_in_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    rule: Tolerance | None,
    suffixes: tuple[str, str],
) -> None:
    monkeypatch.setattr(diff_work, "BAND_BYTES", 1 << 15)
    first = model()
    first["a"][5, 5] = math.nan
    other = {key: CHANGES[number](tensor).reshape(tensor.shape) for key, tensor in first.items()}
    # the transposed tensor is written as a view with strides
    if suffixes[1] == ".pt":
        other["a"] = other["a"].t().contiguous().t()
    a, b = (
        saved(tmp_path / f"one{suffixes[0]}", first),
        saved(tmp_path / f"two{suffixes[1]}", other),
    )
    by_key = {t.key: t for t in compare(a, b, rule=rule).tensors}
    assert set(by_key) == set(first)
    for key, x in first.items():
        y, got = other[key], by_key[key]
        if rule is None:
            differs = bit_differences(x, y)
        else:
            differs = ~torch.isclose(
                x.double(), y.double(), rtol=rule.rtol, atol=rule.atol, equal_nan=rule.equal_nan
            )
        n = int(differs.sum())
        assert got.is_same == (n == 0), key
        is_identical = n == 0 and not bit_differences(x, y).any()
        assert (got.kind == "equal") == is_identical, key
        if got.values is None:
            assert n == 0
            continue
        values = got.values
        assert (values.n_elements, values.n_differing) == (x.numel(), n)
        delta = (x.double() - y.double()).abs().nan_to_num(0.0)
        assert values.max_abs == float(delta.max())
        if n:
            assert values.first is not None
            assert got.index_of(values.first) == tuple(differs.nonzero()[0].tolist())
            assert got.first is not None
            assert got.first[0] == pytest.approx(x[got.index_of(values.first)].item(), nan_ok=True)
        u, v = x.double().flatten(), y.double().flatten()
        finite = u.isfinite() & v.isfinite()
        norm = float(u[finite].norm() * v[finite].norm())
        if norm:
            assert values.cosine == pytest.approx(float(u[finite] @ v[finite]) / norm, abs=1e-12)
            expected = float((u - v)[finite].norm() / u[finite].norm())
            assert values.relative == pytest.approx(expected, rel=1e-9)


def bit_differences(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()]
    return x.contiguous().view(kind) != y.contiguous().view(kind)


def test_keys_shapes_and_dtypes_come_first_and_the_farthest_values_next(tmp_path: Path) -> None:
    first = {key: torch.ones(8) for key in ("gone", "shape", "dtype", "near", "far", "nan", "same")}
    other = {key: tensor.clone() for key, tensor in first.items() if key != "gone"}
    other |= {"new": torch.ones(2), "shape": torch.ones(4, 2), "dtype": torch.ones(8).half()}
    other["near"][3] += 1e-3
    other["far"][2] += 10
    other["nan"][7] = math.nan
    result = compare(saved(tmp_path / "a.pt", first), saved(tmp_path / "b.safetensors", other))
    order = [(t.key, t.kind) for t in result.tensors]
    assert order == [
        ("gone", "only_a"),
        ("new", "only_b"),
        ("shape", "shape"),
        ("dtype", "dtype"),
        ("nan", "values"),
        ("far", "values"),
        ("near", "values"),
        ("same", "equal"),
    ]
    assert result.tensors[4].values is not None
    assert result.tensors[4].values.n_nan == 1


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_tied_tensor_is_on_both_sides_under_any_of_its_names(tmp_path: Path, name: str) -> None:
    weight = torch.arange(6.0)
    torch.save({"first": weight, "second": weight}, tmp_path / "both.pt")
    torch.save({name: weight}, tmp_path / "one.pt")
    for pair in (("both.pt", "one.pt"), ("one.pt", "both.pt")):
        assert kinds(compare(*(tmp_path / path for path in pair))) == {"equal": 1}


def test_a_tensor_that_is_not_compared_vouches_for_no_other(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    torch.save({"first": weight, "second": weight, "own": weight[:2]}, tmp_path / "a.pt")
    torch.save({"second": torch.zeros(3), "own": weight[:2].clone()}, tmp_path / "b.pt")
    compared = compare(tmp_path / "a.pt", tmp_path / "b.pt", exclude=("second",))
    assert kinds(compared) == {"only_a": 1, "equal": 1}


def test_metadata_are_compared_without_a_byte_of_the_tensors(tmp_path: Path) -> None:
    first = {"w": torch.ones(100, 100), "v": torch.ones(3)}
    a, b = (
        saved(tmp_path / "a.safetensors", first),
        saved(tmp_path / "b.safetensors", first | {"w": torch.zeros(100, 100)}),
    )
    result = compare(a, b, reads=False)
    assert result.same
    assert kinds(result) == {"unread": 2}
    assert result.read_bytes == 0
    assert not compare(a, b).same


def test_a_wrong_pattern_is_told_and_right_ones_choose(tmp_path: Path) -> None:
    first = {f"layers.{n}.w": torch.full((3,), float(n)) for n in range(4)}
    other = first | {"layers.2.w": torch.zeros(3)}
    a, b = saved(tmp_path / "a.pt", first), saved(tmp_path / "b.pt", other)
    assert not compare(a, b).same
    assert compare(a, b, include=["layers.[0-1]"]).same
    assert len(compare(a, b, include=["layers.[0-1]"]).tensors) == 2
    assert compare(a, b, exclude=["*.2.w"]).same
    with pytest.raises(UsageError, match="matches 'nothing'"):
        compare(a, b, include=["nothing"])


def test_a_prefix_is_proposed_and_taken_off(tmp_path: Path) -> None:
    first = {f"layers.{n}.w": torch.full((3,), float(n)) for n in range(4)}
    a = saved(tmp_path / "a.pt", first)
    b = saved(tmp_path / "b.pt", {f"model.{key}": tensor for key, tensor in first.items()})
    result = compare(a, b)
    assert kinds(result) == {"only_a": 4, "only_b": 4}
    assert any("--strip-prefix model." in note for note in result.notes)
    assert compare(a, b, strip_prefix=["model."]).same
    deeper = saved(
        tmp_path / "c.pt", {f"model.model.{key}": tensor for key, tensor in first.items()}
    )
    assert any("--strip-prefix model." in note for note in compare(b, deeper).notes)
    assert compare(b, deeper, strip_prefix=["model."]).same
    assert compare(a, deeper, strip_prefix=["model.", "model."]).same
    with pytest.raises(UsageError, match="begins with 'x'"):
        compare(a, b, strip_prefix=["x"])


def test_tensors_inside_of_objects_are_compared(tmp_path: Path) -> None:
    for name, last in (("a", 3), ("b", 4)):
        torch.save(
            {"w": torch.ones(2), "rng": [{"state": torch.tensor([1, 2, last], dtype=torch.uint8)}]},
            tmp_path / f"{name}.pt",
        )
    result = compare(tmp_path / "a.pt", tmp_path / "b.pt")
    assert not result.same
    assert compare(tmp_path / "a.pt", tmp_path / "a.pt").same


def test_an_optimizer_that_is_not_understood_is_no_equality(golden: Path, tmp_path: Path) -> None:
    case = golden / "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt"
    broken = tmp_path / "broken"
    shutil.copytree(case, broken)
    next(broken.rglob("distrib_optim.pt")).unlink()
    result = compare(case, broken)
    assert set(kinds(result)) == {"equal"}
    assert result.entries == ()
    assert not result.same
    assert "optimizer" in result.left_out[0]
    assert compare(case, broken, with_optimizer=False).same


def test_rank_files_that_are_not_understood_are_compared_rank_by_rank(
    golden: Path, tmp_path: Path
) -> None:
    copies = [tmp_path / "one", tmp_path / "two"]
    for copy in copies:
        shutil.copytree(golden / "mcore_legacy/dense_gqa/tp2_pp1", copy)
        for path in copy.rglob("model_optim_rng.pt"):
            with zipfile.ZipFile(path) as archive:
                records = {name: archive.read(name) for name in archive.namelist()}
            with zipfile.ZipFile(path, "w") as archive:
                for name, data in records.items():
                    archive.writestr(
                        name, data.replace(b"decoder.final_layernorm.", b"decoder.other_layernorm.")
                    )
    result = compare(*copies)
    assert result.same
    assert any(tensor.key.startswith("mp_rank_01:") for tensor in result.tensors)
    assert any("rank by rank" in note for note in result.notes)
    with pytest.raises(UnsupportedError, match="only one of the two checkpoints' layouts"):
        compare(copies[0], golden / "mcore_torch_dist/dense_gqa/tp2_pp2")


def test_damage_is_an_error_and_no_difference(golden: Path, tmp_path: Path) -> None:
    source = golden / "hf/llama/safetensors_single"
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    path = next(copy.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointingException):
        compare(source, copy)


def test_memory_that_is_too_small_is_refused_beforehand(golden: Path) -> None:
    source = golden / "mcore0121_zarr/dense_gqa/tp2_pp2"
    with pytest.raises(CapacityError, match="Set --memory to at least"):
        compare(source, source, memory_bytes=1 << 20)
    assert compare(source, source, memory_bytes=200 << 20, threads=1).same


def test_a_resharded_checkpoint_is_the_same(golden: Path, tmp_path: Path) -> None:
    source = golden / "mcore_legacy/dense_gqa/tp2_pp2_optim"
    out = converted(source, tmp_path / "out", "megatron", topology=TopologyChange(tp=4, pp=1))
    result = compare(source, out)
    assert result.same, result.entries


def with_manifest(source: Path, copy: Path) -> Path:
    shutil.copytree(source, copy)
    assert main(["manifest", str(copy), "--quiet"]) == 0
    return copy


def test_what_both_manifests_call_equal_is_not_read(golden: Path, tmp_path: Path) -> None:
    a = with_manifest(golden / "mcore_legacy/dense_gqa/tp2_pp2", tmp_path / "a")
    b = with_manifest(golden / "mcore_torch_dist/dense_gqa/tp2_pp2", tmp_path / "b")
    result = compare(a, b)
    assert result.same
    assert (result.n_by_fingerprint, result.read_bytes) == (31, 0)
    read = compare(a, b, believes=False)
    assert (read.same, read.n_by_fingerprint) == (True, 0)
    assert read.read_bytes > 0
    assert compare(a, b, rule=Tolerance(equal_nan=False)).n_by_fingerprint == 0
    assert compare(golden / "mcore_legacy/dense_gqa/tp2_pp2", b).n_by_fingerprint == 0


def test_the_manifest_beside_a_tracker_is_used(golden: Path, tmp_path: Path) -> None:
    """Where ``ckpt reshard`` writes it."""
    source = golden / "mcore_legacy/dense_gqa/tp2_pp2"
    a = with_manifest(source, tmp_path / "a")
    b = converted(
        source, tmp_path / "b", "megatron", topology=TopologyChange(tp=4, pp=1), fingerprint=True
    )
    assert (b / "ckpt-manifest.json").exists()
    result = compare(a, b)
    assert (result.same, result.n_by_fingerprint, result.read_bytes) == (True, 31, 0)


def test_a_manifest_of_before_a_change_is_not_believed(golden: Path, tmp_path: Path) -> None:
    a = with_manifest(golden / "hf/llama/safetensors_single", tmp_path / "a")
    b = with_manifest(golden / "hf/llama/safetensors_sharded", tmp_path / "b")
    assert compare(a, b).n_by_fingerprint == 30
    weights = next(a.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    result = compare(a, b)
    assert only(result).kind == "values"
    assert any("newer than the manifest" in note for note in result.notes)
    (b / "ckpt-manifest.json").write_text("{}")
    assert any("is not used: " in note for note in compare(b, b).notes)


def test_a_tensor_whose_fingerprints_differ_is_read(golden: Path, tmp_path: Path) -> None:
    first = {"w": torch.arange(50.0), "v": torch.ones(3)}
    a, b = (saved(tmp_path / name, first) for name in ("a.pt", "b.safetensors"))
    changed = {**first, "w": first["w"] * 2}
    c = saved(tmp_path / "c.pt", changed)
    for path in (a, b, c):
        assert main(["manifest", str(path), "--quiet"]) == 0
    assert compare(a, b).n_by_fingerprint == 2
    result = compare(b, c)
    assert result.n_by_fingerprint == 1
    assert only(result).key == "w"
    assert only(result).values is not None


def test_an_error_says_which_of_the_checkpoints_it_is_about(golden: Path, tmp_path: Path) -> None:
    sound = golden / "hf/llama/safetensors_sharded"
    shutil.copytree(sound, tmp_path / "damaged")
    (tmp_path / "damaged" / "model-00002-of-00003.safetensors").unlink()
    for job in (DiffJob(a=sound, b=tmp_path / "damaged"), DiffJob(a=tmp_path / "damaged", b=sound)):
        with pytest.raises(CheckpointingException) as caught:
            diff(job)
        assert str(caught.value.file).startswith(str(tmp_path / "damaged"))


def test_a_wrong_iteration_names_its_side_and_no_option_of_the_other(golden: Path) -> None:
    path = golden / "mcore_legacy/dense_gqa/tp1_pp1/iter_0000010"
    with pytest.raises(UsageError, match="iteration 11 was requested, but .* iteration 10") as info:
        diff(DiffJob(a=path, b=path, iteration_b=11))
    assert "--iteration" not in str(info.value)
