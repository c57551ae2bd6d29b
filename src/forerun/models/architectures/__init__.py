"""Architectures as data: ``description.py`` has their parts, ``families.py`` a list; ``spec.py`` reads configs."""
