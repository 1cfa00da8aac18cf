"""The list of tricky cases of resharding, each with the tests that show its result.

The numbers and expectations are those of the project's study of resharding; a case without a test
is a gap, so every test named here must exist.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]

CASES: dict[int, tuple[str, str]] = {
    1: (
        "TP 8→4, 4→8, 8→1, 1→8",
        "megatron/reshard/test_layouts:test_any_size_to_any_other_that_divides",
    ),
    2: (
        "TP 6→4",
        "megatron/model/test_sizes:test_sizes_that_do_not_divide_each_other_meet_in_fractions",
    ),
    3: (
        "TP does not divide the heads",
        "megatron/model/test_sizes:test_heads_that_do_not_divide_list_the_sizes_that_do",
    ),
    4: (
        "more TP than groups",
        "megatron/model/test_sizes:test_more_tensor_ranks_than_groups_cut_the_fused_rows_plainly",
    ),
    5: (
        "TP and groups do not divide each other",
        "megatron/model/test_sizes:test_tensor_ranks_and_groups_that_do_not_divide_each_other_are_refused",
    ),
    6: (
        "TP does not divide an MLP",
        "megatron/model/test_sizes:test_a_gate_that_does_not_divide_names_the_tensor_and_the_extent_of_a_part",
    ),
    7: (
        "gate and up are not interleaved",
        "megatron/reshard/test_matrix:test_resharded_files_equal_those_that_megatron_saved",
    ),
    8: ("an MLP without a gate", "megatron/model/test_sizes:test_a_plain_mlp_has_one_part"),
    9: (
        "a gate that no argument names",
        "megatron/model/test_sizes:test_a_gate_that_the_arguments_do_not_name_is_seen_in_the_shapes",
    ),
    10: (
        "less padding",
        "megatron/model/test_sizes:test_the_padding_of_a_vocabulary_follows_the_tensor_ranks",
    ),
    11: (
        "more padding, zero in every state",
        "megatron/optimizer/numbered/test_numbered:test_rows_of_padding_are_zero_in_every_state",
    ),
    12: (
        "vocabulary size is unknown",
        "megatron/model/test_sizes:test_a_vocabulary_that_nothing_tells_needs_the_users_word",
    ),
    13: (
        "vocabulary above the rows",
        "megatron/model/test_sizes:test_a_vocabulary_above_the_stored_rows_is_refused",
    ),
    14: (
        "tied, PP 1→n creates the copy and its states",
        "megatron/optimizer/numbered/test_numbered:test_a_dense_optimizer_is_what_a_run_at_the_target_would_save",
    ),
    15: (
        "tied, PP n→1 drops the copy",
        "megatron/optimizer/numbered/test_numbered:test_a_dense_optimizer_is_what_a_run_at_the_target_would_save",
    ),
    16: (
        "tied copies differ",
        "megatron/extras/test_random_states:test_tied_copies_that_differ_name_both_files_or_the_first_is_taken",
    ),
    17: (
        "untied output layer moves",
        "megatron/reshard/test_matrix:test_resharded_files_equal_those_that_megatron_saved",
    ),
    18: (
        "VPP on and off",
        "megatron/reshard/test_matrix:test_resharded_files_equal_those_that_megatron_saved",
    ),
    19: (
        "uneven stages, empty chunks",
        "megatron/reshard/test_uneven:test_uneven_layouts_of_golden_weights",
    ),
    20: ("PP2 with VPP and both ends given", "megatron/model/test_stages:test_layers_per_chunk"),
    21: (
        "counts do not add up",
        "megatron/model/test_stages:test_distributions_that_do_not_fit_are_refused",
    ),
    22: (
        "embedding and loss count",
        "megatron/reshard/test_layouts:test_stages_that_count_embedding_and_loss",
    ),
    23: ("multi-token prediction", "megatron/rules/test_kinds:test_rank_files_are_megatrons"),
    24: (
        "mp_rank_00_001 is PP or EP",
        "megatron/placement/test_naming:test_one_name_is_read_by_the_arguments",
    ),
    25: (
        "names contradict the arguments",
        "megatron/placement/test_naming:test_names_of_other_sizes_are_listed",
    ),
    26: (
        "dense shards absent",
        "megatron/placement/test_naming:test_dense_shards_that_older_megatron_left_out_are_named",
    ),
    27: (
        "ETP above TP",
        "megatron/placement/test_naming:test_ranks_that_would_share_a_file_are_refused",
    ),
    28: (
        "diagonal ranks as target",
        "megatron/placement/test_naming:test_only_pairs_of_ranks_that_exist_are_written",
    ),
    29: (
        "EP sizes",
        "megatron/model/test_sizes:test_experts_that_do_not_divide_list_the_sizes_that_do",
    ),
    30: (
        "ETP changes alone",
        "megatron/rules/test_experts:test_any_layout_of_experts_becomes_any_other",
    ),
    31: (
        "EP 1→2: an optimizer for experts",
        "megatron/optimizer/numbered/test_numbered:test_experts_come_to_an_optimizer_of_their_own_and_back",
    ),
    32: (
        "legacy grouped experts",
        "megatron/reshard/test_to_ranks:test_grouped_experts_become_the_single_ones_that_megatron_saved",
    ),
    33: (
        "weight10 behind weight9",
        "megatron/rules/test_experts:test_the_tenth_expert_stands_behind_the_ninth",
    ),
    34: (
        "kinds of experts keep their names",
        "megatron/rules/test_experts:test_any_layout_of_experts_becomes_any_other",
    ),
    35: (
        "router bias in fp32",
        "megatron/rules/test_experts:test_a_router_bias_keeps_its_precision_of_its_own",
    ),
    36: (
        "fp32 parameters in a bf16 model",
        "megatron/optimizer/numbered/test_numbered:test_a_dense_optimizer_is_what_a_run_at_the_target_would_save",
    ),
    37: (
        "frozen parameters",
        "megatron/optimizer/numbered/test_numbered:test_frozen_parameters_have_no_numbers",
    ),
    38: (
        "groups in another order",
        "megatron/optimizer/test_groups:test_ranks_may_list_groups_in_any_order_and_leave_empty_ones_out",
    ),
    39: (
        "empty groups",
        "megatron/optimizer/numbered/test_numbered:test_empty_groups_are_listed_or_left_out_as_the_source_has_it",
    ),
    40: (
        "dense optimizer in some files only",
        "megatron/optimizer/flat/test_read:test_optimizers_that_other_ranks_hold_are_taken_from_them",
    ),
    41: (
        "several buckets",
        "megatron/optimizer/flat/test_read:test_buckets_that_the_arguments_do_not_tell_are_discovered_with_a_note",
    ),
    42: (
        "shared embedding",
        "megatron/optimizer/flat/test_buffers:test_a_shared_embedding_is_a_bucket_of_its_own_and_the_gap_before_it_counts",
    ),
    43: (
        "buckets not coalesced",
        "megatron/optimizer/flat/test_read:test_files_from_before_buckets_were_coalesced_are_read",
    ),
    44: (
        "buffers of fp8",
        "megatron/optimizer/flat/test_read:test_contents_that_contradict_the_model_are_refused",
    ),
    45: (
        "steps differ",
        "megatron/optimizer/numbered/test_numbered:test_steps_that_differ_between_ranks_are_an_error",
    ),
    46: (
        "extra states",
        "megatron/extras/test_extra_states:test_states_that_differ_become_empty_with_a_note",
    ),
    47: (
        "other implementation's names on request",
        "megatron/placement/test_implementation:test_there_and_back_gives_the_first_files_again",
    ),
    48: ("names of megatron.legacy", "megatron/placement/test_old_names:test_shared_embeddings"),
    49: (
        "checkpoint_version 0 and 1",
        "megatron/placement/test_old_names:test_rows_of_an_old_version_are_put_in_order",
    ),
    50: (
        "down projections whole or cut",
        "megatron/reshard/test_latent_attention:test_any_size_to_any_other_that_divides",
    ),
    51: ("Mamba", "megatron/reshard/test_more_kinds:test_groups_of_mamba_limit_the_sizes"),
    52: (
        "hybrid pattern with cuts",
        "megatron/reshard/test_more_kinds:test_a_pattern_cuts_the_stages_and_is_cut_anew",
    ),
    53: ("views", "megatron/reshard/test_odd_tensors:test_views_are_read_by_their_strides"),
    54: (
        "one big storage",
        "megatron/reshard/test_odd_tensors:test_one_storage_for_all_parameters_of_a_rank",
    ),
    55: ("every dtype", "megatron/reshard/test_odd_tensors:test_every_dtype_is_moved_bit_by_bit"),
    56: (
        "no element, one element",
        "megatron/reshard/test_odd_tensors:test_tensors_of_no_and_of_one_element",
    ),
    57: (
        "device tags",
        "megatron/reshard/test_odd_tensors:test_tensors_of_a_device_are_read_without_it",
    ),
    58: (
        "above 4 GiB",
        "formats/torch/test_zip:test_records_beyond_4_gib_are_placed_as_torch_places_them",
    ),
    59: (
        "61 layers in 16 stages",
        "megatron/model/test_stages:test_layers_that_do_not_divide_name_the_sizes_and_the_options_that_do",
    ),
    60: (
        "PP alone",
        "megatron/reshard/test_matrix:test_resharded_files_equal_those_that_megatron_saved",
    ),
    61: (
        "buckets at another TP",
        "megatron/optimizer/sharded/test_read:test_buckets_become_fully_reshardable",
    ),
    62: (
        "reformulated shapes",
        "megatron/optimizer/sharded/test_read:test_reformulated_states_without_their_true_shapes_are_refused",
    ),
    63: (
        "random states of torch_dist",
        "megatron/reshard/test_to_torch_dist:test_torch_dist_can_be_cut_anew_and_keeps_its_random_states",
    ),
    64: (
        "rank of adapters",
        "megatron/reshard/test_more_kinds:test_the_rank_of_adapters_limits_the_sizes",
    ),
    65: (
        "a layer is missing or too many",
        "megatron/reshard/test_from_ranks:test_arguments_that_contradict_the_shapes_are_corrupt",
    ),
    66: (
        "unknown name",
        "megatron/reshard/test_layouts:test_an_unknown_tensor_is_reported_with_its_shapes",
    ),
    67: ("two rules fit", "verbs/convert/test_explain:test_a_users_row_is_named"),
    68: (
        "in = out",
        "megatron/placement/test_naming:test_source_and_existing_destinations_stay_as_they_are",
    ),
    69: (
        "the tracker leads nowhere",
        "megatron/placement/test_naming:test_a_tracker_without_its_iteration_is_named_and_others_are_offered",
    ),
    70: ("a plan alone", "end_to_end/test_scale:test_the_bench_runs_at_a_tiny_size"),
}


@cache
def _functions(module: str) -> frozenset[str]:
    tree = ast.parse((TESTS / f"{module}.py").read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_the_cases_are_seventy() -> None:
    assert list(CASES) == list(range(1, 71))


@pytest.mark.parametrize("number", CASES)
def test_a_case_has_its_test(number: int) -> None:
    module, _, function = CASES[number][1].partition(":")
    assert function in _functions(module)
