"""Conversion with several workers: the lead prepares and publishes, all copy.

Start at ``run``; ``share`` copies one worker's share of the stored plan.
Imports: convert, convert.stored_plan, copy, core, device, errors, files, fingerprint, manifest,
megatron.reshard, plan, stage, stage.bucket, team.
"""
