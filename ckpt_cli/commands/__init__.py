"""One module per command: parse the options, call one function of ``core``, print one page.

Start at ``validate`` or ``transfer`` (what convert and reshard share).
"""
