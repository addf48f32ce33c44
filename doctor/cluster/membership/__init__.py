"""Agreement of processes that share a store on a leader and on members, for gathers and watchdogs.

A leader announces itself under a key that all know, with a nonce that no earlier run has used. Every process that reads
a new announcement posts a join request below that nonce (``leadership.py``). The leader writes a heartbeat
(``heartbeat.py``); if it stops, another process replaces the announcement. The outcome is published below the nonce;
all that have read it acknowledge that, because the store may end with the leader. Messages are in ``protocol.py``.
"""
