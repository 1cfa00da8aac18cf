"""The same conversion by several ranks: the lead prepares and publishes, all copy.

Start at ``run``; ``share`` is what one worker does of the stored plan.
Imports: convert, convert.stored_plan, copy, device, errors, files, fingerprint, manifest,
megatron.reshard, plan, stage, team.
"""
