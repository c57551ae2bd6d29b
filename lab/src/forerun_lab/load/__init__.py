"""How many replicas a load needs: arrivals, a replica's rounds, the fleet, the search."""
