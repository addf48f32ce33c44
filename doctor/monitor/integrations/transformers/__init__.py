"""The callback of the Hugging Face Trainer."""
