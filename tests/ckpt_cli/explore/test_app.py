"""``ckpt explore`` with keys pressed by textual's pilot, and its screens kept as text."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

pytest.importorskip("textual", reason="the extra explore is not installed")

from textual.pilot import Pilot
from textual.widgets import Static

from ckpt_cli.explore.app import ExplorerApp
from ckpt_cli.explore.detail_pane import DetailPane
from ckpt_cli.explore.name_tree import NameTree
from ckpt_cli.explore.report_screen import ReportScreen
from ckpt_cli.explore.search import SearchPanel, search_names
from ckpt_cli.explore.source import CheckpointSource, SourceOptions
from core.errors import CorruptError, UsageError
from tests.support.hostile_names import write_named_tensors
from tests.support.screens import assert_screen, screen_text

SCREENS = Path(__file__).with_name("screens")
RUN = Path("mcore_legacy/dense_gqa/tp2_pp2_optim")
OTHER = "mcore_legacy/dense_gqa/tp2_pp1_optim"
WEIGHT = "decoder.layers.0.self_attention.linear_qkv.weight"

Steps = Callable[[Pilot[int]], Awaitable[None]]


@pytest.fixture
def in_golden(golden: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The golden checkpoints as working directory, so that screens show relative paths."""
    monkeypatch.chdir(golden)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return golden


def explore(
    path: Path, steps: Steps, *, size: tuple[int, int] = (80, 24), iteration: int | None = None
) -> ExplorerApp:
    """Run the program, wait until the names are shown, and take some steps."""

    async def run() -> ExplorerApp:
        app = ExplorerApp(SourceOptions(path=path, iteration=iteration))
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.source is not None or app.failure is not None)
            if app.failure is None:
                await steps(pilot)
        return app

    return asyncio.run(run())


async def until(pilot: Pilot[int], condition: Callable[[], bool]) -> None:
    """Wait for what a worker does; a minute guards against waiting forever."""
    for _ in range(1500):
        await pilot.pause()
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"nothing happened:\n{screen_text(pilot.app)}")


async def until_shown(pilot: Pilot[int], *texts: str) -> None:
    await until(pilot, lambda: all(text in screen_text(pilot.app) for text in texts))


async def type_text(pilot: Pilot[int], text: str) -> None:
    names = {"/": "slash", ".": "full_stop", "_": "underscore", "*": "asterisk", "[": "["}
    await pilot.press(*(names.get(char, char) for char in text))


async def search(pilot: Pilot[int], text: str, count: str) -> None:
    """Search for a text, and wait for the number of matches."""
    await pilot.press("slash")
    await type_text(pilot, text)
    await until_shown(pilot, count)


def label_at_cursor(app: ExplorerApp) -> str:
    node = app.query_one(NameTree).cursor_node
    assert node is not None
    return str(node.label)


def test_the_first_screen_shows_names_overview_and_keys(in_golden: Path) -> None:
    async def steps(pilot: Pilot[int]) -> None:
        await until_shown(pilot, "model ", "moments")
        assert_screen(pilot.app, SCREENS / "overview.txt")
        await pilot.press("q")

    app = explore(RUN, steps)
    assert app.return_code == 0


def test_a_tensor_shows_shape_places_statistics_and_values(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The guide shows these screens: of a run of its playground, under the name that it has there.
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/llama").symlink_to(golden / "mcore_legacy/dense_gqa/tp4_pp1_optim")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_COLOR", raising=False)

    async def steps(pilot: Pilot[int]) -> None:
        await search(pilot, "0.self_attention.linear_qkv.weight", "4 of 376 names")
        await until_shown(pilot, "no NaN or Inf")
        assert_screen(pilot.app, SCREENS / "search.txt")
        await pilot.press("enter")
        await until(pilot, lambda: label_at_cursor(app_of(pilot)).startswith("weight"))
        await until_shown(pilot, "tp0 pp0", "no NaN or Inf")
        assert_screen(pilot.app, SCREENS / "tensor.txt")
        await pilot.press("w")
        await pilot.pause()
        assert_screen(pilot.app, SCREENS / "wide.txt")

    explore(Path("runs/llama"), steps)


def app_of(pilot: Pilot[int]) -> ExplorerApp:
    assert isinstance(pilot.app, ExplorerApp)
    return pilot.app


def test_levels_are_made_when_they_are_opened(in_golden: Path) -> None:
    async def steps(pilot: Pilot[int]) -> None:
        tree = app_of(pilot).query_one(NameTree)

        def n_nodes() -> int:
            nodes, count = [tree.root], 0
            while nodes:
                count += 1
                nodes += nodes.pop().children
            return count

        before = n_nodes()
        await pilot.press("down", "down", "down")
        assert label_at_cursor(app_of(pilot)).startswith("layers")
        await pilot.press("right")
        await pilot.pause()
        assert n_nodes() == before + 4
        await pilot.press("right")
        assert label_at_cursor(app_of(pilot)).startswith("0 ")
        await until_shown(pilot, "decoder.layers.0", "mlp")
        await pilot.press("left", "left")
        await pilot.pause()
        assert "├ ▶ layers" in screen_text(pilot.app)

    explore(RUN, steps)


