"""Models of torchtitan, with their optimizers: from its names to Hugging Face's.

Start at ``to_hf``; ``names`` has the tables, ``rows`` the order of rows in attention.
"""
