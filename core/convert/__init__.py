"""Converting and resharding: the only place where format, layout, plan, copy and stage meet.

Start at ``job`` (what is asked), ``prepare`` (decides and proves, moves nothing) and ``run`` (moves the bytes).
``global_form`` and ``target_form`` are the two halves of prepare; ``contract`` is what a third party's format is tested
by.
Imports: stage, manifest, opening, and all below.
"""
