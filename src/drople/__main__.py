"""`python -m drople`: what launchers of several processes call (`torchrun -m drople fit ...`)."""

from drople.cli import main

main()
