"""A result is visible completely or not at all: ``stage`` writes it, ``manifest`` describes it."""
