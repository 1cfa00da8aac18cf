"""Strategies to store sharded and common states: one module per backend."""
