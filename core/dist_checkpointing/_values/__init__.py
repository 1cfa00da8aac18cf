"""Conversion of live Python values to inert trees and back, by a table of safe constructors.

Nothing is unpickled. Start at ``objects``; ``constructors`` is the table, and objects of unknown
classes become a ``stand_in``.
"""
