"""A real Prometheus that reads proxies every second, and the board to ask it."""

import json
import pathlib
import sys
import tempfile
import urllib.parse
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "lab"))

from fleet import ROOT, Child, free_port, get_json, until  # noqa: E402

BOARD = json.loads((ROOT / "deploy/grafana/warmroute.json").read_text())


class Prometheus(Child):
    def __init__(self, targets, rules=""):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        here = pathlib.Path(self.folder.name)
        (here / "rules.yaml").write_text(rules or "groups: []\n")
        (here / "prometheus.yaml").write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            f"rule_files: [{here}/rules.yaml]\n"
            f"scrape_configs: [{{job_name: warmroute, static_configs: [{{targets: {json.dumps(targets)}}}]}}]\n")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = (here / "log").open("w")
        super().__init__(["prometheus", f"--config.file={here}/prometheus.yaml", f"--storage.tsdb.path={here}/data",
                          f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"], stderr=self.log, stdout=self.log)

        def ready():
            try:
                return urllib.request.urlopen(f"{self.url}/-/ready", timeout=1).status == 200
            except OSError:
                return False

        until("prometheus to be ready", ready)

    def query(self, expression):
        return get_json(f"{self.url}/api/v1/query?" + urllib.parse.urlencode({"query": expression}))["data"]["result"]

    def fired(self):
        """Alerts that fire or have fired."""
        found = self.query('max_over_time(ALERTS{alertstate="firing"}[1h])')
        return {series["metric"]["alertname"] for series in found}


def filled(expression):
    """An expression of the board, with what Grafana would put in."""
    for name, value in {"$__rate_interval": "30s", "$instance": ".*", "$model": ".*"}.items():
        expression = expression.replace(name, value)
    return expression


def legend(target, labels):
    """What a series is called on the board."""
    text = target["legendFormat"]
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    return text
