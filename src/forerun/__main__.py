"""The command ``forerun``, also as ``python -m forerun``."""

import signal


def main() -> None:
    """Runs the command. Until its modules are imported, Ctrl-C ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from forerun.cli.main import main as begin

    begin()


if __name__ == "__main__":
    main()
