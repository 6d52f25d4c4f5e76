"""The status page in headless Chromium: live figures, the mode's switch by keyboard, other sites' pages, a narrow window, 200 workers."""

import http.server
import pathlib
import sys
import threading
import urllib.error
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "lab"))

from chromium import Chromium  # noqa: E402
from fleet import Engines, Load, Proxy, Store, get_json, until  # noqa: E402

failures = 0


def expect(holds, what):
    global failures
    failures += not holds
    print(f"{'ok  ' if holds else 'FAIL'} {what}")


ROWS = "document.querySelectorAll('#workers tr').length"
PRESSED = "document.querySelector('#mode [aria-pressed=true]')?.dataset.mode"
FOCUS = "document.activeElement.textContent"


def live(chromium, proxy):
    page = chromium.page(f"{proxy.admin}/")
    page.until(f"{ROWS} === 3")
    expect(page.run(PRESSED) == "kv", "the mode is shown")
    with Load(proxy.clients, prefixes=6, threads=4, output=16):
        page.until("document.querySelectorAll('#workers .hits span')[0].textContent.includes('%')", 60)
        page.until("document.querySelector('#hits path').getAttribute('d').includes('L')", 60)
        expect(True, "figures and charts follow the load without a reload")
        first = page.run("document.querySelector('#ttft svg').getAttribute('aria-label')")
        page.until("!document.getElementById('recent').hidden && document.querySelectorAll('#decisions tr').length > 5", 60)
        reasons = page.run("[...document.querySelectorAll('#decisions td[data-label=Reason]')].map((cell) => cell.textContent)")
        expect("warm" in reasons, f"recent decisions show with their reasons {sorted(set(reasons))}")
        page.until("document.querySelectorAll('#map tbody tr').length === 6", 60)
        held = page.run("[...document.querySelectorAll('#map tbody td .unseen')].filter((cell) => cell.textContent !== 'none').length")
        expect(held >= 6, f"each of the six prefixes lives somewhere ({held} places)")
        expect("predicted hits" in first and "ms" in first, f"charts say in words what they show: {first}")
    return page


def switch_by_keyboard(page, proxy):
    page.run("document.querySelector('#mode button[data-mode=kv]').focus()")
    page.press("Tab")
    expect(page.run(FOCUS) == "random", "the other mode is one Tab on")
    page.press("Enter")
    page.until("document.getElementById('confirm').open")
    expect(page.run(FOCUS) == "Leave it", "the question stands with the focus on what changes nothing")
    page.press("Enter")
    page.until("!document.getElementById('confirm').open")
    expect(get_json(f"{proxy.admin}/mode")["mode"] == "kv", "nothing is switched without a yes")
    page.press("Enter")
    page.until("document.getElementById('confirm').open")
    page.press("Tab")
    page.press("Enter")
    page.until(f"{PRESSED} === 'random'")
    expect(get_json(f"{proxy.admin}/mode")["mode"] == "random", "with a yes it is")
    expect("random is in force" in page.run("document.getElementById('news').textContent"), "and said to screen readers")
    proxy.set_mode("kv")
    page.until(f"{PRESSED} === 'kv'")
    expect(True, "a switch by somebody else shows")
    expect(page.run("document.getElementById('split').hidden"), "no split is told where there is none")
    proxy.configure("split: {share: 0.25}")
    page.until("document.getElementById('split').textContent === '25 % of prompts go by random'")
    proxy.configure("")
    page.until("document.getElementById('split').hidden")
    expect(True, "a split is told for as long as it is in force")


def troubles(chromium, engines):
    """What is wrong beside the workers themselves."""
    with Store() as store, Proxy(engines.urls, store.config(), found="dns: [{name: nobody.invalid, port: 8000}]") as proxy, \
            Proxy(engines.urls, store.config()):
        page = chromium.page(f"{proxy.admin}/")
        page.until("document.getElementById('sharing')?.textContent.startsWith('sharing: 1 other (')")
        page.until("document.getElementById('faults').textContent.includes('dns:nobody.invalid')")
        expect(True, "whom it shares with is told, and a source that cannot be heard")
        store.stop()
        page.until("document.getElementById('sharing').hidden && document.querySelectorAll('#faults li').length === 2")
        said = page.run("document.querySelectorAll('#faults li')[1].textContent")
        expect("goes on alone" in said, f"and that the store is away: {said}")
        expect(not page.complaints(), f"the console is silent {page.complaints()}")


