"""What is computed of the elements of arrays: NaN and infinities, differences, tallies.

Start at ``facts`` (for ``validate``) and ``difference`` (for ``diff``); both are sums, so that threads and ranks may
add in any order.
Imports: arrays, catalog, device.
"""
