"""`python -m psrl` is the `psrl` program."""

from psrl.cli.main import main

main()
