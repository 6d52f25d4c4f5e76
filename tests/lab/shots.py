"""Makes the pictures in docs/screenshots: the status page, and the Grafana board as drawn by `board.html` from what a real Prometheus
answers (Grafana itself is in no package here). Six simulated workers, twelve prefixes of which each holds about four, first at
random, then routed by prefix; two routers before them, which tell each other what they place."""

import json
import math
import pathlib
import sys
import time
import urllib.parse

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "prometheus"))

from chromium import Chromium  # noqa: E402
from fleet import ROOT, Engines, Load, Proxy, Store, free_port, get_json  # noqa: E402
from server import BOARD, Prometheus, filled, legend  # noqa: E402

SHOTS = ROOT / "docs/screenshots"
SECONDS = int(sys.argv[1]) if len(sys.argv) > 1 else 360  # in each mode
STEP = 5


def asked(prometheus, panel, begun, now):
    found = []
    for target in panel["targets"]:
        expression = filled(target["expr"])
        if target.get("format") == "table":
            found += [series["metric"] for series in prometheus.query(expression)]
            continue
        query = urllib.parse.urlencode({"query": expression, "start": begun, "end": now, "step": STEP})
        for series in get_json(f"{prometheus.url}/api/v1/query_range?{query}")["data"]["result"]:
            values = [[at, float(value)] for at, value in series["values"]]
            values = [[at, value if math.isfinite(value) else None] for at, value in values]
            found.append({"name": legend(target, series["metric"]), "values": values})
    if panel["type"] == "table":
        merged = {}
        for labels in found:
            merged.setdefault(labels["worker"], {}).update(labels)
        found = [merged[worker] for worker in sorted(merged)]
    return sorted(found, key=lambda series: series.get("name", "")) if panel["type"] == "timeseries" and len(found) > 4 else found


def board(chromium, prometheus, begun):
    now = time.time()
    data = {panel["id"]: asked(prometheus, panel, begun, now) for panel in BOARD["panels"] if panel["type"] != "row"}
    page = chromium.page((pathlib.Path(__file__).parent / "board.html").as_uri(), width=1600, height=900)
    page.until("typeof show === 'function'")
    height = page.run(f"show({json.dumps({'board': BOARD, 'data': data, 'range': {'start': begun, 'end': now}})})")
    page.size(1600, math.ceil(height) + 16)
    page.shot(SHOTS / "board.png")


def status(chromium, proxy):
    for picture, options in {
        "status": {"width": 1280, "height": 800},
        "status-dark": {"width": 1280, "height": 860, "dark": True},
        "status-narrow": {"width": 390, "height": 1500},
    }.items():
        page = chromium.page(f"{proxy.admin}/", **options)
        page.call("Page.bringToFront")
        page.until("document.querySelectorAll('#workers tr').length === 6 && !!document.querySelector('#hits path')")
        time.sleep(1)
        page.shot(SHOTS / f"{picture}.png", whole=picture == "status")


SHOTS.mkdir(exist_ok=True)
with Chromium() as chromium, Engines(6) as engines, Store() as store, \
        Proxy(engines.urls, store.config(), mode="random", port=free_port()) as one, \
        Proxy(engines.urls, store.config(), mode="random", port=free_port()) as other, \
        Prometheus([proxy.admin.removeprefix("http://") for proxy in (one, other)]) as prometheus:
    begun = time.time()
    with Load(one.clients, threads=4, output=48) as load, Load(other.clients, threads=4, output=48, seed=4) as beside:
        time.sleep(SECONDS)
        for proxy in (one, other):
            proxy.set_mode("kv")
        time.sleep(SECONDS)
        status(chromium, one)
        board(chromium, prometheus, begun)
        print(f"{load.sent + beside.sent} requests, {load.failed + beside.failed} failed")
