"""A real TCP relay that cuts the connection after so many bytes towards the client."""

from __future__ import annotations

import contextlib
import socket
import threading


class CuttingProxy:
    """Relays to `port`; `cut_after` bytes towards the client close everything, once or always."""

    def __init__(self, port: int, cut_after: int, always: bool = False) -> None:
        self._target = port
        self._cut_after: int | None = cut_after
        self._always = always
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.cuts = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            for source, sink, cut in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._pump, args=(source, sink, cut), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, cut: bool) -> None:
        passed = 0
        try:
            while data := source.recv(1 << 16):
                left = None if self._cut_after is None else self._cut_after - passed
                if cut and left is not None and len(data) >= left:
                    sink.sendall(data[:left])
                    self.cuts += 1
                    self._cut_after = self._cut_after if self._always else None
                    break
                sink.sendall(data)
                passed += len(data)
        except OSError:
            pass
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
