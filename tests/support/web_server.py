"""A web server in a thread."""

import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def web_server(reply, tls=None):
    """Serve, with TLS where there is a context of it; yields the URL. `reply` calls `request.answer`."""

    class Request(BaseHTTPRequestHandler):
        def do_GET(self):
            reply(self, self.rfile.read(int(self.headers.get("Content-Length", 0))))

        do_HEAD = do_POST = do_GET

        def answer(self, status, content, headers=None, *, seconds_a_byte=0):
            self.send_response(status)
            for name, value in {"Content-Length": len(content), **(headers or {})}.items():
                if value is not None:
                    self.send_header(name, str(value))
            self.end_headers()
            step = 1 if seconds_a_byte else max(1, len(content))
            for start in range(0, len(content) if self.command != "HEAD" else 0, step):
                self.wfile.write(content[start : start + step])
                time.sleep(seconds_a_byte)

        def log_message(self, *args):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args):
            if not isinstance(sys.exc_info()[1], OSError):  # the client has gone
                super().handle_error(*args)

    with Server(("127.0.0.1", 0), Request) as server:
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
