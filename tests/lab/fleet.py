"""A fleet to look at: simulated workers, a warmroute before them, and load, all on free ports of this machine. Needs Python only.

`warmroute` is $WARMROUTE_BIN, else what `cargo build` has made."""

import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = os.environ.get("WARMROUTE_BIN") or str(ROOT / "target/debug/warmroute")
PATIENCE = 60


def until(what, holds, patience=PATIENCE):
    """What `holds` answers, once that is something."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        found = holds()
        if found:
            return found
        time.sleep(0.05)
    raise SystemExit(f"waited in vain for {what}")


def get(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def get_json(url):
    return json.loads(get(url))


class Child:
    """A program that ends with the block that started it."""

    def __init__(self, arguments, **options):
        self.process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, text=True, **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self, how=signal.SIGKILL):
        if self.process.poll() is None:
            self.process.send_signal(how)
        self.process.wait()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


class Store(Child):
    """A redis-server that keeps nothing, for routers that share what they place."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.key = pathlib.Path(self.folder.name) / "hash-key"
        self.key.write_text("one key for all of them\n")
        port = free_port()
        super().__init__(["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no",
                          "--dir", self.folder.name], stdout=subprocess.DEVNULL)
        self.url = f"redis://127.0.0.1:{port}"

        def listens():
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return True
            except OSError:
                return False

        until("the store to listen", listens)

    def config(self, more=""):
        """What a router that shares over it has in its config; `more` goes into `sharing`."""
        return f"cache: {{hash_key_file: '{self.key}'}}\nsharing: {{urls: ['{self.url}']{more and ', '}{more}}}"


class Engines(Child):
    def __init__(self, workers, *arguments):
        super().__init__(
            [BIN, "engine", "--port", "0", "--workers", str(workers), "--enable-prompt-tokens-details", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.urls = [self.process.stdout.readline().strip() for _ in range(workers)]
        if not all(self.urls):
            raise SystemExit("the engines did not start")


class Proxy(Child):
    """`config`: lines of YAML beside the addresses. `found`: what is under `workers` beside them. `port`: of the clients, by which
    routers that share call each other."""

    def __init__(self, urls, config="", mode="kv", found="", port=0):
        self.folder = tempfile.TemporaryDirectory()
        self.file = pathlib.Path(self.folder.name) / "warmroute.yaml"
        self.log = pathlib.Path(self.folder.name) / "log"
        self.urls, self.mode, self.found, self.port = urls, mode, found, port
        self.configure(config)
        super().__init__([BIN, "serve", "--config", str(self.file)], stderr=self.log.open("w"))
        said = until("the proxy to serve", lambda: re.search(r"clients=(\S+) admin=(\S+)", self.log.read_text()))
        self.clients, self.admin = (f"http://{address}" for address in said.groups())
        until("the workers to be up", lambda: all(
            worker["usable"] for worker in get_json(f"{self.admin}/fleet")["workers"]))

    def configure(self, config):
        workers = ", ".join(f"{{url: '{url}'}}" for url in self.urls)
        text = f"listen: 127.0.0.1:{self.port}\nadmin: 127.0.0.1:0\nmode: {self.mode}\nworkers: {{static: [{workers}]{self.found and ', '}{self.found}}}\n{config}\n"
        # Whole at once: the proxy follows the file.
        made = self.file.with_suffix(".new")
        made.write_text(text)
        made.rename(self.file)

    def set_mode(self, mode):
        asked = urllib.request.Request(f"{self.admin}/mode", method="PUT", data=mode.encode())
        urllib.request.urlopen(asked, timeout=30).close()

    def stop(self, how=signal.SIGKILL):
        super().stop(how)
        self.folder.cleanup()


WORDS = ("cache", "worker", "prefix", "token", "route", "block", "queue", "warm", "cold", "prompt", "answer", "batch")


def text(words, seed):
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) + str(draw.randrange(10)) for _ in range(words))


class Load:
    """Requests that share prefixes, sent by threads until told to stop; each on a connection of its own."""

    def __init__(self, url, prefixes=12, threads=8, words=900, output=64, pause=0.0, stream=True, model=None, seed=0):
        self.address = url.removeprefix("http://")
        self.prefixes = [text(words, seed) for seed in range(prefixes)]
        self.output, self.pause, self.stream, self.model = output, pause, stream, model
        self.sent = self.failed = 0
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(seed + number,), daemon=True) for number in range(threads)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        for thread in self.threads:
            thread.join(PATIENCE)

    def run(self, number):
        draw = random.Random(number)
        while not self.stopped.is_set():
            self.send(draw.choice(self.prefixes), text(60, draw.random()))
            self.stopped.wait(self.pause * draw.random() * 2)

    def send(self, prefix, tail):
        body = {"messages": [{"role": "system", "content": prefix}, {"role": "user", "content": tail}],
                "max_tokens": self.output}
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.model:
            body["model"] = self.model
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            self.failed += answer.status >= 500
        except OSError:
            self.failed += 1
        except http.client.HTTPException:
            self.failed += 1
        finally:
            connection.close()
            self.sent += 1
