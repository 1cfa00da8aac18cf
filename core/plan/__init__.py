"""Plan: a source catalog and a target catalog become proven work. Nothing is read or written here.

Start at ``plan.make_plan``. ``match`` finds which source fills which part of one tensor and proves
that nothing is missing; ``positions`` knows where the arrays of the output files lie; ``items``
cuts the work into pieces for threads; ``box_reader`` reads any box through the same machinery.
Imports: arrays, catalog, errors, files.
"""
