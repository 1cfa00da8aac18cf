"""The values of options: their parsers (``values``), and what two of them mean."""
