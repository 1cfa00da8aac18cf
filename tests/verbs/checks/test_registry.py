"""The table of check modules says when one is imported, so it must say what the module checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from core.verbs.checks import registry
from core.verbs.checks.check import Level, codes
from core.verbs.checks.registry import MODULES, CheckModule, checks


@pytest.mark.parametrize("row", MODULES, ids=lambda row: row.name)
def test_a_row_has_the_lowest_level_and_the_formats_of_its_checks(row: CheckModule) -> None:
    module_checks = row.load().CHECKS
    formats = {format for check in module_checks for format in check.formats}
    assert row.level == min(check.level for check in module_checks)
    if all(check.formats for check in module_checks):
        assert {*row.formats} == formats
    else:
        assert row.formats == ()


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("format", ["dcp", "megatron", "safetensors", "zarr", None])
def test_rows_leave_out_no_check(level: Level, format: str | None) -> None:
    expected = [
        check
        for row in MODULES
        for check in row.load().CHECKS
        if check.level <= level and (not check.formats or format in check.formats)
    ]
    assert list(checks(level, format)) == expected


def test_every_code_of_the_table_is_used() -> None:
    folder = Path(registry.__file__).parent
    texts = [path.read_text("utf-8") for path in folder.rglob("*.py")]
    used = re.findall(r"\"(CK\d{3})\"", "\n".join(texts))
    assert sorted({*used}) == list(codes())
