"""What every package needs and that is about no model: keys, files, and the cores of a machine.

Nothing here knows of programs, flows or posteriors.
"""
