"""The same conversion by several ranks: the lead prepares and publishes, all copy.

Start at ``run``; ``share`` is what one worker does of the stored plan.
Imports: stored_plan, and what convert may.
"""
