"""A private fine-tuning job on text that every Python carries: nothing to download.

The private data are the docstrings of the standard library (one docstring is one privacy unit); the public data are the
language reference topics behind `help()`. A small GPT-2 trained on the public part alone is shipped with the package.
"""
