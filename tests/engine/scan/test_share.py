"""What the ranks of a team find together is what one process finds alone."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from core.engine.catalog.stored import StoredArray
from core.engine.fingerprint.definition import Fingerprint
from core.engine.numbers.facts import ValueFacts, ValueObserver
from core.engine.scan.run import scan
from core.engine.scan.sums import ScanResult, WantedSums
from core.engine.team.protocol import ALONE, Team
from core.errors import CheckpointingException, WorkerError
from core.megatron.rules.tables import load_rules
from core.opening.open import open_checkpoint
from core.publish.manifest.fingerprint_share import fingerprints_of_directory
from core.publish.manifest.stated_crcs import StatedCrcReader
from core.verbs.checks.finding import Level
from core.verbs.validate.run import Validation, validate
from tests.support.teams import PipeTeam, run_team


def validated(team: PipeTeam, paths: list[Path], options: dict[str, object]) -> list[Validation]:
    return [validate(path, threads=2, team=team, **options) for path in paths]


def together(n: int, paths: list[Path], **options: object) -> list[Validation]:
    """What rank 0 of ``n`` says; the others say the same."""
    results = run_team(n, validated, paths, options)
    assert all(without_times(validations) == without_times(results[0]) for validations in results)
    return results[0]


def alone(paths: list[Path], **options: object) -> list[Validation]:
    return [validate(path, threads=2, **options) for path in paths]


def without_times(validations: list[Validation]) -> list[Validation]:
    return [replace(validation, seconds=0, figures=()) for validation in validations]


GOLDEN = (
    "hf/llama/safetensors_sharded",
    "hf/llama/torch_single/model_legacy.pt",
    "hf/qwen2_tied/bin_sharded",
    "torch_dcp/tp2_fsdp2_dp2",
    "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt",
    "mcore_torch_dist/dense_gqa/tp2_pp2_optim",
    "mcore0121_zarr/dense_gqa/tp2_pp2",
    "deepspeed/zero2_dp2_bf16",
    "deepspeed_universal/zero1_dp2_bf16",
    "orbax/plain_zarr2",
)


@pytest.fixture(scope="module")
def damaged(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints with a flipped bit in every file, with NaNs, cut short, and with files that are
    not there.
    """
    folder = tmp_path_factory.mktemp("damaged")
    paths = []
    for number, name in enumerate(GOLDEN):
        source = golden / name
        path = folder / str(number) / source.name
        if source.is_file():
            path.parent.mkdir()
            shutil.copyfile(source, path)
        else:
            shutil.copytree(source, path, copy_function=shutil.copyfile)
        files = (
            [path]
            if path.is_file()
            else sorted(child for child in path.rglob("*") if child.is_file())
        )
        data_files = [
            file
            for file in files
            if file.stat().st_size > 2000 and file.suffix not in (".json", ".txt")
        ]
        for at, file in enumerate(data_files):
            data = bytearray(file.read_bytes())
            middle = len(data) * 2 // 3
            if at % 2:
                data[middle : middle + 64] = b"\xff" * 64
            elif number % 3 == 0 or at:
                data[middle] ^= 64
            elif number % 3 == 1:
                del data[-50:]
            else:
                file.unlink()
                continue
            file.chmod(0o644)
            file.write_bytes(data)
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def hashed(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with Megatron's integrity.json, one sum of which is wrong."""
    path = tmp_path_factory.mktemp("hashed") / "iter_0000010"
    shutil.copytree(
        golden / "mcore_torch_dist/dense_gqa/tp2_pp2/iter_0000010",
        path,
        copy_function=shutil.copyfile,
    )
    sums = {
        file.name: sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.iterdir())
        if file.is_file()
    }
    sums["__1_0.distcp"] = sums["__0_0.distcp"]
    (path / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": sums}))
    return path


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.long), 3])
def test_files_that_are_hashed_as_a_whole(hashed: Path, n: int) -> None:
    expected = without_times(alone([hashed], level=Level.DEEP))
    assert [
        (finding.code, finding.file) for finding in expected[0].findings if finding.code == "CK812"
    ] == [("CK812", "__1_0.distcp")]
    assert without_times(together(n, [hashed], level=Level.DEEP)) == expected


@pytest.mark.long  # as the damaged ones, of which most files are whole
def test_golden_checkpoints(golden: Path) -> None:
    paths = [golden / name for name in GOLDEN]
    expected = without_times(alone(paths, level=Level.DEEP))
    assert without_times(together(3, paths, level=Level.DEEP)) == expected


