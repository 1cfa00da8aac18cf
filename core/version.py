"""The version of the project, which manifests and reports record."""

__version__ = "0.1.0"
TOOL = f"ckpt-toolkit {__version__}"
"""The writing software, as manifests record it."""
