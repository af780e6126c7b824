"""The benchmark: every method on every task, run by Snakemake, in one table with figures and a page.

What belongs here: the methods under their names, the jobs of the workflow (`Snakefile` says what is made of what), the
table of results, its figures and its page. What does not: tasks and metrics, which are packages of their own, and
results, which are in the folder that `cpejax bench` is given.
"""
