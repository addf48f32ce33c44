"""How the ranks of a run that is watched find out that it does not go on, and which of them judges.

Each rank has one daemon thread. It leaves its facts on a board where the others see them (a store, by a connection of
its own, or a folder), and looks there for alarms. Read from the outside in: ``sentinel.py`` is what an adapter calls,
``duty.py`` what the thread does, beat by beat: ``admission.py`` (how ranks come to the same place), ``meetings.py``
(before the first batch, and at the end), ``alarms.py`` (standing still, exceptions), ``rounds.py`` (in between). All of
these hold a ``hearing.py``: one question that all ranks answer and one judges. They stand on ``station.py``: what this
rank has (``own.py``, ``records.py``), what it knows of the others (``ward.py``, ``bystander.py``, ``on_demand.py``) and
what carries it there (``lines.py``, ``way.py``).
"""
