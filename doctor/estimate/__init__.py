"""An estimate of the peak memory of a rank, from one traced training step that needs neither a GPU nor the weights.

``tracer_client.py`` starts a child process (``tracer_main.py``). The child calls the user's factory in a fake-tensor
mode and runs one step (``tracing/train_step.py``) under a recorder (``tracing/storage_recorder.py``,
``tracing/ledger.py``, ``memory/caching_allocator.py``). ``memory/strategies.py``, ``memory/fsdp.py`` and
``memory/zero.py`` add the cost of data parallelism.

``estimator.py`` turns the trace into an estimate without torch, with ``batch_search.py``, ``suggestions.py``,
``host_memory.py`` and ``device_budget.py``. ``python benchmarks/estimate.py`` compares estimates with measured peaks;
on a host with a GPU, ``--device cuda`` writes ``benchmarks/estimate_<machine>.json``.
"""
