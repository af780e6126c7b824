"""The user's model: reading a NumPyro program, its graph, the inverse of the graph, and simulating from it.

Networks, training and coordinates do not belong here.
"""
