"""CK2xx to CK6xx: geometry, layout, optimizer, common state, trackers, indexes, safety.

Start at ``geometry`` and ``layout``; ``unsafe`` says what a pickle would do to who loads it.
Imports: containers, the modules of checks, and what they may.
"""
