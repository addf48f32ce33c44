"""Stacks of processes that a tool read from outside: bounded, masked threads, and the output of py-spy."""
