"""How sharded and common states are stored: one module a backend."""
