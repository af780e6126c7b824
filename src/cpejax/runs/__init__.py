"""Runs: model and data files, a run's folder and its stages, the report, and the command `cpejax`.

Of these only the report, `cpe.report`, is for Python users too; all else that they need belongs further up.
"""
