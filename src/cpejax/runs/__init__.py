"""Inference from the command line: model and data files, a run's folder and its stages, the report, the command.

What Python users need too belongs further up.
"""
