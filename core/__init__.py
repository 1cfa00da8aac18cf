"""The checkpoint engine; see core/README.md."""

__version__ = "0.1.0"
