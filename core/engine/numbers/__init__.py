"""Numbers in arrays: NaN and infinities, differences between two arrays, and tallies of them.

Start at ``facts`` (for ``validate``) and ``difference`` (for ``diff``); both are sums, so that
threads and ranks may add in any order.
"""
