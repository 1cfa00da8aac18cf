"""Conversion and resharding: format, layout, plan, copy and staging directory meet here only.

Start at ``job`` (the options), ``prepare`` (decides and proves, copies nothing) and ``run`` (copies
the bytes). ``global_form`` and ``target_form`` are the two halves of prepare; ``contract`` checks
a third party's format.
"""
