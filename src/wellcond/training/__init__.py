"""Arms, seeds and statistics over the Hugging Face Trainer."""
