"""What every package needs and that is about no model: keys, files, the cores of a machine and its room for
compiled programs.

Nothing here knows of programs, flows or posteriors.
"""