def names(page):
    """What a screen reader has to name: buttons, tables, charts, the field to find by."""
    page.call("Accessibility.enable")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    unnamed = [node["role"]["value"] for node in nodes
               if not node["ignored"] and node["role"]["value"] in ("button", "table", "image", "img", "searchbox", "link", "dialog")
               and not node.get("name", {}).get("value")]
    expect(not unnamed, f"everything that acts or shows has a name {unnamed}")


def other_site(chromium, proxy):
    class Site(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<title>another site</title>")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        page = chromium.page(f"http://127.0.0.1:{site.server_port}/")
        page.until("document.title === 'another site'")
        # Sent without a preflight, as a form would.
        page.run(f"fetch('{proxy.admin}/workers/x/drain', {{method: 'POST', mode: 'no-cors'}}).then(() => 1, () => 0)")
        page.run(f"fetch('{proxy.admin}/mode', {{method: 'PUT', body: 'random'}}).then(() => 1, () => 0)")
        worker = get_json(f"{proxy.admin}/fleet")["workers"][0]["name"]
        page.run(f"fetch('{proxy.admin}/workers/{worker}/drain', {{method: 'POST', mode: 'no-cors'}}).then(() => 1, () => 0)")
        fleet = get_json(f"{proxy.admin}/fleet")
        expect(fleet["mode"] == "kv" and fleet["workers"][0]["state"] == "up", "a page of another site turns nothing")
        site.shutdown()


def narrow(page):
    for width in (1280, 760, 360):
        page.size(width, 740)
        wide = page.run("document.documentElement.scrollWidth")
        expect(wide <= width, f"at {width} pixels nothing sticks out ({wide})")


def gone(page, proxy):
    # The other site's page lies before it, and a page that is hidden asks for nothing.
    page.call("Page.bringToFront")
    proxy.process.kill()
    proxy.process.wait()
    page.until("document.getElementById('news').classList.contains('bad')", 40)
    expect("No answer since" in page.run("document.getElementById('news').textContent"), "a proxy that is gone is told")


def many(chromium):
    with Engines(200) as engines, Proxy(engines.urls) as proxy:
        page = chromium.page(f"{proxy.admin}/")
        page.until(f"{ROWS} === 200", 60)
        found = page.run("(() => { const find = document.getElementById('find'); find.value = 'drain'; "
                         "find.dispatchEvent(new Event('input')); return document.getElementById('none').hidden })()")
        expect(found is False, "with 200 workers, those that are looked for are told apart")
        name = engines.urls[150].removeprefix("http://")
        asked = urllib.request.Request(f"{proxy.admin}/workers/{name}/drain", method="POST")
        urllib.request.urlopen(asked).close()
        page.until("[...document.querySelectorAll('#workers tr')].filter((row) => !row.hidden).length === 1")
        expect(True, "and the one that is drained comes up")
        spent = page.run("(async () => { const begun = performance.now(); const fleet = await (await fetch('fleet')).json(); "
                         "return [fleet.workers.length, performance.now() - begun] })()")
        print(f"     /fleet of {spent[0]} workers came in {spent[1]:.0f} ms")
        page.size(360, 740)
        expect(page.run("document.documentElement.scrollWidth") <= 360, "200 workers fit a narrow window")
        expect(not page.complaints(), f"the console is silent {page.complaints()}")


with Chromium() as chromium:
    with Engines(3) as engines, Proxy(engines.urls) as proxy:
        page = live(chromium, proxy)
        switch_by_keyboard(page, proxy)
        names(page)
        narrow(page)
        other_site(chromium, proxy)
        expect(not page.complaints(), f"the console is silent {page.complaints()}")
        gone(page, proxy)
        troubles(chromium, engines)
    many(chromium)

sys.exit(1 if failures else 0)
