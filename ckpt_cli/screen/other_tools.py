"""Commands and options of other tools, with those of ``ckpt`` to use instead.

The tools are Megatron-LM, Megatron-Bridge, NeMo, verl, torchrun, accelerate, deepspeed and mpirun.
Most of these options mean something slightly different there, so ``ckpt`` does not accept them as
aliases: it refuses them with a hint. Options are spelled with ``-`` for ``_``.
"""

from __future__ import annotations

ZERO_HINT = (
    "for a DeepSpeed ZeRO checkpoint: ckpt convert SRC DST --to deepspeed_universal, which loads "
    "on any number of GPUs (with load_universal)"
)
"""What to do instead of resharding files that depend on the number of data-parallel ranks."""

_COMMANDS = (
    ("ls list show info cat head tree stat describe summary print", "use ckpt inspect PATH"),
    ("check verify fsck lint doctor test", "use ckpt validate PATH"),
    ("cp copy export import save transform translate consolidate", "use ckpt convert SRC DST"),
    ("cast dtype", "use ckpt convert SRC DST --dtype DTYPE"),
    ("quantize", "use ckpt convert SRC DST --quantize block"),
    (
        "unshard join",
        (
            "use ckpt reshard SRC DST --tp-new 1 --pp-new 1 for one rank, "
            "or ckpt convert SRC DST --to safetensors"
        ),
    ),
    ("split shard repartition resize", "use ckpt reshard SRC DST --tp-new N --pp-new N"),
    ("compare cmp", "use ckpt diff A B"),
    ("hash checksum sha256sum fingerprint sign", "use ckpt manifest PATH"),
    ("run torchrun", "use ckpt launch -- COMMAND ARGS"),
    ("version", "use ckpt --version"),
)
"""Commands of other tools and likely guesses, separated by spaces; hint."""

COMMAND_HINTS = {command: hint for commands, hint in _COMMANDS for command in commands.split()}
"""Command that ``ckpt`` lacks → hint."""

_HINTS = (
    # Parallel sizes.
    (
        "-t --tp-size --tensor-parallel-size --target-tp-size --target-tensor-model-parallel-size",
        "use --tp-new N",
    ),
    (
        (
            "-p --pp-size --pipeline-parallel-size --target-pp-size "
            "--target-pipeline-model-parallel-size"
        ),
        "use --pp-new N",
    ),
    (
        "--ep-size --moe-ep-size --expert-parallel-size --target-expert-model-parallel-size",
        "use --ep-new N",
    ),
    (
        "--etp-size --moe-tp-size --target-expert-tensor-model-parallel-size",
        "use --etp-new N",
    ),
    (
        "--source-tp --source-tensor-parallel-size --src-tp",
        "use --tp N, or omit it",
    ),
    (
        (
            "--num-layers-per-virtual-pipeline-stage "
            "--target-num-layers-per-virtual-pipeline-stage "
            "--num-virtual-stages-per-pipeline-rank --virtual-pipeline-parallel-size"
        ),
        (
            "use --vpp-new N, the number of model chunks per pipeline stage "
            "(not Megatron's number of layers per chunk)"
        ),
    ),
    (
        (
            "--dp --dp-new --dp-size --data-parallel-size --world-size "
            "--cp --cp-new --cp-size --context-parallel-size"
        ),
        (
            "omit it, because Megatron and DCP checkpoints load with any data-parallel and "
            f"context-parallel size; {ZERO_HINT}"
        ),
    ),
    # Optimizer and random states.
    (
        "--only-optim --optim-only --optimizer-only",
        (
            "use --include 'optim*' --to torch for the optimizer alone; "
            "ckpt inspect --optim shows its keys"
        ),
    ),
    (
        "--no-load-optim --no-save-optim",
        "use --no-optim; the Megatron run that loads the result then needs --no-load-optim",
    ),
    (
        "--no-load-rng --no-save-rng --no-rng",
        (
            "use --rng drop to omit random states; the Megatron run that loads the result then "
            "needs --no-load-rng"
        ),
    ),
    (
        (
            "--dist-ckpt-optim-fully-reshardable --fully-reshardable "
            "--dist-ckpt-optim-fully-reshardable-mem-eff"
        ),
        "omit it, because torch_dist always stores the distributed optimizer as fully_reshardable",
    ),
    (
        "--use-distributed-optimizer",
        "omit it, because the type of optimizer does not change; ckpt inspect PATH shows the type",
    ),
    # Paths and formats.
    (
        (
            "--load --save --load-dir --save-dir --input --megatron-path --checkpoint-folder "
            "--path-to-save --local-dir --target-dir --model-dir --output-dir"
        ),
        "use ckpt COMMAND SRC DST",
    ),
    (
        (
            "--ckpt-format --ckpt-convert-format --loader --saver --backend --from "
            "--auto-detect-ckpt-format"
        ),
        (
            "use --to torch_dist, --to megatron (rank files), --to hf or another format; "
            "the format of SRC is detected"
        ),
    ),
    # Everything else.
    ("--ckpt-step", "use --iteration N"),
    ("--level", "use --headers or --deep; by default only metadata is checked"),
    ("--overwrite", "use --force"),
    ("--true-vocab-size", "use --vocab-size N"),
    ("--export-dtype", "use --dtype"),
    ("--verify-integrity", "use --verify"),
    ("--check", "use ckpt validate PATH, which also compares with the manifest"),
    (
        "--max-workers --num-workers --workers --num-threads --num-processes",
        "use --threads N",
    ),
    (
        "--no-checking --not-strict --non-strict --dist-ckpt-strictness",
        "omit it, because each mismatch is an error that names the option that resolves it",
    ),
)
"""Options of other tools, separated by spaces; hint."""

OPTION_HINTS = {option: hint for options, hint in _HINTS for option in options.split()}
"""Option of another tool → hint; ``COMMAND`` in a hint stands for the command that was run."""

_LAUNCH_HINTS = (
    (
        "-m --module --no-python --run-path",
        (
            "omit it, because ckpt launch only runs ckpt commands, as in "
            "ckpt launch -- convert SRC DST --to dcp; use torchrun for other programs"
        ),
    ),
    ("--numa-binding", "use --bind numa (one NUMA node per worker) or --bind cores"),
    (
        (
            "--local-ranks-filter --logs-specs --event-log-handler --duplicate-stdout-filters "
            "--duplicate-stderr-filters"
        ),
        "use --log-dir DIR to keep all logs, and --tee N or --redirects N to choose the streams",
    ),
    ("--start-method", "omit it, because each worker is a new process"),
    ("--signals-to-handle", "omit it, because SIGINT, SIGTERM and SIGHUP stop all workers"),
    ("--virtual-local-rank", "omit it, because worker N on a host uses GPU N"),
    ("--nproc --num-processes --num-workers -n -np", "use --nproc-per-node N"),
    ("--num-nodes --num-machines -N", "use --nnodes N"),
    (
        "--main-process-ip --machine-rank --hostfile",
        "use --rdzv-endpoint HOST:PORT on each host",
    ),
)

TORCHRUN_OPTION_HINTS = {
    option: hint for options, hint in _LAUNCH_HINTS for option in options.split()
}
"""Option that ``ckpt launch`` lacks, of torchrun, accelerate, deepspeed or mpirun → hint."""
