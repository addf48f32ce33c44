"""Reads the processes of a running job from outside: which ranks run here, where each stands, and whether it moves."""
