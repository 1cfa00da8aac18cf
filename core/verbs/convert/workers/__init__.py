"""Conversion with several workers: the lead prepares and publishes, all copy.

Start at ``run``; ``share`` copies one worker's share of the stored plan.
"""
