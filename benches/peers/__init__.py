"""Sets sconce beside what people use instead; see `run`."""
