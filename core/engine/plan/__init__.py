"""Match a source catalog with a target catalog and prove the work; nothing is read or written here.

Start at ``plan.make_plan``. ``match`` finds which source fills which part of one tensor and proves
that nothing is missing; ``positions`` locates the arrays in the output files; ``items`` cuts the
work into items for threads; ``box_reader`` reads any box of a checkpoint with the same code.
"""
