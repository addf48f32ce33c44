"""Rules about code that wastes GPU memory."""
