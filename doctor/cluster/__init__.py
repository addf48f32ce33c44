"""Exchange of facts between the processes of a job: transports, membership, rendezvous, gathering, Ray, host lists.

Reading order: ``gather/gather_session.py`` (one process, from start to exit), ``rendezvous/store_access.py`` (how it
reaches the store), ``membership/`` (how processes agree on a leader and on members, for gathers and watchdogs),
``gather/coordinator.py`` and ``gather/member.py`` (the two roles), and ``transport/``: ``store.py`` declares the store,
``tcp_store.py``, ``file_store.py`` and ``ray_store.py`` are its backends, and ``failover.py`` combines several
connections. A new backend implements ``StoreBackend`` (seven methods) and must pass ``tests/cluster/test_board.py``.
"""
