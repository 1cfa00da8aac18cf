"""Options of Megatron-LM, Megatron-Bridge, NeMo, verl, torchrun and others that people try, and what to say instead.

They are no options of ``ckpt``: most of them mean something slightly different there, so they are refused, with the
name that does the work here. Names are as ``ckpt`` sees them, with ``-`` for ``_``.
"""

from __future__ import annotations

_ANY_SIZE = "the data-parallel and context-parallel sizes are no part of a checkpoint's layout here: leave it out"
_FORMAT = "say --to torch_dist, --to megatron (rank files) or --to zarr; the format of SRC is found by itself"
_PLACE = "say: ckpt COMMAND SRC DST"
_VPP = "say --vpp-new N, the number of model chunks a pipeline stage (Megatron's layers per chunk are another number)"
_RNG = (
    "say --rng drop to leave random states out; --no-load-rng is for the Megatron run that loads a result without them"
)
_OPTIM = "say --no-optim; --no-load-optim is for the Megatron run that loads a result without the optimizer"
_FULL = "leave it out: the distributed optimizer is always written as fully_reshardable in torch_dist"
_KIND = "leave it out: the optimizer stays of the kind that it is; which kind that is says ckpt inspect"

INSTEAD: dict[str, str] = {
    **dict.fromkeys(
        ("-t", "--tp-size", "--tensor-parallel-size", "--target-tp-size", "--target-tensor-model-parallel-size"),
        "say --tp-new N",
    ),
    **dict.fromkeys(
        ("-p", "--pp-size", "--pipeline-parallel-size", "--target-pp-size", "--target-pipeline-model-parallel-size"),
        "say --pp-new N",
    ),
    **dict.fromkeys(
        ("--ep-size", "--moe-ep-size", "--expert-parallel-size", "--target-expert-model-parallel-size"),
        "say --ep-new N",
    ),
    **dict.fromkeys(("--etp-size", "--moe-tp-size", "--target-expert-tensor-model-parallel-size"), "say --etp-new N"),
    **dict.fromkeys(("--source-tp", "--source-tensor-parallel-size", "--src-tp"), "say --tp N, or leave it out"),
    **dict.fromkeys(
        (
            *("--num-layers-per-virtual-pipeline-stage", "--target-num-layers-per-virtual-pipeline-stage"),
            *("--num-virtual-stages-per-pipeline-rank", "--virtual-pipeline-parallel-size"),
        ),
        _VPP,
    ),
    **dict.fromkeys(
        ("--dp-new", "--dp", "--data-parallel-size", "--cp", "--cp-new", "--cp-size", "--context-parallel-size"),
        _ANY_SIZE,
    ),
    **dict.fromkeys(("--no-load-optim", "--no-save-optim"), _OPTIM),
    **dict.fromkeys(("--no-load-rng", "--no-save-rng", "--no-rng"), _RNG),
    **dict.fromkeys(
        ("--dist-ckpt-optim-fully-reshardable", "--fully-reshardable", "--dist-ckpt-optim-fully-reshardable-mem-eff"),
        _FULL,
    ),
    "--use-distributed-optimizer": _KIND,
    **dict.fromkeys(
        (
            *("--load", "--save", "--load-dir", "--save-dir", "--input", "--megatron-path", "--checkpoint-folder"),
            *("--path-to-save", "--local-dir", "--target-dir", "--model-dir", "--output-dir"),
        ),
        _PLACE,
    ),
    **dict.fromkeys(
        (
            "--ckpt-format",
            "--ckpt-convert-format",
            "--loader",
            "--saver",
            "--backend",
            "--from",
            "--auto-detect-ckpt-format",
        ),
        _FORMAT,
    ),
    "--ckpt-step": "say --iteration N",
    "--level": "say --headers or --deep; without either, it is the metadata level",
    "--overwrite": "say --force",
    "--true-vocab-size": "say --vocab-size N",
    "--export-dtype": "say --dtype",
    "--verify-integrity": "say --verify",
    **dict.fromkeys(
        ("--max-workers", "--num-workers", "--workers", "--num-threads", "--num-processes"), "say --threads N"
    ),
    **dict.fromkeys(
        ("--no-checking", "--not-strict", "--non-strict", "--dist-ckpt-strictness"),
        "leave it out: what does not fit is refused by name, with the option that decides",
    ),
}
"""Name → what to say instead."""

_NO_SCRIPT = (
    "leave it out: ckpt launch runs commands of ckpt, as in ckpt launch -- convert SRC DST --to dcp; "
    "other programs are torchrun's"
)
_LOGS = "say --log-dir DIR to keep all logs, and --tee N or --redirects N for which go where"

OF_TORCHRUN: dict[str, str] = {
    **dict.fromkeys(("-m", "--module", "--no-python", "--run-path"), _NO_SCRIPT),
    "--numa-binding": "say --bind numa, a NUMA node for each worker, or --bind cores",
    **dict.fromkeys(("--local-ranks-filter", "--logs-specs", "--event-log-handler"), _LOGS),
    **dict.fromkeys(("--duplicate-stdout-filters", "--duplicate-stderr-filters"), _LOGS),
    "--start-method": "leave it out: each worker is a new process",
    "--signals-to-handle": "leave it out: SIGINT, SIGTERM and SIGHUP end all workers",
    "--virtual-local-rank": "leave it out: worker N of a host uses its GPU N",
    **dict.fromkeys(("--nproc", "--num-processes", "--num-workers", "-n", "-np"), "say --nproc-per-node N"),
    **dict.fromkeys(("--num-nodes", "--num-machines", "-N"), "say --nnodes N"),
    **dict.fromkeys(
        ("--main-process-ip", "--machine-rank", "--hostfile"), "say --rdzv-endpoint HOST:PORT on each host"
    ),
}
"""The same for ``ckpt launch``: options of torchrun that it does not have, and of accelerate, deepspeed and mpirun."""
