"""Publish a destination complete or not at all: staging directory, journal, locks, replacement.

Start at ``protocol``: what commands ask of a place to write to. ``stage`` shows what is on disk
at each step. ``journal`` is what ``--resume`` continues from, ``replacement`` implements
``--force``. The next run removes what a crash left behind (``Stage._begin``, ``stale``).

A save of ``core.dist_checkpointing`` goes into a directory that exists, whose name cannot be
changed, and keeps the same promises with entries in the place of names::

    promise             Stage                  BucketStage               a save
    one writer          folder_lock            destination_lock          folder_lock; an object
    metadata last       rename of the stage    record, then uploads      metadata.json, by a move
                                                                         or a conditional request
    old or new          replacement            record                    entries.json
    what a crash left   stale, journal         uploads, record           the next save
"""
