"""`python -m asyncrl.cli`."""

from asyncrl.cli import main

main()
