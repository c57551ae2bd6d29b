"""Drafters of the literature that the engine does not choose itself, each an entry point ``forerun.drafters``."""
