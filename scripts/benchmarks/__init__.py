"""What ``scripts/bench NAME`` measures: each module with a ``main`` is one NAME.

Start at ``conversions``, the ratios to ``cp`` and to the converters of others. ``measure`` runs a
command and says what it took; ``sources`` and ``scale_sources`` write the checkpoints that are
measured. Figures are ratios within one run.
Imports: core, and whatever is compared with.
"""
