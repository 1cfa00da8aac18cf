"""Live Python values as inert trees and back, by a table of safe constructors; nothing is unpickled.

Start at ``objects``; ``constructors`` is the table, ``stand_in`` what unknown classes become.
Imports: the documented modules, and all of core below.
"""
