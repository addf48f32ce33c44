"""Rules of ``doctor lint`` that find the fault of a check in a file: one folder a family, one module a check."""
