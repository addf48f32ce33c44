"""Active measurements: reachability, bandwidth, collectives, devices and storage of a job.

Light probes run between hosts: one process of each host has a ``Responder``, ``plan_light`` assigns the connections,
and every agent runs ``probe_light`` at the same time. The results are facts, which checks judge like any others.

A stage of ``--probe full`` is a class with two methods (``base.py``). ``plan`` runs on the coordinator: from the
results so far it decides which process measures what next, and it is called until it returns nothing, so that a
suspicion can be confirmed before it becomes a finding. ``take_part`` runs in every process and returns sections of
facts (:mod:`doctor.core.facts.probe_results`). A stage is one line in ``cluster/gather/probe_schedule.py``;
``tests/cluster/test_probe_schedule.py`` shows one.

Bytes, seconds and concurrent measurements are bounded and announced before they start. Calls of torch or a driver run
in the child process of ``runtime/torch_child.py``, which can be killed. ``analysis/fabric/localization/localizer.py``
decides which host or link is at fault; ``python benchmarks/isolation.py`` measures how often it is right.
"""
