"""Gathers the facts of all ranks into one job, with a timeout, over any store.

A process finds its identity in the environment, plans how to gather, connects to a store, and there either coordinates
the gather or takes part as a member. Messages and their order are the same for every store backend.
"""
