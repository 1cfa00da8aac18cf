"""core.verbs.merge end to end: results equal torch's own computation bit for bit, in any layout and
format, and what cannot be merged is refused by name before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.engine.team.protocol import Team
from core.errors import CheckpointingException, CorruptError, UnsupportedError, UsageError
from core.progress import bytes_only
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from core.verbs.convert.workers.run import run_shared
from core.verbs.merge.request import Merge
from tests.megatron.support.rewritten import rewritten
from tests.support.rank_files import assert_same_bits
from tests.support.teams import run_team
from tests.verbs.convert.workers.test_run import FINE, tree

Tensors = dict[str, torch.Tensor]
DENSE = "mcore_legacy/dense_gqa"


def models(tmp_path: Path, n: int = 3, **more: torch.Tensor) -> list[Path]:
    """Directories with random tensors of several dtypes, and some that all have."""
    paths = []
    for seed in range(n):
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            "wide": torch.randn(70, 301, generator=generator),
            "half": torch.randn(33, 65, generator=generator).half(),
            "weight": torch.randn(3, 40, 77, generator=generator).bfloat16(),
            "double": torch.randn(9, generator=generator, dtype=torch.float64),
            "empty": torch.zeros(0, 4),
            "scalar": torch.randn((), generator=generator),
            "positions": torch.arange(12),
            **more,
        }
        path = tmp_path / f"model{seed}"
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        paths.append(path)
    return paths


def tensors_of(path: Path) -> Tensors:
    """All tensors of a directory of safetensors files."""
    return {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}


def merge(paths: Sequence[Path], dst: Path, method: str, **options: Any) -> Path:
    """Merges and returns the destination."""
    request = {
        name: options.pop(name) for name in ("weights", "amount", "keeps_first") if name in options
    }
    job = Job(
        src=paths[0],
        dst=dst,
        merge=Merge(method=method, others=tuple(paths[1:]), **request),
        fsync=False,
        **options,
    )
    run(job)
    return dst


def assert_computed(
    result: Path, sources: Sequence[Path], compute: Callable[..., torch.Tensor]
) -> None:
    """Every float tensor is what torch computes in float32 (float64), and the rest the first's."""
    merged, loaded = tensors_of(result), [tensors_of(path) for path in sources]
    assert merged.keys() == loaded[0].keys()
    for name, tensor in loaded[0].items():
        wanted = tensor
        if tensor.is_floating_point():
            kind = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            parts = [source[name].to(kind) for source in loaded]
            wanted = compute(*parts).to(tensor.dtype)
        assert_same_bits(merged[name], wanted, name)


