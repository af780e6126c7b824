"""The ways in which values are written for a network: prior coordinates, supports, vectors, standard scales.

Maps belong here that are set by the program or by simulations; nothing here is trained.
"""
