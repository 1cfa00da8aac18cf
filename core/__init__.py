"""The checkpoint engine; see core/README.md."""
