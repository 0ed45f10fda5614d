"""`python -m bicomm` is the `bicomm` command."""

from bicomm.cli import main

main()
