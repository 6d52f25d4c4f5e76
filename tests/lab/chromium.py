"""Headless Chromium by its DevTools protocol, over the pipe that it offers: Python needs nothing more."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time

PATIENCE = 30


class Chromium:
    def __init__(self):
        name = next((name for name in ("chromium", "chromium-browser", "google-chrome") if shutil.which(name)), None)
        if name is None:
            raise SystemExit("chromium is not installed: apt-get install chromium")
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        reads, self.write = os.pipe()
        self.read, writes = os.pipe()

        def numbered():
            # The pipe's ends are to be 3 and 4 there; first out of each other's way.
            ours = os.dup(reads), os.dup(writes)
            os.dup2(ours[0], 3)
            os.dup2(ours[1], 4)

        self.process = subprocess.Popen(
            [name, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
             "--disable-background-networking", "--disable-dev-shm-usage", "--remote-debugging-pipe",
             f"--user-data-dir={self.folder.name}"],
            preexec_fn=numbered, close_fds=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        os.close(reads)
        os.close(writes)
        self.buffer, self.number, self.events = b"", 0, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()

    def take(self):
        while b"\0" not in self.buffer:
            piece = os.read(self.read, 1 << 16)
            if not piece:
                raise SystemExit("chromium has ended")
            self.buffer += piece
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def call(self, method, session=None, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.take()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise SystemExit(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def page(self, url, width=1280, height=800, dark=False, scale=1):
        return Page(self, url, width, height, dark, scale)


class Page:
    def __init__(self, chromium, url, width, height, dark, scale):
        self.chromium = chromium
        target = chromium.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = chromium.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.size(width, height, scale)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"}])
        self.call("Page.navigate", url=url)

    def call(self, method, **parameters):
        return self.chromium.call(method, session=self.session, **parameters)

    def size(self, width, height, scale=1):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                  mobile=False)

    def run(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise SystemExit(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, script, patience=PATIENCE):
        end = time.monotonic() + patience
        while time.monotonic() < end:
            found = self.run(script)
            if found:
                return found
            time.sleep(0.1)
        raise SystemExit(f"waited in vain for {script}")

    def press(self, key):
        text = {"Enter": "\r", " ": " "}.get(key)
        code = {"Enter": 13, "Tab": 9, " ": 32, "Escape": 27}[key]
        more = {"text": text} if text else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def complaints(self):
        """What the page's console has of errors, refused fetches included."""
        found = []
        for event in self.chromium.events:
            if event.get("sessionId") != self.session:
                continue
            details = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(details["exceptionDetails"]["text"])
            elif event["method"] == "Log.entryAdded" and details["entry"]["level"] == "error":
                found.append(f"{details['entry']['text']} {details['entry'].get('url', '')}")
        return found

    def shot(self, path, whole=True):
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self.clip(whole))
        path.write_bytes(base64.b64decode(picture["data"]))

    def clip(self, whole):
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
