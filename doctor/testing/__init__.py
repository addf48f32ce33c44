"""Cases of checks: jobs built by hand, and the pairs of passing and failing variants."""
