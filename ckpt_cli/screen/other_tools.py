"""Options of Megatron-LM, Megatron-Bridge, NeMo, verl, torchrun and other tools, with what to use
instead.

They are not options of ``ckpt``, as most of them mean something slightly different in those tools;
they are refused with a hint that names the option to use. Names are as ``ckpt`` sees them, with
``-`` for ``_``.
"""

from __future__ import annotations

_ANY_SIZE = "leave it out: a checkpoint's layout does not depend on the data-parallel and context-parallel sizes"
_FORMAT = (
    "use --to torch_dist, --to megatron (rank files) or --to zarr; the format of SRC is detected"
)
_PLACE = "use ckpt COMMAND SRC DST"
_VPP = "use --vpp-new N, the number of model chunks per pipeline stage (not Megatron's number of layers per chunk)"
_RNG = "use --rng drop to leave out random states; the Megatron run that loads the result then needs --no-load-rng"
_OPTIM = "use --no-optim; the Megatron run that loads the result then needs --no-load-optim"
_FULL = "leave it out: torch_dist always gets the distributed optimizer as fully_reshardable"
_KIND = "leave it out: the kind of optimizer does not change; ckpt inspect shows which kind it is"

OPTION_HINTS: dict[str, str] = {
    **dict.fromkeys(
        (
            "-t",
            "--tp-size",
            "--tensor-parallel-size",
            "--target-tp-size",
            "--target-tensor-model-parallel-size",
        ),
        "use --tp-new N",
    ),
    **dict.fromkeys(
        (
            "-p",
            "--pp-size",
            "--pipeline-parallel-size",
            "--target-pp-size",
            "--target-pipeline-model-parallel-size",
        ),
        "use --pp-new N",
    ),
    **dict.fromkeys(
        (
            "--ep-size",
            "--moe-ep-size",
            "--expert-parallel-size",
            "--target-expert-model-parallel-size",
        ),
        "use --ep-new N",
    ),
    **dict.fromkeys(
        ("--etp-size", "--moe-tp-size", "--target-expert-tensor-model-parallel-size"),
        "use --etp-new N",
    ),
    **dict.fromkeys(
        ("--source-tp", "--source-tensor-parallel-size", "--src-tp"), "use --tp N, or leave it out"
    ),
    **dict.fromkeys(
        (
            *(
                "--num-layers-per-virtual-pipeline-stage",
                "--target-num-layers-per-virtual-pipeline-stage",
            ),
            *("--num-virtual-stages-per-pipeline-rank", "--virtual-pipeline-parallel-size"),
        ),
        _VPP,
    ),
    **dict.fromkeys(
        (
            "--dp-new",
            "--dp",
            "--data-parallel-size",
            "--cp",
            "--cp-new",
            "--cp-size",
            "--context-parallel-size",
        ),
        _ANY_SIZE,
    ),
    **dict.fromkeys(("--no-load-optim", "--no-save-optim"), _OPTIM),
    **dict.fromkeys(("--no-load-rng", "--no-save-rng", "--no-rng"), _RNG),
    **dict.fromkeys(
        (
            "--dist-ckpt-optim-fully-reshardable",
            "--fully-reshardable",
            "--dist-ckpt-optim-fully-reshardable-mem-eff",
        ),
        _FULL,
    ),
    "--use-distributed-optimizer": _KIND,
    **dict.fromkeys(
        (
            *(
                "--load",
                "--save",
                "--load-dir",
                "--save-dir",
                "--input",
                "--megatron-path",
                "--checkpoint-folder",
            ),
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
    "--ckpt-step": "use --iteration N",
    "--level": "use --headers or --deep; the default is the metadata level",
    "--overwrite": "use --force",
    "--true-vocab-size": "use --vocab-size N",
    "--export-dtype": "use --dtype",
    "--verify-integrity": "use --verify",
    **dict.fromkeys(
        ("--max-workers", "--num-workers", "--workers", "--num-threads", "--num-processes"),
        "use --threads N",
    ),
    **dict.fromkeys(
        ("--no-checking", "--not-strict", "--non-strict", "--dist-ckpt-strictness"),
        "leave it out: every mismatch is an error that names the option to resolve it",
    ),
}
"""Option of another tool → hint."""

_NO_SCRIPT = (
    "leave it out: ckpt launch only runs ckpt commands, as in ckpt launch -- convert SRC DST --to dcp; "
    "use torchrun for other programs"
)
_LOGS = "use --log-dir DIR to keep all logs, and --tee N or --redirects N to choose where they go"

TORCHRUN_OPTION_HINTS: dict[str, str] = {
    **dict.fromkeys(("-m", "--module", "--no-python", "--run-path"), _NO_SCRIPT),
    "--numa-binding": "use --bind numa (a NUMA node for each worker) or --bind cores",
    **dict.fromkeys(("--local-ranks-filter", "--logs-specs", "--event-log-handler"), _LOGS),
    **dict.fromkeys(("--duplicate-stdout-filters", "--duplicate-stderr-filters"), _LOGS),
    "--start-method": "leave it out: each worker is a new process",
    "--signals-to-handle": "leave it out: SIGINT, SIGTERM and SIGHUP stop all workers",
    "--virtual-local-rank": "leave it out: worker N of a host uses its GPU N",
    **dict.fromkeys(
        ("--nproc", "--num-processes", "--num-workers", "-n", "-np"), "use --nproc-per-node N"
    ),
    **dict.fromkeys(("--num-nodes", "--num-machines", "-N"), "use --nnodes N"),
    **dict.fromkeys(
        ("--main-process-ip", "--machine-rank", "--hostfile"),
        "use --rdzv-endpoint HOST:PORT on each host",
    ),
}
"""Option of torchrun that ``ckpt launch`` does not have, or of accelerate, deepspeed or mpirun →
hint."""
