"""The ``forerun`` command."""
