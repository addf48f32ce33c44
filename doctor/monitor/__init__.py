"""Monitoring of a training run: framework integrations, telemetry, watchdog and sinks.

``integrations/`` has one adapter for each framework (``lightning/``, ``transformers/``, ``plain.py``). An adapter only
passes events to ``RankTelemetry`` (``telemetry/rank_telemetry.py``). ``watch_session.py`` is one process of a watched
run, ``evaluator.py`` runs the checks, ``watchdog/`` exchanges facts between the ranks, and ``sinks/`` write results.
:mod:`doctor.core.facts.telemetry` declares the facts of a run, :func:`doctor.testing.running` builds a healthy one for
cases, and :mod:`doctor.analysis.hang.diagnosis_rules` decides which rank caused a stall.

Code on the step path does no I/O, does not synchronize a device, calls no collective and draws no random number;
``python benchmarks/callback_cost.py`` measures its cost. Patches of torch or a framework are removed when the run ends.
"""
