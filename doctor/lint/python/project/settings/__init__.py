"""Options, settings and configurations of a program: what declares them, and what gives them values."""
