"""A proxy that takes a prefix off paths, as nginx does for `proxy_pass` to a URL that ends in a slash."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OF_A_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade"}


@contextmanager
def serving(prefix: str) -> Iterator[ThreadingHTTPServer]:
    """A proxy on a free port of 127.0.0.1 that sends on to its `upstream`, a port; other paths are 404."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if not self.path.startswith(f"{prefix}/"):
                self.send_error(404)
                return
            upstream = http.client.HTTPConnection("127.0.0.1", proxy.upstream, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in OF_A_HOP}
            upstream.request(self.command, self.path.removeprefix(prefix), body, headers)
            with upstream.getresponse() as answer:
                whole = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in OF_A_HOP | {"content-length", "date", "server"}:
                    self.send_header(name, value)
            if answer.status != 204:
                self.send_header("content-length", str(len(whole)))
            self.end_headers()
            self.wfile.write(whole)
            upstream.close()

        do_GET = do_POST = do_PUT = do_DELETE = pass_on

        def log_message(self, *_: object) -> None:
            pass

    class Proxy(ThreadingHTTPServer):
        daemon_threads = True
        upstream = 0

    proxy = Proxy(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
