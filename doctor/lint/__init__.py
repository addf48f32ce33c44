"""Static analysis of training scripts and launch files: what hangs, diverges or wastes memory on several ranks.

A rule over Python is one file in ``checks/doctor_checks/code/``: a function over a ``Script``
(``python/script.py``: the tree, with names resolved to their imports or definitions) that yields ``Violation``.
It needs at least three ``FileFails`` cases, whose reported lines end with ``# !``, three ``FilePasses`` cases (the
corrected script, and code that a simple rule would report), and a page in ``playbooks/``.
``python -m pytest tests/lint/test_registry.py -k "metadata or CODE011"`` tests the rule CODE011. Then run
``python benchmarks/lint.py --hits`` over real sources and read every violation: nine of ten must be right.

A rule over launch files finds a fault that a check finds before or during a run. It is in
``checks/doctor_checks/rules/<family>/``, in a file with the name of the check's, so that a run imports nothing of this
package: ``@rule(check=world_size_disagrees, reads=LaunchFile, cases=...)`` above ``world_size_disagrees_in_files()``.
It has the id and name of the check, and by default its severity, question, effect and fix.
"""
