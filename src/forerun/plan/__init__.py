"""What speculation costs and brings on given models and prompts, and which kind of it to use."""
