"""What happens in a run, recorded beside it. Knows no framework: adapters tell it what they see.

What is called on the step path appends to memory and does nothing else: no I/O, no synchronising, no collective.
"""
