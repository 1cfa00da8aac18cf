"""The version of the project, which manifests and reports record."""

__version__ = "0.1.0"
