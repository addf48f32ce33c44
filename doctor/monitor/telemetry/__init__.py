"""Records a run beside it, independent of any framework: adapters call it.

Calls on the step path only append to memory: no I/O, no synchronization, no collective.
"""
