"""Python programs in processes of their own that start at once: forked from a process that has imported torch already.

An interpreter that imports torch and makes an optimizer takes three seconds of processor time for that. :func:`start` and :func:`run`
ask a server, which one test process starts once, for a fork that becomes the program: its own ``__main__``, arguments, environment,
directory and streams, and an interpreter that ends as any other does. torch, its compiler and torch_gradmon are imported there; a test
of what an import loads needs a fresh interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, NoReturn

_ROOT = Path(__file__).parent.parent
#: One thread in each program, as in the tests; libgomp reads it when torch is imported.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


# --- in a test -------------------------------------------------------------------------------------------------------------------


class Program:
    """A program that runs.

    Attributes:
        pid: of its process.
        returncode: of the program that has ended, as :mod:`subprocess` has it; None before :meth:`poll` or :meth:`wait` saw that.
        stdout: what it prints, where no streams were given to :func:`start`.
    """

    def __init__(self, connection: Connection, stdout: IO[str] | None) -> None:
        self._connection = connection
        self.pid: int = connection.recv()
        self.returncode: int | None = None
        self.stdout = stdout

    def poll(self, seconds: float = 0.0) -> int | None:
        """The exit code, if it ends within ``seconds``."""
        if self.returncode is None and self._connection.poll(seconds):
            self.returncode = self._connection.recv()
            self._connection.close()
        return self.returncode

    def wait(self, timeout: float = 240.0) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired("a forked program", timeout)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """End it at once, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self.stdout is not None:
            self.stdout.close()


def start(
    program: str | Path,
    *arguments: object,
    streams: Sequence[int] | None = None,
    cwd: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    terminal: bool = False,
) -> Program:
    """Start ``program``.

    Args:
        program: source text, or the path of a file.
        arguments: those in ``sys.argv`` behind its name.
        streams: descriptors that become 0, 1 and 2 of the process, where the caller closes its own; without them nothing can be read,
            what is printed goes to :attr:`Program.stdout`, and errors to those of the test.
        cwd: where it runs; here without it.
        environment: all of it; that of the test without it.
        terminal: the first stream is a terminal, and becomes that of a session of its own.
    """
    whole = {**(os.environ if environment is None else environment), **_ENVIRONMENT}
    request = (program, [*map(str, arguments)], os.fspath(cwd or Path.cwd()), whole, terminal)
    if streams is not None:
        return Program(_asked(request, streams), None)
    with open(os.devnull, "rb") as nothing:
        reader, writer = os.pipe()
        connection = _asked(request, [nothing.fileno(), writer, 2])
        os.close(writer)
    return Program(connection, os.fdopen(reader, encoding="utf-8"))


def _asked(request: tuple[Any, ...], streams: Sequence[int]) -> Connection:
    asked = socket.socket(socket.AF_UNIX)
    asked.connect(_server())
    socket.send_fds(asked, [b"3"], streams)
    connection = Connection(asked.detach())
    connection.send(request)
    return connection


def run(
    program: str | Path,
    *arguments: object,
    cwd: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """Run ``program`` to its end, and take what it prints; the arguments are those of :func:`start`."""
    with contextlib.ExitStack() as files:
        nothing, output, error = (files.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        streams = [file.fileno() for file in (nothing, output, error)]
        with start(program, *arguments, streams=streams, cwd=cwd, environment=environment) as started:
            code = started.wait(timeout)
        return subprocess.CompletedProcess([str(program), *map(str, arguments)], code, _text(output), _text(error))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", errors="replace").replace("\r\n", "\n")


_started: dict[int, str] = {}


def _server() -> str:
    """The address of this process's server."""
    if os.getpid() not in _started:
        directory = (
            tempfile.mkdtemp()
        )  # a TemporaryDirectory would go when a fork of the test runs what is registered for its end
        address = str(Path(directory) / "server")
        command = [sys.executable, "-W", "ignore:Failed to initialize NumPy:UserWarning", "-m", "tests.forked", address]
        server = subprocess.Popen(
            command, cwd=_ROOT, env={**os.environ, **_ENVIRONMENT}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        atexit.register(_end, os.getpid(), server, directory)
        _started[os.getpid()] = address
    return _started[os.getpid()]


def _end(pid: int, server: subprocess.Popen[bytes], directory: str) -> None:
    if os.getpid() != pid:  # the server is the parent's
        return
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.close()  # which ends it
    server.stdout.close()
    server.wait()
    shutil.rmtree(directory)


# --- in the server ---------------------------------------------------------------------------------------------------------------


def _serve(address: str) -> tuple[Any, ...]:
    """Fork for each request; only the forks that are to become a program return, with what they were asked for."""
    import torch

    sys.modules["triton"] = None  # type: ignore[assignment]  # which writes to stderr when a process ends that has imported it
    import torch._dynamo  # which the first optimizer in a process imports

    import torch_gradmon  # noqa: F401

    del sys.modules["triton"]
    torch.set_num_threads(1)
    gc.freeze()  # a fork that ends touches fewer pages then
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while listener in wait([listener, sys.stdin.buffer]):
            asked, _ = listener.accept()
            _, streams, _, _ = socket.recv_fds(asked, 1, 3)
            connection = Connection(asked.detach())
            request = connection.recv()
            if os.fork() == 0:
                listener.close()
                if (pid := os.fork()) == 0:
                    connection.close()
                    return (*request, streams)
                _report(connection, pid)
            connection.close()
            for descriptor in streams:
                os.close(descriptor)
            with contextlib.suppress(ChildProcessError):  # those that have reported
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    with contextlib.suppress(ChildProcessError):
        while os.wait():
            pass
    sys.exit()


def _report(connection: Connection, pid: int) -> NoReturn:
    """Tell the test the program's process, and how that ended."""
    with contextlib.suppress(BrokenPipeError):
        connection.send(pid)
        connection.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def _prepare(
    program: str | Path, arguments: list[str], cwd: str, environment: dict[str, str], terminal: bool, streams: list[int]
) -> types.CodeType:
    """Make this process that of the program; what there is to execute."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has ignored by what it starts in the background
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    for descriptor in streams:
        if descriptor > 2:
            os.close(descriptor)
    if terminal:
        import fcntl
        import termios

        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    text, sys.argv, sys.path[0] = program, ["-c", *arguments], ""
    if isinstance(program, Path):
        main.__file__ = str(program)
        text, sys.argv, sys.path[0] = program.read_text(encoding="utf-8"), [str(program), *arguments], str(program.parent)
    return compile(text, getattr(main, "__file__", "<string>"), "exec", dont_inherit=True)


if __name__ == "__main__":
    _code = _prepare(*_serve(sys.argv[1]))
    exec(_code, vars(sys.modules["__main__"]))
