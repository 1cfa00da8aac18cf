"""``scripts/bench NAME …``: run one of the benches."""

from __future__ import annotations

import sys
from importlib import import_module

BENCHES = {
    "conversions": "inspect, convert and reshard beside cp and the converters of others (the "
    "default)",
    "validate": "validate beside reading the files",
    "diff": "diff beside torch.equal over two loaded checkpoints",
    "reading": "core.open beside safetensors' safe_open",
    "fingerprint": "fingerprints beside checksums",
    "explore": "ckpt explore of 100,000 tensors: time to the names, pauses of the screen",
    "scale": "plans and inspections of checkpoints of real models' sizes, as sparse files",
    "api": "core.dist_checkpointing beside torch's and megatron-core's own",
    "launch": "several workers beside several threads",
    "stores": "checkpoints in an object store: bytes, requests, speed and memory",
    "device": "per-byte work on an accelerator beside the processor",
}


def main() -> int:
    """Run the bench that the first argument names; options alone are for the default."""
    name, *arguments = sys.argv[1:] or ["conversions"]
    if name in ("-h", "--help"):
        print(
            "usage: scripts/bench [NAME] [OPTIONS]; scripts/bench NAME --help lists the "
            "options of one.\n"
        )
        print("\n".join(f"  {bench:12} {what}" for bench, what in BENCHES.items()))
        return 0
    if name.startswith("-"):
        name, arguments = "conversions", [name, *arguments]
    if name not in BENCHES:
        print(f"scripts/bench: {name!r} is none of: {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    sys.argv = [f"scripts/bench {name}", *arguments]
    return import_module(f"scripts.benchmarks.{name}").main() or 0


if __name__ == "__main__":
    sys.exit(main())
