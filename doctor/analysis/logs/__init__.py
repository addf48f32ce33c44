"""Log events of a job: their order, the first failure, and how the run ended."""