@pytest.mark.parametrize("n", [2, pytest.param(5, marks=pytest.mark.long)])
def test_damaged_checkpoints(damaged: list[Path], n: int) -> None:
    expected = without_times(alone(damaged, level=Level.DEEP))
    codes = {finding.code for result in expected for finding in result.findings}
    assert {"CK701", "CK710", "CK103"} <= codes
    validations = without_times(together(n, damaged, level=Level.DEEP))
    for validation, other in zip(validations, expected, strict=True):
        assert validation == other


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two files, in which arrays of several MiB lie in the shares of several
    ranks.
    """
    path = tmp_path_factory.mktemp("large")
    numbers = np.random.default_rng(7)
    matrix = numbers.standard_normal((1700, 1777), np.float32)
    for row in (3, 800, 1699):
        matrix[row, 5] = np.nan
    tensors = {
        "a.weight": matrix,
        "b.bias": np.zeros(3, np.float32),
        "c.weight": np.full((1200, 801), 0.5, np.float32),
        "d.weight": np.zeros((900, 1001), np.float32),
        "e.empty": np.zeros((0, 4), np.float32),
        "f.weight": np.full((1201, 601), 0.25, np.float32),
    }
    tensors["f.weight"][1200, 600] = 0.125
    save_file(tensors, path / "model-00001-of-00002.safetensors")
    save_file(
        {"z.weight": numbers.standard_normal((99, 999), np.float32)},
        path / "model-00002-of-00002.safetensors",
    )
    weights = dict.fromkeys(tensors, "model-00001-of-00002.safetensors") | {
        "z.weight": "model-00002-of-00002.safetensors"
    }
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weights})
    )
    return path


def scanned(team: PipeTeam, path: Path) -> tuple[ScanResult, dict[str, ValueFacts]]:
    opened = open_checkpoint(path)
    observer = ValueObserver()
    sums_wanted = WantedSums(array_digests=True, file_digests=True)
    stated = StatedCrcReader(opened.store, opened.format.name)
    sums = scan(
        opened.catalog,
        opened.store,
        [observer],
        wanted=sums_wanted,
        stated_in=stated,
        threads=2,
        team=team,
    )
    opened.store.close()
    if team.size > 1:
        assert team.expected == [team.done_bytes]
    return sums, observer.facts


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.long), 5])
def test_files_and_arrays_that_several_ranks_share(large: Path, tmp_path: Path, n: int) -> None:
    as_zip = tmp_path / "model.pt"
    matrix = torch.arange(2_000_000.0).reshape(1000, 2000)
    views = {"w": matrix, "turned": matrix.t(), "every_third": matrix[:, ::3], "row": matrix[500]}
    torch.save(views | {"v": torch.arange(1_500_000, dtype=torch.int16)}, as_zip)
    for path in (large, as_zip):
        expected, facts = scanned(ALONE, path)
        assert expected.problems == []
        results = run_team(n, scanned, path)
        sums, found_facts = results[0]
        read = [figure.read_bytes for figure in sums.figures]
        assert replace(sums, figures=()) == replace(expected, figures=())
        assert found_facts == facts
        assert sum(read) == expected.read_bytes + expected.separate_bytes
        assert path == as_zip or (all(read) and max(read) - min(read) < 5 << 20)
    assert {
        key: (fact.nan.n, fact.nan.first)
        for key, fact in scanned(ALONE, large)[1].items()
        if fact.nan.n
    } == {"a.weight": (3, 3 * 1777 + 5)}


@pytest.mark.parametrize(
    "level", [pytest.param(Level.HEADERS, marks=pytest.mark.long), Level.DEEP], ids=str
)
def test_other_checkpoints_to_compare_with(
    golden: Path, damaged: list[Path], large: Path, level: Level
) -> None:
    """Tensors that the scan does not sum up, because they are computed from others, are read by all
    ranks.
    """
    optimizer = golden / "mcore_legacy/dense_gqa/tp2_pp1_dp2_distopt"
    other = golden / "mcore_torch_dist/dense_gqa/tp2_pp1_dp2_distopt_dpreshardable"
    cases = [
        (other, optimizer),
        (optimizer, damaged[4]),
        (golden / GOLDEN[0], damaged[0]),
        (damaged[5], golden / GOLDEN[5]),
        (large, large),
    ]
    expected = [compared(ALONE, *case, level) for case in cases]
    assert {
        finding.code
        for result in expected
        if isinstance(result, Validation)
        for finding in result.findings
    } & {"CK824"}
    results = run_team(3, compared_all, cases, level)
    for results_of_rank in results:
        assert [bare(result) for result in results_of_rank] == [bare(result) for result in expected]
    read = [
        sum(figure.read_bytes for figure in result.figures)
        for result in results[0]
        if isinstance(result, Validation)
    ]
    assert all(read), read


def compared_all(team: PipeTeam, cases: list[tuple[Path, Path]], level: Level) -> list[object]:
    return [compared(team, *case, level) for case in cases]


def compared(team: Team, against: Path, path: Path, level: Level) -> Validation | tuple[str, str]:
    try:
        return validate(path, level=level, against=against, threads=2, team=team)
    except CheckpointingException as err:
        return type(err).__name__, err.sentence


def bare(result: Validation | tuple[str, str]) -> object:
    return replace(result, seconds=0, figures=()) if isinstance(result, Validation) else result


def fingerprints(team: Team, path: Path, memory_bytes: int) -> dict[str, Fingerprint] | str:
    try:
        return fingerprints_of_directory(
            path, rules=load_rules(None), threads=2, memory_bytes=memory_bytes, team=team
        ).fingerprints
    except CheckpointingException as err:
        return err.sentence


def test_fingerprints_of_a_directory(golden: Path, large: Path) -> None:
    paths = [
        golden / name for name in ("mcore0121_zarr/dense_gqa/tp2_pp2", "deepspeed/zero2_dp2_bf16")
    ]
    for path, memory_bytes in (
        (paths[0], 1 << 30),
        (paths[1], 1 << 30),
        (large, 1 << 30),
        (large, 1 << 20),
    ):
        expected = fingerprints(ALONE, path, memory_bytes)
        lead, *rest = run_team(3, fingerprints, path, memory_bytes)
        assert lead == expected and expected
        assert all(other == ({} if isinstance(expected, dict) else expected) for other in rest)


def with_other_directory(team: PipeTeam, path: Path, other: Path) -> str:
    try:
        validate(other if team.rank == 1 else path, level=Level.DEEP, team=team)
    except WorkerError as err:
        return err.message
    return ""


def test_hosts_that_see_different_directories_are_refused(
    large: Path, golden: Path, tmp_path: Path
) -> None:
    for other in (golden / GOLDEN[0], tmp_path / "nowhere"):
        for message in run_team(3, with_other_directory, large, other):
            assert message.startswith("rank 1 on host1 and rank 0 on host0 see different data at ")


def refused(team: PipeTeam, path: Path) -> str:
    try:
        validate(path, level=Level.DEEP, iteration=9, team=team)
    except CheckpointingException as err:
        return f"{type(err).__name__}: {err.message}"
    return ""


def test_a_mistake_in_the_request_is_the_same_error_on_every_rank(
    golden: Path, tmp_path: Path
) -> None:
    for path in (golden / "mcore_torch_dist/dense_gqa/tp2_pp2", tmp_path / "nowhere"):
        errors = run_team(2, refused, path)
        assert errors[0] == errors[1] == refused(ALONE, path) and errors[0].startswith("UsageError")


class Failing(ValueObserver):
    """Fails on one rank in the middle of its share."""

    def feed(self, array: StoredArray, start: int, data: memoryview) -> None:
        raise ArithmeticError("not a number")


def failing(team: PipeTeam, path: Path) -> tuple[str, bool]:
    opened = open_checkpoint(path)
    try:
        scan(
            opened.catalog,
            opened.store,
            [Failing() if team.rank == 1 else ValueObserver()],
            team=team,
        )
    except ArithmeticError as err:
        return str(err), team.alarmed.is_set()
    return "", False


class Dying(ValueObserver):
    """Ends its process in the middle of its share."""

    def feed(self, array: StoredArray, start: int, data: memoryview) -> None:
        os._exit(9)


def dying(team: PipeTeam, path: Path) -> str:
    opened = open_checkpoint(path)
    try:
        scan(
            opened.catalog,
            opened.store,
            [Dying() if team.rank == 1 else ValueObserver()],
            team=team,
        )
    except WorkerError as err:
        return err.message
    return ""


def test_a_rank_that_dies_ends_the_scan_of_all(large: Path) -> None:
    assert run_team(3, dying, large, allow_failure=True) == [
        "a worker is gone",
        None,
        "a worker is gone",
    ]


def test_the_error_of_one_rank_ends_the_scan_of_all(large: Path) -> None:
    assert run_team(3, failing, large) == [("not a number", True)] * 3
