"""From simulations to a posterior: training, fitting, drawing, densities, saving and loading.

It treats all flows alike; what is particular to one belongs to `flows`.
"""
