"""Active measurements: reachability, bandwidth, collectives, devices and storage of a job.

Light probes run between hosts: one process of each host has a ``Responder``, ``plan_light`` assigns the connections,
and every agent runs ``probe_light`` at the same time. The results are facts, which checks judge like any others.
"""
