"""What speculation costs and brings on given models and prompts: benchmark, plan and check."""
