"""Pure functions over facts and jobs that several checks or rooms share."""
