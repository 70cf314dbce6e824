"""Load under faults, and a checker of what is left: `python3 dev.py chaos`."""
