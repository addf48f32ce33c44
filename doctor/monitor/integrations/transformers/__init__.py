"""The callback of Hugging Face Trainer."""