def test_d_compares_what_is_at_the_cursor(in_golden: Path) -> None:
    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("down", "down", "d")
        await until_shown(pilot, "Compare decoder", "path or URL")
        await type_text(pilot, OTHER)
        await pilot.press("enter")
        await until_shown(pilot, "✓ the same: 29 tensors")
        await pilot.press("escape")
        # The path is kept for the next comparison; Esc leaves without any.
        await pilot.press("d")
        await until_shown(pilot, OTHER)
        await pilot.press("escape")
        await pilot.pause()
        assert len(pilot.app.screen_stack) == 1

    explore(RUN, steps)


def test_a_comparison_draws_layers_and_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"layers.{layer}.{name}" for layer in range(3) for name in ("mlp", "norm")]
    write_named_tensors(tmp_path / "a.safetensors", names)
    b = write_named_tensors(tmp_path / "b.safetensors", [*names[:5], "layers.2.bias"])
    data = bytearray(b.read_bytes())
    data[-33] = 0x40  # the last element of layers.1.norm
    b.write_bytes(data)
    monkeypatch.chdir(tmp_path)

    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("d")
        await type_text(pilot, b.name)
        await pilot.press("enter")
        await until_shown(pilot, "✗ different", "1  bias")
        lines = [line.split() for line in screen_text(pilot.app).splitlines()]
        at = lines.index(["layers", "1", "2", "3"])
        rows = [line[:4] for line in lines[at + 1 : at + 4]]
        assert [row[: len(row) - (row[-1] in "▇▆▅▄▃▂▁█")] for row in rows] == [
            ["0", ".", "."],
            ["1", ".", "9"],
            ["2", "B", ".", "A"],
        ]

    explore(Path("a.safetensors"), steps)


def test_an_error_of_comparing_is_shown(in_golden: Path) -> None:
    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("d")
        await type_text(pilot, "no/such/path")
        await pilot.press("enter")
        await until_shown(pilot, "error", "no such file or directory")
        await pilot.press("q")
        await pilot.pause()
        assert len(pilot.app.screen_stack) == 1

    explore(RUN, steps)


def test_v_validates(in_golden: Path) -> None:
    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("v")
        await until_shown(pilot, "✓ no findings", "esc Cancel/back")
        # The keys of the first screen do nothing here.
        await pilot.press("d", "slash", "s", "w", "v")
        await pilot.pause()
        assert isinstance(pilot.app.screen, ReportScreen)
        await pilot.press("escape")
        await until_shown(pilot, "/ Search")

    explore(RUN, steps)


