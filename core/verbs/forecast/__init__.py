"""Forecast of a conversion, for ``--dry-run``: the free space, and the time to expect.

Start at ``forecast``; ``disk_rates`` measures how fast the two disks are, ``destination`` looks at
what exists already.
"""
