"""Several replicas of an engine behind one API. ``pool`` and ``affinity`` know nothing of Ray; ``cluster`` does."""
