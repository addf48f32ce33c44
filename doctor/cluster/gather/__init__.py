"""N ranks to one job, with a deadline: by torch's store, a shared folder, Ray, or alone.

A process finds its *seat* in the environment, chooses a *way*, *joins* a *board*, and there *keeps* a gathering or
*attends* one. The messages and the order of things are the same whatever carries the board.
"""
