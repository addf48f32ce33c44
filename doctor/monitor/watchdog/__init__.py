"""Detection and evaluation of hangs and failures across the ranks of a watched run.

Each rank has one daemon thread. It posts the facts of its rank to a store that all ranks read (a TCPStore, over a
connection of its own, or a folder) and polls it for incidents. Reading order: ``watchdog.py`` is the interface for
adapters; ``watchdog_loop.py`` is the thread's work, tick by tick: ``admission.py`` (how ranks agree on a namespace, by
:mod:`doctor.cluster.membership`), ``rounds/requested_rounds.py`` (before the first batch and at the end),
``incidents.py`` (stalls and exceptions), ``rounds/periodic_rounds.py`` (in between). All of these run a
``rounds/collection_round.py``: every rank reports and one evaluates. They share ``watchdog_context.py``: the local rank
(``local_state.py``, ``run_records.py``), the other ranks (``peer_table.py``, ``local_peers/``) and the connections to
them (``store_discovery.py``).
"""
