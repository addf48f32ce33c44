"""The clock as it was when the package ``doctor`` was imported.

Programs and their tests replace ``time.monotonic`` and the others by counters or by lists of times, from which nobody
else may read. So all that runs in a training process has these functions from here.
"""

from time import monotonic, perf_counter, process_time, sleep, strftime, thread_time, time, time_ns

__all__ = ["monotonic", "perf_counter", "process_time", "sleep", "strftime", "thread_time", "time", "time_ns"]

# freezegun replaces these functions wherever a module has them, but not methods of theirs.
globals().update({name: globals()[name].__call__ for name in __all__})
