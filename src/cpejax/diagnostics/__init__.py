"""Whether a posterior can be trusted: one file a check, and what runs them all.

Distances from a known posterior are in `metrics`.
"""
