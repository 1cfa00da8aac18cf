"""The documented API of Megatron-Core's distributed checkpointing, on this project's engine; see core/README.md."""