def moving(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Torch's own exponential moving average."""
    mean = a.clone()
    for new in (b, c):
        mean.mul_(0.9).add_(new * (1 - 0.9))
    return mean


def slerp(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Spherical interpolation at 0.3, with the angle in float64."""
    x, y = a.double().reshape(-1), b.double().reshape(-1)
    cosine = (x @ y) / (x.norm() * y.norm())
    if not abs(cosine) <= 0.9995:
        return 0.7 * a + 0.3 * b
    angle = torch.acos(cosine)
    return (torch.sin(0.7 * angle) / torch.sin(angle)).item() * a + (
        torch.sin(0.3 * angle) / torch.sin(angle)
    ).item() * b


METHODS: dict[str, tuple[dict[str, Any], Callable[..., torch.Tensor]]] = {
    "average": ({}, lambda a, b, c: (a + b + c) / 3),
    "weights": ({"weights": (0.5, 0.3, 0.2)}, lambda a, b, c: 0.5 * a + 0.3 * b + 0.2 * c),
    "ema": ({"amount": 0.9}, moving),
    "slerp": ({"amount": 0.3}, slerp),
    "delta": ({}, lambda a, b: a - b),
    "add-delta": ({"amount": 0.7}, lambda a, b, c: a + 0.7 * b + 0.7 * c),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_equals_torch_bit_for_bit(method: str, tmp_path: Path) -> None:
    options, compute = METHODS[method]
    sources = models(tmp_path, 2 if method in ("slerp", "delta") else 3)
    result = merge(sources, tmp_path / "out", method, **options, verify=True)
    assert_computed(result, sources, compute)


def test_a_delta_in_float32_restores_the_tuned_model(tmp_path: Path) -> None:
    tuned, base = sources = models(tmp_path, 2)
    delta = merge(sources, tmp_path / "delta", "delta", dtype=((None, "float32"),))
    assert {tensor.dtype for name, tensor in tensors_of(delta).items() if name == "weight"} == {
        torch.float32
    }
    again = tensors_of(merge([base, delta], tmp_path / "again", "add-delta", amount=1.0))
    wanted = tensors_of(tuned)
    assert_same_bits(again["weight"], wanted["weight"], "weight")
    assert_same_bits(again["half"], wanted["half"], "half")


def changed(tensor: torch.Tensor) -> torch.Tensor:
    """Another value for every element of a float tensor, of its own value alone."""
    return (tensor.float() * 1.25 + 0.03125).to(tensor.dtype)


@pytest.fixture(scope="module")
def other_run(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank files of TP 4 with other weights than the golden checkpoints of the same model."""
    return rewritten(
        golden / DENSE / "tp4_pp1_optim",
        tmp_path_factory.mktemp("run") / "tp4",
        lambda folder, name, value: (
            changed(value)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
        ),
    )


def assert_average_of_run(result: Path, golden: Path) -> None:
    """Every global weight is the mean of the golden one and of the changed one."""
    wanted = load_file(golden / "oracle/dense_gqa/global.safetensors")
    merged = tensors_of(result)
    assert len(merged) == len(wanted)
    for name, tensor in wanted.items():
        short = name.replace(
            "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"
        )
        short = short.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
        mean = (tensor.float() + changed(tensor).float()) / 2
        # torch_dist keeps padding rows, which are zero.
        rows = merged[name if name in merged else short]
        assert not rows[len(tensor) :].any()
        assert_same_bits(rows[: len(tensor)], mean.to(tensor.dtype), name)


@pytest.mark.parametrize(
    "first",
    [f"{DENSE}/tp2_pp2_optim", "mcore0161_torch_dist/dense_gqa/tp2_pp2"],
    ids=["rank files", "torch_dist"],
)
def test_megatron_checkpoints_of_different_layouts_are_averaged(
    first: str, golden: Path, other_run: Path, tmp_path: Path
) -> None:
    out = merge([golden / first, other_run], tmp_path / "out", "average", verify=True)
    flat = tmp_path / "flat"
    stacked = () if "torch_dist" in first else None
    run(Job(src=out, dst=flat, to="safetensors", unstack_layers=stacked, fsync=False))
    assert_average_of_run(flat, golden)


def test_the_optimizer_is_dropped_and_the_notes_say_what_comes_from_the_first(
    golden: Path, other_run: Path, tmp_path: Path
) -> None:
    first = golden / DENSE / "tp2_pp2_optim"
    job = Job(
        src=first,
        dst=tmp_path / "out",
        to="safetensors",
        merge=Merge(method="average", others=(other_run,)),
    )
    report = run(job)
    assert_average_of_run(report_dir := Path(report.dst), golden)
    assert report_dir.is_dir()
    assert any(line.startswith("optimizer") for line in report.dropped)
    assert any("come from" in note and str(first) in note for note in report.notes)


def tiny_llama(path: Path, seed: int, **config: Any) -> Path:
    """A tiny model that transformers has saved."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "dtype": "bfloat16",
        **config,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def test_transformers_models_become_megatron_rank_files_and_back(tmp_path: Path) -> None:
    sources = [tiny_llama(tmp_path / name, seed) for seed, name in enumerate("ab")]
    ranks = merge(
        sources,
        tmp_path / "ranks",
        "average",
        to="megatron",
        topology=TopologyChange(tp=2, pp=2),
        verify=True,
    )
    run(Job(src=ranks, dst=tmp_path / "back", to="hf", fsync=False))
    assert_computed(tmp_path / "back", sources, lambda a, b: (a + b) / 2)

    # A Megatron run and a Hugging Face model are mixed too, whichever comes first.
    for paths in ([ranks, sources[0]], [sources[0], ranks]):
        mixed = merge(paths, tmp_path / f"mixed-{paths[0].name}", "average", to="hf")
        means = {
            name: ((a + b) / 2).to(torch.bfloat16)
            for name, a in tensors_of(sources[0]).items()
            for b in [tensors_of(tmp_path / "back")[name].float()]
        }
        merged = tensors_of(mixed)
        for name, mean in means.items():
            assert_same_bits(merged[name], mean, name)


def test_the_model_and_its_tokenizer_are_opened_by_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sources = [tiny_llama(tmp_path / name, seed) for seed, name in enumerate("ab")]
    (sources[0] / "tokenizer_config.json").write_text('{"first": true}')
    out = merge(sources, tmp_path / "out", "slerp", amount=0.5)
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"first": True}
    model = transformers.LlamaForCausalLM.from_pretrained(out)
    merged = tensors_of(out)
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, merged[name], name)


def test_sources_of_several_formats_are_mixed(tmp_path: Path) -> None:
    sources = models(tmp_path)
    forms = [sources[0]]
    for source, form in zip(sources[1:], ("dcp", "zarr3"), strict=True):
        forms.append(source.parent / f"{source.name}.{form}")
        run(Job(src=source, dst=forms[-1], to=form, fsync=False))
    assert_computed(merge(forms, tmp_path / "out", "average"), sources, METHODS["average"][1])
    single = tmp_path / "single.pt"
    torch.save(tensors_of(sources[1]), single)
    merge([single, sources[0]], tmp_path / "two.pt", "delta", to="torch")
    merged = torch.load(tmp_path / "two.pt", weights_only=True)
    wanted = tensors_of(sources[1])["wide"] - tensors_of(sources[0])["wide"]
    assert_same_bits(merged["wide"], wanted, "wide")


@pytest.mark.parametrize("path", ["ocdbt_zarr2", "ocdbt_zarr2_raw", "ocdbt_zarr3"])
def test_values_inside_the_nodes_of_another_database_are_merged(
    path: str, golden: Path, tmp_path: Path
) -> None:
    # The same values, which no database holds.
    models = [tmp_path / "first", tmp_path / "values"]
    run(Job(src=golden / "orbax/plain_zarr2", dst=models[1], to="safetensors", fsync=False))
    models[0].mkdir()
    first = {
        key: changed(value) if value.is_floating_point() else value
        for key, value in tensors_of(models[1]).items()
    }
    save_file(first, models[0] / "model.safetensors")
    sources = [models[0], golden / "orbax" / path]
    out = merge(sources, tmp_path / "out", "average", keeps_first=True)
    assert_computed(out, models, lambda a, b: (a + b) / 2)


def _convert(team: Team, job: Job) -> int:
    """One worker of a merge."""
    return run_shared(job, team, sizes=FINE).bytes_verified


def test_several_workers_write_the_bytes_of_one(
    golden: Path, other_run: Path, tmp_path: Path
) -> None:
    first = golden / DENSE / "tp2_pp2"
    alone = merge([first, other_run], tmp_path / "alone", "slerp", amount=0.4)
    job = Job(
        src=first,
        dst=tmp_path / "shared",
        merge=Merge(method="slerp", others=(other_run,), amount=0.4),
        is_reshard=True,
        verify=True,
        fsync=False,
    )
    run_team(2, _convert, job)
    assert tree(alone) == tree(tmp_path / "shared")


def test_an_interrupted_merge_is_continued_to_the_same_bytes(tmp_path: Path) -> None:
    sources = models(tmp_path, big=torch.randn(700, 3000))
    uninterrupted = merge(sources, tmp_path / "whole", "average")

    class Interruption(Exception):
        pass

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise Interruption

    job = Job(
        src=sources[0],
        dst=tmp_path / "out",
        merge=Merge(method="average", others=tuple(sources[1:])),
        is_reshard=True,
        resume=True,
    )
    with pytest.raises(Interruption):
        run(job, progress=bytes_only(interrupt))
    assert not (tmp_path / "out").exists()
    run(job)
    assert tree(uninterrupted) == tree(tmp_path / "out")


def test_integers_that_differ_are_refused_or_taken_from_the_first(tmp_path: Path) -> None:
    sources = models(tmp_path, 2)
    tensors = tensors_of(sources[1])
    save_file({**tensors, "positions": tensors["positions"] + 1}, sources[1] / "model.safetensors")
    with pytest.raises(UnsupportedError, match="positions of") as failure:
        merge(sources, tmp_path / "out", "average")
    assert "--keep-first" in str(failure.value.hint)
    assert not (tmp_path / "out").exists()
    out = merge(sources, tmp_path / "out", "average", keeps_first=True)
    assert torch.equal(tensors_of(out)["positions"], tensors["positions"])


def test_objects_that_differ_are_refused_or_taken_from_the_first(tmp_path: Path) -> None:
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for step, path in enumerate(paths):
        state = {"model": {"w": torch.full((3,), float(step))}, "epoch": step, "name": "x"}
        torch.save(state, path)
    with pytest.raises(UnsupportedError, match="epoch of"):
        merge(paths, tmp_path / "out.pt", "average")
    out = merge(paths, tmp_path / "out.pt", "average", keeps_first=True)
    loaded = torch.load(out, weights_only=True)
    assert (loaded["epoch"], loaded["name"]) == (0, "x")
    assert loaded["model"]["w"].tolist() == [0.5] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("half"), "model0 has 1 tensor that .*model1 lacks.*half"),
        (
            lambda tensors: tensors.update(new=torch.ones(2)),
            "model1 has 1 tensor that .*model0 lacks.*new",
        ),
        (
            lambda tensors: tensors.update(half=torch.ones(2).half()),
            r"shapes differ between .*half is \(33, 65\) and \(2,\)",
        ),
        (
            lambda tensors: tensors.update(wide=torch.ones(70, 301, dtype=torch.complex64)),
            "complex64 tensors cannot be merged",
        ),
    ],
    ids=["missing", "additional", "shape", "complex"],
)
def test_models_that_do_not_fit_are_refused_by_name(
    change: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    sources = models(tmp_path, 2)
    tensors = tensors_of(sources[1])
    change(tensors)
    save_file(tensors, sources[1] / "model.safetensors")
    with pytest.raises(UnsupportedError, match=message):
        merge(sources, tmp_path / "out", "average")
    assert not (tmp_path / "out").exists()


def test_damage_of_another_source_names_its_file(tmp_path: Path) -> None:
    sources = models(tmp_path, 2)
    file = sources[1] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointingException) as failure:
        merge(sources, tmp_path / "out", "average")
    assert isinstance(failure.value, CorruptError)
    assert failure.value.file is not None
    assert str(file) in failure.value.file


def test_a_source_is_not_replaced_by_the_result(tmp_path: Path) -> None:
    sources = models(tmp_path, 2)
    for source in sources:
        with pytest.raises(UsageError):
            merge(sources, source, "average", force=True)
        assert tensors_of(source)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optim": "carry"}, "optimizer states cannot be merged"),
        ({"dequantize": "bfloat16"}, "--dequantize has no effect"),
        ({"metadata_only": True}, "--metadata-only has no effect"),
    ],
)
def test_options_that_contradict_a_merge_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        merge(models(tmp_path, 2), tmp_path / "out", "average", **options)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    quantized = {
        "q.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "q.weight_scale": torch.ones(4, 1),
    }
    with pytest.raises(UnsupportedError, match="quantized") as failure:
        merge(models(tmp_path, 2, **quantized), tmp_path / "out", "average")
    assert "--dequantize" in str(failure.value.hint)


@pytest.mark.parametrize(
    ("request_of", "message"),
    [
        ({"method": "weights", "others": 1, "weights": (1.0, 1.0)}, "sum to 2 instead of 1"),
        ({"method": "weights", "others": 2, "weights": (0.5, 0.5)}, "2 numbers for 3"),
        ({"method": "ema", "others": 1, "amount": 1.5}, "between 0 and 1"),
        ({"method": "slerp", "others": 2, "amount": 0.5}, "two checkpoints, but 3"),
        ({"method": "average", "others": 0}, "at least two"),
        ({"method": "add-delta", "others": 1, "amount": float("nan")}, "finite"),
    ],
)
def test_requests_that_make_no_sense_are_refused(request_of: dict[str, Any], message: str) -> None:
    other_paths = tuple(Path(str(n)) for n in range(request_of.pop("others")))
    with pytest.raises(UsageError, match=message):
        Merge(others=other_paths, **request_of)
