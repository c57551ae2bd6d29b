"""Heads of the laboratory's drafters, trained for the bundled target."""
