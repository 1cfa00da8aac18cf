"""The proven plan as a file that every worker reads, and its division over the workers.

Start at ``file``; ``codec`` encodes it without pickle, ``division`` divides it over workers and
hosts.
"""
