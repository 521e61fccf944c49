"""`python -m tfdp` is the command `tfdp`."""

from tfdp.cli import main

main()
