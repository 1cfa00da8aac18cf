"""What other programs import from dist_checkpointing is there, documented or not.

Looked up in November 2026 in public repositories; names that only copies of the package itself use
are left out, and so are those that came after megatron-core 0.16 (``async_strategy``,
``verify_checkpoint``, ``save_common``, …).
"""

from __future__ import annotations

import importlib

import pytest

USERS: dict[str, dict[str, str]] = {
    "Megatron-LM, Megatron-Bridge": {
        "core": "CheckpointingException CheckpointingConfig maybe_load_config save_config",
        "mapping": "ShardedObject ShardedStateDict ShardedTensorFactory "
        "LocalNonpersistentObject ReplicaId",
        "serialization": "StateDict get_default_load_sharded_strategy "
        "get_default_save_sharded_strategy",
        "strategies.async_utils": "AsyncCallsQueue AsyncRequest",
        "strategies.filesystem_async": "FileSystemWriterAsync _results_queue",
        "strategies.fully_parallel": "FullyParallelLoadStrategyWrapper "
        "FullyParallelSaveStrategyWrapper",
        "strategies.torch": "TorchDistLoadShardedStrategy TorchDistSaveShardedStrategy "
        "MCoreLoadPlanner",
        "tensor_aware_state_dict": "MCoreTensorAwareStateDict",
        "utils": "_clean_metadata_for_serialization extract_nonpersistent "
        "replace_prefix_for_sharding",
        "validation": "StrictHandling parse_strict_flag verify_checkpoint_and_load_strategy",
    },
    "NeMo": {
        "dict_utils": "extract_matching_values dict_list_map_outplace nested_values",
        "optimizer": "get_param_id_to_sharded_param_map make_sharded_optimizer_tensor "
        "optim_state_to_sharding_state",
        "strategies.base": "SaveShardedStrategy LoadShardedStrategy AsyncSaveShardedStrategy",
        "strategies.state_dict_saver": "save_state_dict_async_plan save_state_dict_async_finalize",
        "strategies.tensorstore": "TensorStoreLoadShardedStrategy",
        "strategies.torch": "_replace_state_dict_keys_with_sharded_keys "
        "mcore_to_pyt_state_dict MCoreSavePlanner",
    },
    "verl, SkyRL, slime": {
        "exchange_utils": "ShardDistribution determine_main_replica_uniform_distribution "
        "exchange_by_distribution",
        "serialization": "StrictHandling",
        "strategies.base": "async_calls",
        "strategies.checkpointable": "CheckpointableShardedTensor LocalShardsContainer",
        "strategies.fully_parallel": "distribute_main_replicas_with_precomputed_distribution",
        "strategies.torch": (
            "_replace_sharded_keys_with_state_dict_keys _restore_dict_types "
            "_unwrap_pyt_sharded_tensor"
        ),
        "utils": "_sharded_object_id _sharded_tensor_shard_id _ShardId debug_time",
        "validation": "determine_global_metadata validate_sharding_integrity",
    },
    "ModelOpt, ml-flashpoint": {
        "state_dict_utils": "save_preprocess load_preprocess",
        "strategies.common": "COMMON_STATE_FNAME TorchCommonLoadStrategy TorchCommonSaveStrategy",
    },
}
"""Program → module of the package → names."""


@pytest.mark.parametrize(
    ("module", "names"),
    [
        pytest.param(*row, id=f"{user}:{row[0]}")
        for user, modules in USERS.items()
        for row in modules.items()
    ],
)
def test_names_that_other_programs_import_are_there(module: str, names: str) -> None:
    imported = importlib.import_module(f"core.dist_checkpointing.{module}")
    assert [name for name in names.split() if not hasattr(imported, name)] == []
