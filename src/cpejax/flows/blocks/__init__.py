"""The paper's own flows: block matrices over scalar parameters, masked by the posterior program.

What other flows need as well belongs one folder up.
"""
