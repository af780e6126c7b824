"""The ancestral flow, exact and the default: each node of the posterior program is a flow of its own.

What other flows need as well belongs one folder up.
"""
