"""The table of check modules says when one is imported, so it must say what the module checks."""

from __future__ import annotations

import pytest

from core.verbs.checks.level import Level
from core.verbs.checks.registry import MODULES, CheckModule, checks, codes, find_code


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


def test_a_code_is_found_by_its_name() -> None:
    assert all(find_code(name) == code for name, code in codes().items())
    assert find_code("CK000") is None
