"""Facts about how the job was started: launcher, scheduler, rank variables."""
