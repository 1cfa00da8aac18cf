"""Requests to object stores: how many are in flight, when they are repeated, and how they end.

Start at ``repeat``, which also adapts the number of requests to what a store can take. ``waiting``
runs blocking calls so that a signal can end the wait (``ending`` has its state), ``traffic``
counts, ``client_settings`` sorts the options of a user.
"""
