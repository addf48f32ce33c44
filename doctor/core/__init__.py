"""What every room uses: facts, jobs, findings, checks, captures, reports, and how files are opened."""
