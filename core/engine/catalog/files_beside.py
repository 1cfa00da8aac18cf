"""Names of files beside the weights, and the reasons for not carrying such files over."""

from __future__ import annotations

ADAPTER_CONFIG = "adapter_config.json"
"""The configuration of an adapter that peft wrote."""
FILES_BESIDE = "files beside the weights"
"""The reason for not carrying these files over."""
UNREAD = "other files of the directory"
"""The reason for not carrying files over that no reader opened."""
