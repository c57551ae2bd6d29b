"""Several replicas of an engine behind one API. Only ``cluster`` and ``app`` import Ray."""
