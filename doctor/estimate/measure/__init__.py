"""The measured peak of one training step, in a child process."""
