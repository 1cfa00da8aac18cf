from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_cli.app import main
from ckpt_cli.pages.diff_page import diff_blocks
from ckpt_cli.screen.blocks import draw_text
from ckpt_cli.screen.terminal import Screen, columns_of
from core.verbs.diff.run import DiffJob, diff
from tests.support.shown_errors import is_one_error

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process; returns exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main(["diff", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def saved(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two files that differ in every way."""
    first: dict[str, Any] = {f"layers.{n}.w": torch.ones(4, 3) * (n + 1) for n in range(6)}
    first |= {
        "gone": torch.zeros(2),
        "shape": torch.zeros(2, 3),
        "dtype": torch.ones(3),
        "nan": torch.ones(2),
        "step": 1,
    }
    other = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in first.items()
    }
    other.pop("gone")
    for n in range(1, 5):
        other[f"layers.{n}.w"][1, 2] += n
    other |= {
        "new": torch.ones(1),
        "shape": torch.zeros(3, 2),
        "dtype": torch.ones(3).half(),
        "step": 2,
    }
    other["nan"] = torch.tensor([1.0, math.nan])
    return saved(tmp_path / "a.pt", first), saved(tmp_path / "b.pt", other)


def test_the_verdict_comes_first_and_the_exit_code_says_it(
    golden: Path, run: Run, pair: tuple[Path, Path]
) -> None:
    case = golden / "mcore_legacy/dense_gqa/tp2_pp2"
    code, out, err = run(case, golden / "mcore_legacy/dense_gqa/tp4_pp1")
    assert (code, err) == (0, "")
    first, *rest = out.splitlines()
    assert first.startswith("✓ the same: 31 tensors (")
    assert "bit for bit" in first
    assert any("megatron, TP2 PP2, iteration 10" in line for line in rest)
    assert any(
        "entries differ because of layout, format or directory, not counted" in line
        for line in rest
    )
    code, out, err = run(*pair)
    assert (code, err) == (1, "")
    assert out.splitlines()[0] == "✗ different: 9 of 11 tensors and 1 other entry"


def test_what_matters_most_is_listed_first_and_layers_are_folded(
    run: Run, pair: tuple[Path, Path]
) -> None:
    lines = run(*pair)[1].splitlines()
    titles = [line for line in lines if line and not line.startswith(" ")]
    assert titles[1:] == [
        "most different layers (4 of 6 differ)",
        "only in A (1)",
        "only in B (1)",
        "different shapes, A → B (1)",
        "different dtypes, A → B (1)",
        "different values, largest difference first (5)",
        "other entries (1)",
    ]
    rows = lines[lines.index(titles[6]) + 2 :]
    assert rows[0].split()[:5] == ["nan", "1", "of", "2", "(50"]
    assert "1 NaN" in rows[0]
    assert rows[1].split()[:4] == ["layers.[1-4].w", "4", "of", "48"]
    assert "[1, 2]: 5 → 9" in rows[1]
    assert any(
        line.split() == ["dtype", "float32", "→", "float16", "same", "values"] for line in lines
    )
    assert any(line.split() == ["step", "1", "→", "2"] for line in lines)
    flat = run(*pair, "--flat")[1]
    assert "layers.4.w" in flat
    assert "layers.[" not in flat
    assert "more tensor" in run(*pair, "--flat", "--limit", "2")[1]


def test_the_page_fits_a_narrow_terminal(pair: tuple[Path, Path]) -> None:
    difference = diff(DiffJob(a=pair[0], b=pair[1]))
    page = list(diff_blocks(difference, limit=10, is_flat=False))
    for line in draw_text(Screen(width=60), page):
        assert columns_of(line) <= 60 or line.startswith(("  A ", "  B ")), line  # the paths
    text = "\n".join(draw_text(Screen(width=200, has_unicode=False), page))
    assert "✓" not in text
    assert "→" not in text


def test_json_is_one_object_with_everything(run: Run, pair: tuple[Path, Path]) -> None:
    code, out, err = run(*pair, "--json")
    assert (code, err) == (1, "")
    page = json.loads(out)
    assert page["schema"] == "ckpt.diff/1"
    assert (page["same"], page["method"], page["tolerance"]) == (False, "read", None)
    assert page["counts"] == {
        "equal": 2,
        "unread": 0,
        "close": 0,
        "values": 5,
        "dtype": 1,
        "shape": 1,
        "only_b": 1,
        "only_a": 1,
    }
    by_key = {tensor["key"]: tensor for tensor in page["tensors"]}
    assert by_key["gone"]["b"] is None
    values = by_key["layers.2.w"]["values"]
    assert (values["elements"], values["differing"], values["max_abs"], values["first"]) == (
        12,
        1,
        2.0,
        [1, 2],
    )
    assert (values["first_a"], values["first_b"], values["max_at"]) == (3.0, 5.0, [1, 2])
    assert values["relative"] == pytest.approx(2 / math.sqrt(12 * 9))
    assert by_key["nan"]["values"]["first_b"] == "nan"
    assert by_key["dtype"]["is_cast"] is True
    assert page["entries"] == [{"path": "step", "kind": "changed", "a": "1", "b": "2"}]


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (
            ["--rtol", "1e-3"],
            0,
            "✓ the same: 1 tensor (40 B) within the tolerance, 1 of them not bit for bit",
        ),
        (["--atol", "1e-9"], 1, "✗ different: 1 of 1 tensor"),
        (["--rtol", "1e-3", "--nan-differs"], 1, "✗ different"),
        (
            ["--stat-only"],
            0,
            "✓ same names, shapes and dtypes: 1 tensor (40 B); no tensor was read",
        ),
        (["--quiet"], 1, "✗ different: 1 of 1 tensor"),
    ],
)
def test_options_change_what_counts(
    run: Run, tmp_path: Path, options: list[str], code: int, text: str
) -> None:
    a = torch.arange(10.0)
    a[0] = math.nan
    first, other = saved(tmp_path / "a.pt", {"w": a}), saved(tmp_path / "b.pt", {"w": a * 1.0001})
    got, out, err = run(first, other, *options)
    assert (got, err) == (code, "")
    assert out.startswith(text)
    if "--quiet" in options:
        assert out.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--rtol", "-1"], "'-1' is not a number ≥ 0"),
        (["--rtol", "nan"], "'nan' is not a number ≥ 0"),
        (["--nan-differs"], "--nan-differs has no effect: without a tolerance"),
        (["--stat-only", "--rtol", "1"], "--stat-only reads no values"),
        (["--memory", "lots"], "'lots' is not a valid size"),
        (["--include", "nope"], "matches 'nope'"),
        (["--strip-prefix", "nope"], "begins with 'nope'"),
        (["--rules", "no/such.toml"], "--rules: file not found"),
    ],
)
def test_mistakes_give_one_error_and_exit_code_2(
    run: Run, pair: tuple[Path, Path], options: list[str], text: str
) -> None:
    code, out, err = run(*pair, *options)
    assert (code, out) == (2, "")
    assert text in err
    assert is_one_error(err)


def test_only_the_tensors_or_only_the_model(golden: Path, run: Run) -> None:
    sharded, other = (
        golden / "mcore_legacy/dense_gqa/tp2_pp2_optim",
        golden / "mcore_legacy/dense_gqa/tp1_pp1",
    )
    code, out, _ = run(sharded, other)
    assert code == 1
    assert "only in A (93)" in out
    assert run(sharded, other, "--no-optim", "--tensors-only")[0] == 0


def test_names_cannot_reach_the_terminal(run: Run, tmp_path: Path) -> None:
    first = saved(
        tmp_path / "a.pt", {"w\x1b[2J": torch.ones(2), "text": "x\x1b[31m", "deep": {"k\x07": 1}}
    )
    other = saved(
        tmp_path / "b.pt", {"w\x1b[2J": torch.zeros(2), "text": "y\u202e", "deep": {"k\x07": 2}}
    )
    for options in ([], ["--flat"], ["--json"]):
        code, out, _ = run(first, other, *options)
        assert code == 1
        assert not set(out) & {"\x1b", "\u202e", "\x07"}


def test_missing_checkpoints_are_usage_errors(run: Run, pair: tuple[Path, Path]) -> None:
    code, out, err = run(pair[0], pair[0].with_name("none.pt"))
    assert (code, out) == (2, "")
    assert "none.pt" in err


def test_iterations_of_training_roots_are_chosen_apart(run: Run, tmp_path: Path) -> None:
    for number, value in ((1, 1.0), (2, 2.0)):
        folder = tmp_path / f"iter_{number:07d}"
        folder.mkdir()
        save_file({"w": torch.full((3,), value)}, folder / "model.safetensors")
    plain = tmp_path / "iter_0000001"
    assert run(tmp_path, plain, "--iteration", "1")[0] == 0
    assert run(tmp_path, plain)[0] == 1
    code, out, _ = run(tmp_path, tmp_path, "--iteration", "1", "--iteration-b", "2")
    assert code == 1
    assert "iter_0000002" in out


@pytest.fixture
def edited(golden: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A golden checkpoint of 3 layers, and a copy that differs in some of them."""
    path = golden / "hf/llama/safetensors_single"
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] *= 2
    tensors["model.layers.2.mlp.up_proj.weight"] *= -1
    tensors["model.layers.2.input_layernorm.weight"][1] = math.nan
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    copy = tmp_path / "copy"
    copy.mkdir()
    save_file(tensors, copy / "model.safetensors")
    return path, copy


def test_a_map_shows_layers_and_modules(edited: tuple[Path, Path], run: Run) -> None:
    code, out, err = run(*edited, "--map", "--tensors-only")
    assert (code, err) == (1, "")
    lines = out.splitlines()
    at = lines.index("model: 3 layers, 9 modules, 3 tensors outside layers")
    assert [line.split() for line in lines[at + 2 : at + 6]] == [
        ["layers", *"123456789"],
        ["0", *".....A.S."],
        ["1", *"...2....."],
        ["2", *"N..9....."],
    ]
    assert lines[at + 11 : at + 13] == ["outside layers", "  D  model.norm.weight"]
    assert {line[:5] for line in lines[at + 13 : at + 15]} == {"  .  "}
    # The lists come below, as without the map.
    plain = run(*edited, "--tensors-only")[1].splitlines()
    lists = lines[lines.index("only in A (1)") :]
    assert lists == plain[plain.index("only in A (1)") :]


def test_a_map_in_json(edited: tuple[Path, Path], run: Run) -> None:
    maps = json.loads(run(*edited, "--map", "--json")[1])["map"]
    assert list(maps) == ["model"]
    heat = maps["model"]
    assert (heat["stack"], heat["layers"]) == ("layers", [0, 1, 2])
    at = heat["modules"].index("mlp.up_proj.weight")
    assert [row[at]["kind"] for row in heat["cells"]] == ["equal", "values", "values"]
    assert heat["cells"][2][at]["relative"] == 2
    assert heat["outside"][0]["key"] == "model.norm.weight"
    assert "map" not in json.loads(run(*edited, "--json")[1])


def test_a_map_of_rank_files_has_the_optimizer_apart(golden: Path, run: Run) -> None:
    case = golden / "mcore_legacy/dense_gqa/tp2_pp2_optim"
    code, out, _ = run(case, golden / "mcore_torch_dist/dense_gqa/tp2_pp2_optim", "--map")
    assert code == 0
    assert "model: 4 layers, 7 modules, 3 tensors outside layers" in out
    assert "optimizer: 4 layers, 21 modules, 9 tensors outside layers" in out
    assert "exp_avg_sq.mlp.linear_fc1.weight" in out


def test_the_map_and_only_the_verdict_contradict(golden: Path, run: Run) -> None:
    path = golden / "hf/llama/safetensors_single"
    code, _, err = run(path, path, "--map", "--quiet")
    assert code == 2 and "--map has no effect" in err
