"""Stacks of processes that a tool read from outside: threads, the output of py-spy, and conditions in the source."""
