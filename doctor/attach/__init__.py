"""Reads the processes of a running job from outside: which ranks run here, where each stands, and whether it moves.

Start reading at ``targets.py``. ``processes.py`` reads the table of processes in one bounded pass; ``programs.py`` says
what each runs; ``process_marks.py`` reads what variables do not show (threads, libraries, connections).
``rank_search.py`` decides which processes are ranks, ``rank_numbers.py`` numbers them, and ``targets.py`` puts them
together to jobs, with their data workers and agents. ``sampler.py`` then reads each in several rounds, and
``host_reading.py`` does all of it for one host.
"""
