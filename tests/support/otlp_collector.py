"""A receiver of spans by OTLP/HTTP."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue


class Collector(ThreadingHTTPServer):
    """Keeps what it receives. hangs: it accepts requests and does not answer until released."""

    daemon_threads = True

    def __init__(self, *, hangs: bool = False) -> None:
        received = self.received = SimpleQueue[tuple[str, bytes]]()
        self.released = released = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                if hangs:
                    released.wait(30.0)
                received.put((self.path, self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()
