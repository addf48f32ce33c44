"""The built-in checks: one folder a family, one module a check, named after the fault."""
