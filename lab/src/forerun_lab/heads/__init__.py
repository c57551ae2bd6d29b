"""Heads as they are trained: the engine's weights, with the passes over whole texts that training needs."""
