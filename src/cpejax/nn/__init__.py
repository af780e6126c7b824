"""Layers that several flows share: activations, linear layers, features of time, attention, embeddings of data.

Nothing here knows of programs, sites or posteriors.
"""
