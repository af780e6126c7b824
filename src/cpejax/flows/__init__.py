"""The flows: how each method turns noise and data into parameters, its loss and its density.

What is done with any flow alike (training, drawing in chunks, saving) belongs to `inference`.
"""
