"""Which files belong together, judged by their names."""

from __future__ import annotations

import pytest

from core.formats.torch_sharded.names import families_of

NAMES = {
    ("model_world_size_8_rank_3.pt", "model_world_size_8_rank_10.pt"): ("model", [3, 10]),
    ("rank_3.pt",): ("", [3]),
    ("__3_0.pt", "__0_0.pt"): ("", [0, 3]),
    ("checkpoint_rank3.pt", "checkpoint_rank0.pt"): ("checkpoint", [0, 3]),
    ("pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_rank1.bin"): (
        "pytorch_model_fsdp",
        [0, 1],
    ),
    ("model_0.pth", "model_1.pth"): ("model", [0, 1]),
    ("step10_model_0.pt", "step10_model_1.pt"): ("step10_model", [0, 1]),
    ("dp_rank_0_tp_rank_0.pt", "dp_rank_0_tp_rank_1.pt"): ("dp_tp", [0, 1]),
    ("state.0-of-2.pt", "state.1-of-2.pt"): ("state", [0, 1]),
}


@pytest.mark.parametrize("names", list(NAMES), ids=lambda names: names[0])
def test_files_that_differ_in_the_number_of_the_rank_are_one_family(names: tuple[str, ...]) -> None:
    label, numbers = NAMES[names]
    (family,) = families_of(reversed(names))
    assert set(family.files) == set(names)
    assert (family.label, list(family.files.values())) == (label, numbers)


def test_other_numbers_make_other_families() -> None:
    names = ["a_step10_rank0.pt", "a_step20_rank0.pt", "b_rank0.pt", "notes0.txt", "plain.pt"]
    assert [family.pattern for family in families_of(names)] == [
        "a_step10_rank#.pt",
        "a_step20_rank#.pt",
        "b_rank#.pt",
    ]


def test_a_missing_file_is_named_as_its_siblings_are() -> None:
    (family,) = families_of(["model_world_size_8_rank_3.pt"])
    assert (family.world_size, family.file_of(7)) == (8, "model_world_size_8_rank_7.pt")
    (padded,) = families_of(["rank_00003.pt", "rank_00012.pt"])
    assert padded.file_of(7) == "rank_00007.pt"
