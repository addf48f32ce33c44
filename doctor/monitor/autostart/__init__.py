"""Watches training programs that ``doctor run`` starts, without an edit of them.

``launch.py`` puts the folder ``hook`` on PYTHONPATH and replaces the process by the command. Every interpreter below
the command imports ``hook/sitecustomize.py``, which calls an installer with each module of its table ``INSTALLERS``
that is imported: those of ``trainers.py`` give Lightning's and Hugging Face's Trainer the callback, those of
``torch_modules.py`` have ``plain_loop.py`` watch a loop around DistributedDataParallel or FSDP. A framework is added by
one entry of the table and one installer, a function of the imported module.

Installers change classes and functions, never objects of the program, and import nothing of the doctor that costs time
until a Trainer or a wrapped model is created.
"""
