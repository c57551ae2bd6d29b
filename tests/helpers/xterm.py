"""A program on a pseudo-terminal that behaves as xterm does: it has a size, answers questions about the cursor, and
marks pasted text only after the program has asked for that."""

import os
import pty
import re
import select
import struct
from time import monotonic

import pyte

BRACKETED_PASTE = 2004 << 5
"""As pyte keeps private modes."""


class _Screen(pyte.HistoryScreen):
    def __init__(self, columns, rows, answer):
        super().__init__(columns, rows, history=100_000)
        self.write_process_input = answer


class Xterm:
    def __init__(self, warm, arguments, columns=100, rows=30, term="xterm-256color", **options):
        """``warm``, ``arguments``, ``options``: as in ``warm.Warm.start``."""
        import fcntl
        import termios

        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        around = {**dict.fromkeys(("COLUMNS", "LINES", "NO_COLOR")), "TERM": term}
        self.process = warm.start(arguments, slave, slave, slave, terminal=True, **around, **options)
        os.close(slave)
        self.screen = _Screen(columns, rows, self.type)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.start = 0
        """The first line that ``wait`` looks at."""

    def type(self, text):
        os.write(self.master, text.encode())

    def paste(self, text):
        """Line ends are what the Enter key sends. A mark within the text cannot end it, as in xterm."""
        text = text.replace("\x1b", "").replace("\n", "\r")
        self.type(f"\x1b[200~{text}\x1b[201~" if BRACKETED_PASTE in self.screen.mode else text)

    def lines(self):
        """Everything shown so far, down to the cursor."""
        screen = self.screen
        rows = [*screen.history.top, *(screen.buffer[row] for row in range(screen.cursor.y + 1))]
        return ["".join(row[column].data for column in range(screen.columns)).rstrip() for row in rows]

    def read(self, seconds):
        """Shows what comes. False if nothing does, or the program has closed the terminal."""
        if not select.select([self.master], [], [], max(0.0, seconds))[0]:
            return False
        try:
            data = os.read(self.master, 65536)
        except OSError:
            return False
        self.raw += data
        self.stream.feed(data)
        return True

    def wait(self, pattern, seconds=120):
        """The text from the line where the last wait ended to what matches."""
        end = monotonic() + seconds
        while True:
            lines = self.lines()
            text = "\n".join(lines[self.start :])
            if result := re.search(pattern, text, re.DOTALL):
                self.start = len(lines) - 1
                return text[: result.end()]
            assert self.read(end - monotonic()), "\n".join(lines)

    def ended(self, seconds=30):
        """The exit code, once everything is shown."""
        while self.read(seconds):
            pass
        return self.process.wait(seconds)

    def close(self):
        self.process.close()
        os.close(self.master)
