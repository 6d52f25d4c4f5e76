"""The board and the alerts against a real Prometheus that reads a real warmroute under load: every expression brings data, every name on
the board is explained, and what can be provoked on one machine in a minute fires. The rest fires in `alerts.yaml`, where time is made up."""

import pathlib
import re
import sys
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "lab"))

from fleet import ROOT, Engines, Load, Proxy, Store, get_json, until  # noqa: E402
from server import BOARD, Prometheus, filled, legend  # noqa: E402

RULES = (ROOT / "deploy/prometheus/rules.yaml").read_text()
# Of the alerts, those that need more than a minute, or a fault that cannot be made here.
ONLY_IN_MADE_UP_TIME = {"WarmroutePredictionsOff", "WarmrouteBeliefsLost", "WarmrouteHitsNotFaster", "WarmrouteOverhead",
                        "WarmrouteRetriesDenied", "WarmrouteLittleToGain"}

failures = 0


def expect(holds, what):
    global failures
    failures += not holds
    print(f"{'ok  ' if holds else 'FAIL'} {what}", flush=True)


def panels():
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def told_apart(prometheus, panel):
    """Whether each line of a panel has a name of its own, and one that is whole, however many proxies there are."""
    names = [legend(target, series["metric"]) for target in panel["targets"] for series in prometheus.query(filled(target["expr"]))]
    return len(names) == len(set(names)) and not any("{{" in name for name in names)


def board(prometheus):
    """The board, while everything that it shows is under way and several proxies are read."""
    asked = [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]
    asked += [(annotation["name"], annotation["expr"]) for annotation in BOARD["annotations"]["list"]]
    for title, expression in asked:
        data = until(f"data for {title}: {expression}", lambda: prometheus.query(filled(expression)), 40)
        values = [float(series["value"][1]) for series in data]
        if all(value != value for value in values):
            expect(False, f"{title}: {expression} is nowhere a number")
    expect(True, f"all {len(asked)} expressions of the board bring data")
    alike = [panel["title"] for panel in panels() if panel["type"] == "timeseries" and not told_apart(prometheus, panel)]
    expect(not alike, f"no two lines of a panel have the same name {alike}")
    rows = [len(prometheus.query(filled(target["expr"]))) for panel in panels() if panel["type"] == "table" for target in panel["targets"]]
    usable = next(panel for panel in panels() if panel["title"] == "Usable workers")["targets"][0]["expr"]
    usable = prometheus.query(filled(usable))[0]["value"][1]
    # Two that all name alike but one of the proxies, and one that is out.
    expect(usable == "4" and min(rows) >= 5, f"a worker of several proxies is one worker: {usable} usable, rows {rows}")


def impatient(rules):
    """The same rules, without the waits."""
    return re.sub(r"\[\d+m\]", "[15s]", re.sub(r"for: \w+", "for: 0s", rules))


def post(url):
    urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30).close()


def fires(prometheus, *names):
    for name in names:
        until(f"{name} to fire", lambda name=name: name in prometheus.fired(), 90)
        fired.add(name)
        expect(True, f"{name} fires")


fired = set()
alerts = set(re.findall(r"alert: (\w+)", RULES))

with Engines(2) as engines, Engines(1) as mortal, \
        Proxy(engines.urls + mortal.urls, "log: {access: {to: /dev/full}}") as proxy, \
        Proxy(engines.urls, "scrape: {path: /nothing}") as blind, \
        Store() as store, Proxy(engines.urls, store.config()) as here, \
        Proxy(engines.urls, store.config("key_prefix: elsewhere")) as apart, \
        Proxy([url.replace("127.0.0.1", "localhost") for url in engines.urls], store.config()) as stranger, \
        Prometheus([one.admin.removeprefix("http://") for one in (proxy, blind, here, apart, stranger)], impatient(RULES)) as prometheus:
    with Load(proxy.clients, prefixes=9, threads=6, output=24, words=700):
        until("scrapes", lambda: prometheus.query("sum(rate(warmroute_requests_total[15s])) > 0"))
        fires(prometheus, "WarmrouteBlind", "WarmrouteAccessLogLost")
        mortal.stop()
        fires(prometheus, "WarmrouteWorkerOut")
        # A source that cannot be heard, and a worker where nobody listens.
        blind.found = "dns: [{name: nobody.invalid, port: 8000}]"
        blind.urls = [*blind.urls, "http://127.0.0.1:9"]
        blind.configure("scrape: {path: /nothing}")
        fires(prometheus, "WarmrouteDiscoveryBlind", "WarmrouteWorkerNeverUp")

        proxy.set_mode("random")
        fires(prometheus, "WarmrouteLeftInRandom")
        proxy.set_mode("kv")

        board(prometheus)

        with Load(stranger.clients, prefixes=2, threads=1, output=8, pause=0.2):
            fires(prometheus, "WarmrouteSharingApart", "WarmrouteSharingStrangers")
        store.stop()
        fires(prometheus, "WarmrouteSharingAway")
        for one in (here, apart, stranger):
            one.stop()

        proxy.configure("listen: nowhere")
        fires(prometheus, "WarmrouteConfigRefused")
        proxy.configure("log: {access: {to: /dev/full}}\n"
                        "limits: {in_flight: 1, queue: 2}")
        fires(prometheus, "WarmrouteQueueing", "WarmrouteShedding")
        proxy.configure("log: {access: {to: /dev/full}}")
        with Load(engines.urls[0], prefixes=4, threads=4, output=16, words=700):
            fires(prometheus, "WarmrouteForeignTraffic")

        names = [worker["name"] for worker in get_json(f"{proxy.admin}/fleet")["workers"]]
        post(f"{proxy.admin}/workers/{names[0]}/drain")
        fires(prometheus, "WarmrouteWorkerLeftDrained")
        for name in names[1:]:
            post(f"{proxy.admin}/workers/{name}/drain")
        fires(prometheus, "WarmrouteNoUsableWorker", "WarmrouteErrors")
    proxy.stop()
    blind.stop()
    fires(prometheus, "WarmrouteAbsent")

silent = alerts - fired
expect(silent == ONLY_IN_MADE_UP_TIME, f"alerts that did not fire here are those that cannot: {sorted(silent)}")
sys.exit(1 if failures else 0)
