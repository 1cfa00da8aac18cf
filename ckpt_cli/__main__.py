"""``python -m ckpt_cli`` is the same as ``ckpt``."""

from __future__ import annotations

import sys

from ckpt_cli.app import main

if __name__ == "__main__":
    sys.exit(main())
