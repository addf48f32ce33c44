"""Readers of the logs, flight-recorder dumps and memory snapshots of a job, without torch.

``run_reader.py`` reads all inputs; ``logs/``, ``flight_recorder/``, ``memory_snapshot/``, ``nvidia_smi/`` and ``ras/``
read one kind each; ``run_grouping.py`` separates runs, and ``job_assembly.py`` builds the job of a run. Messages are
declared in ``doctor/knowledge/log_lines/`` (:mod:`doctor.knowledge.log_patterns`).

Inputs are never executed or rendered: pickles may hold plain values only, lines lose their escape sequences, and sizes
are bounded. ``python tests/fuzz/fuzz_readers.py logs`` fuzzes the readers with atheris.
"""
