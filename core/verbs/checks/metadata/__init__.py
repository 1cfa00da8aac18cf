"""CK2xx–CK6xx: geometry, layout, optimizer, common state, trackers, indexes, safety.

Start at ``geometry`` and ``layout``; ``unsafe`` finds pickles that would run code when loaded.
"""
