"""``python -m forerun`` is ``forerun``."""

from forerun.cli.main import main

main()
