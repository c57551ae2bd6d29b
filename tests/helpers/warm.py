"""Programs that begin with forerun, torch and transformers imported, which saves seconds each: one process imports
them, and forks a child for every program. The child has file descriptors, environment and terminal of its own."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from importlib import import_module

IMPORTED = (
    "forerun.cli.chat_session", "forerun.cli.generate", "forerun.engine.llm", "forerun.engine.async_engine",
    "forerun.serve.app", "forerun.serve.run", "forerun.models.run.native", "forerun.speculate.draft.model",
    "transformers.models.auto.tokenization_auto", "transformers.models.llama.configuration_llama", "prompt_toolkit",
)  # fmt: skip
PROGRAM = "from forerun.cli.main import main; main()"


class Warm:
    """The process that forks."""

    def __init__(self):
        self.socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def start(self, arguments, stdin, stdout, stderr, *, code=PROGRAM, terminal=False, **environment):
        """Runs ``code`` with these arguments and, beside this process's, these variables."""
        ours, theirs = os.pipe()
        around = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
        told = json.dumps([["forerun", *arguments], around, terminal, code]).encode()
        self.socket.sendall(len(told).to_bytes(4, "big"))
        socket.send_fds(self.socket, [told], [stdin, stdout, stderr, theirs])
        os.close(theirs)
        return Child(ours)

    def run(self, *arguments, seconds=240, **options):
        """As ``subprocess.run`` with its output captured as text."""
        with open(os.devnull) as nothing, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = self.start(arguments, nothing.fileno(), out.fileno(), err.fileno(), **options)
            try:
                code = child.wait(seconds)
            finally:
                child.kill()
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess(arguments, code, out.read(), err.read())

    def piped(self, *arguments, **options):
        """One whose output, errors included, is the text of its ``stdout``."""
        ours, theirs = os.pipe()
        with open(os.devnull) as nothing:
            child = self.start(arguments, nothing.fileno(), theirs, theirs, **options)
        os.close(theirs)
        child.stdout = open(ours)  # noqa: SIM115
        return child

    def close(self):
        self.socket.close()
        self.process.wait(30)


class Child:
    """As a ``subprocess.Popen``."""

    def __init__(self, status):
        self.status, self.returncode, self.stdout = status, None, None
        self.pid = int(self._read(240))

    def _read(self, seconds):
        """A number of eight characters: the child's id, then how it ended."""
        return os.read(self.status, 8) if select.select([self.status], [], [], seconds)[0] else b""

    def wait(self, seconds):
        if self.returncode is None and (ended := self._read(seconds)):
            self.returncode = int(ended)
            os.close(self.status)
        assert self.returncode is not None, f"runs longer than {seconds} s"
        return self.returncode

    def poll(self):
        if self.returncode is None and select.select([self.status], [], [], 0)[0]:
            self.wait(0)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def close(self):
        self.kill()
        self.wait(30)
        if self.stdout is not None:
            self.stdout.close()


def forked(connection):
    """The code that a child is to run; here, in the child. Ends when nobody asks any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while length := connection.recv(4):
        told, handles, _, _ = socket.recv_fds(connection, int.from_bytes(length, "big"), 4)
        while len(told) < int.from_bytes(length, "big"):
            told += connection.recv(int.from_bytes(length, "big") - len(told))
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            *streams, status = handles
            if child := os.fork():  # waits for it, and tells how it ends
                for handle in (0, 1, 2, *streams):
                    os.close(handle)
                os.write(status, b"%8d" % child)
                os.write(status, b"%8d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                os._exit(0)
            os.close(status)
            arguments, around, terminal, code = json.loads(told)
            become(arguments, around, terminal, streams)
            return code
        for handle in handles:
            os.close(handle)
    os._exit(0)


def become(arguments, around, terminal, streams):
    os.setsid()
    for handle, stream in enumerate(streams):
        os.dup2(stream, handle)
        os.close(stream)
    if terminal:
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.environ.clear()
    os.environ.update(around)
    sys.argv = arguments
    for handle, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(handle, "w" if handle else "r", buffering=1 if os.isatty(handle) else -1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def main():
    from forerun.cli.console import quiet

    quiet()
    for name in IMPORTED:
        import_module(name)
    exec(forked(socket.socket(fileno=int(sys.argv[1]))), globals())  # as the code of ``__main__``


if __name__ == "__main__":
    main()
