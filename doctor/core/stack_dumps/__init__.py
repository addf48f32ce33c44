"""Stacks read from outside (threads, py-spy), dumps of the flight recorder, and conditions in the source."""
