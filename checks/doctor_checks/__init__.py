"""The built-in checks: one folder a family, one module a check, named after the fault; rules of ``doctor lint`` are in
``code`` and ``rules``."""
