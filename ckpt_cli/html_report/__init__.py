"""Reports as one self-contained HTML file: the builders, and the templates that they fill.

Start at ``page``, which renders a report, and ``inspect_report``.
"""