def test_esc_cancels_work(in_golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def endless(source: CheckpointSource, cancellation: object, progress: object) -> object:
        try:
            while True:
                cancellation.check()  # type: ignore[attr-defined]
        finally:
            ended.set()

    monkeypatch.setattr(CheckpointSource, "validate", endless)

    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("v")
        await until_shown(pilot, "beginning…")
        await pilot.press("escape")
        await until(pilot, ended.is_set)
        assert len(pilot.app.screen_stack) == 1

    explore(RUN, steps)


def test_a_damaged_tensor_shows_its_error_and_the_rest_stays(golden: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.safetensors"
    write_model(model, ["good", "bad"])
    text = model.read_bytes()

    async def steps(pilot: Pilot[int]) -> None:
        model.write_bytes(text[:-8])  # the file is cut after it was opened
        await pilot.press("down", "down")
        await until_shown(pilot, "error", "[2, 4]")
        await pilot.press("up")
        await until_shown(pilot, "no NaN or Inf")

    explore(model, steps)


def test_a_damaged_checkpoint_is_shown_as_far_as_it_can_be_read(
    golden: Path, tmp_path: Path
) -> None:
    for rank in ("mp_rank_00", "mp_rank_01"):
        (tmp_path / "run" / rank).mkdir(parents=True)
        source = golden / "mcore_legacy/dense_gqa/tp2_pp1/iter_0000010" / rank
        data = (source / "model_optim_rng.pt").read_bytes()
        cut = data if rank == "mp_rank_00" else data[: len(data) // 2]
        (tmp_path / "run" / rank / "model_optim_rng.pt").write_bytes(cut)

    async def steps(pilot: Pilot[int]) -> None:
        await until_shown(pilot, "✗ damaged", "1 problem")

    explore(tmp_path / "run", steps)


def test_what_cannot_be_opened_is_an_error_of_the_command(tmp_path: Path) -> None:
    async def steps(pilot: Pilot[int]) -> None:
        raise AssertionError("nothing was opened")

    app = explore(tmp_path / "nothing", steps)
    assert isinstance(app.failure, UsageError)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    assert isinstance(explore(tmp_path, steps).failure, CorruptError)


def write_model(path: Path, names: list[str]) -> None:
    header = {
        name: {"dtype": "F32", "shape": [2, 4], "data_offsets": [32 * i, 32 * i + 32]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(32 * len(names)))


HOSTILE = [
    "[bold red]markup[/bold red]",
    "[@click=app.quit]click[/]",
    "[/nothing]",
    "[link=https://example.org]link[/link]",
    "escape \x1b[31m\x1b]0;title\x07",
    "reversed \u202e name",
    ":warning: $text",
    "line\nbreak\r",
    "wide 漢字 " * 30,
    "x" * 10_000,
    "a..b",
    "",
]


def test_hostile_names_are_text(tmp_path: Path) -> None:
    write_model(tmp_path / "model.safetensors", HOSTILE)

    async def steps(pilot: Pilot[int]) -> None:
        for _ in range(len(HOSTILE) + 1):
            await pilot.press("down")
            await until_shown(pilot, "no NaN or Inf")
            text = screen_text(pilot.app)
            assert all(char == "\n" or char.isprintable() for char in text)
        text = screen_text(pilot.app)
        assert "[bold red]markup[/bold red]" in text
        assert "[/nothing]" in text
        assert r"escape \x1b[31m" in text
        assert ":warning:" in text
        await search(pilot, "click", "1 of 12 names")
        assert "[@click=app.quit]click[/]" in screen_text(pilot.app)
        await pilot.press("escape")
        await pilot.press("d")
        await pilot.pause()

    explore(tmp_path / "model.safetensors", steps, size=(120, 24))


def test_objects_are_shown_as_json(in_golden: Path) -> None:
    async def steps(pilot: Pilot[int]) -> None:
        await search(pilot, "mp_rank_00_000:iteration", "1 of 342 names")
        await pilot.press("enter")
        await until_shown(pilot, "mp_rank_00_000:iteration  10")

    explore(RUN, steps)


def test_large_tensors_are_measured_when_asked(
    in_golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointSource, "statistics_limit_bytes", 1000)

    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("down")
        await until_shown(pilot, "s reads 48.0 KiB")
        await pilot.press("s")
        await until_shown(pilot, "no NaN or Inf")

    explore(RUN, steps)


def test_a_search_takes_texts_and_patterns() -> None:
    names = [f"layers.{number}.Weight" for number in range(1000)] + ["bias"]
    assert search_names(names, "WEIGHT").n_matches == 1000
    assert len(search_names(names, "weight").names) == 200
    assert search_names(names, "layers.[3-5].*").names == tuple(names[3:6])
    with pytest.raises(UsageError):
        search_names(names, "[5-3]*")


def test_every_word_of_a_search_has_to_match() -> None:
    names = ("layers.0.mlp.weight", "layers.1.mlp.bias", "layers.10.attn.weight")
    assert search_names(names, "WEIGHT mlp").names == names[:1]
    assert search_names(names, " mlp ").names == names[:2]
    assert search_names(names, "[0-1].m layers").names == names[:2]
    assert search_names(names, "mlp attn").n_matches == 0


def test_a_directory_of_checkpoints_lets_one_be_chosen(golden: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(golden / "torch_dcp/tp2_only")

    async def run() -> ExplorerApp:
        app = ExplorerApp(SourceOptions(path=tmp_path))
        async with app.run_test(size=(80, 24)) as pilot:
            await until_shown(pilot, "2 checkpoints, the newest first", "dcp")
            await pilot.press("down", "enter")
            await until(pilot, lambda: app.source is not None)
        return app

    source = asyncio.run(run()).source
    assert source is not None
    assert source.checkpoint.path == tmp_path / "b"


def test_a_question_mark_shows_the_keys(in_golden: Path) -> None:
    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("question_mark")
        await until_shown(pilot, "words of a name in any order", "compare with a second checkpoint")
        await pilot.press("escape")
        await until(pilot, lambda: len(pilot.app.screen_stack) == 1)

    explore(RUN, steps)


def test_a_search_shows_what_is_wrong_with_a_pattern(in_golden: Path) -> None:
    async def steps(pilot: Pilot[int]) -> None:
        await search(pilot, "[52-31]*", "valid number range")
        await pilot.press("escape")
        await pilot.pause()
        assert not pilot.app.query_one(SearchPanel).display
        assert pilot.app.query_one(NameTree).has_focus

    explore(RUN, steps)


def test_the_explorer_follows_the_size_of_the_terminal(in_golden: Path) -> None:
    async def steps(pilot: Pilot[int]) -> None:
        await search(pilot, WEIGHT, "4 of 342 names")
        await pilot.press("enter")
        await until_shown(pilot, "no NaN or Inf")
        await pilot.resize_terminal(120, 40)
        await pilot.pause()
        assert_screen(pilot.app, SCREENS / "tensor_120x40.txt")
        await pilot.resize_terminal(40, 10)
        await pilot.pause()
        assert pilot.app.query_one(DetailPane).query_one(Static).size.width > 0

    explore(RUN, steps)


def test_a_training_root_opens_its_iteration(in_golden: Path) -> None:
    async def steps(pilot: Pilot[int]) -> None:
        await until_shown(pilot, "iteration 10")

    explore(RUN, steps, iteration=10)


def test_the_guide_shows_the_screen_of_a_tensor(repo_dir: Path) -> None:
    page = (repo_dir / "docs/guide/explore.md").read_text("utf-8")
    screen = (SCREENS / "tensor.txt").read_text("utf-8")
    assert f"```text\n{screen}```" in page
