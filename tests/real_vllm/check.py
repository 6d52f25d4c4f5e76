"""Holds the reports of run.sh against what must hold. Usage: check.py FOLDER SEED..."""

import json
import pathlib
import re
import sys

folder, seeds = pathlib.Path(sys.argv[1]), sys.argv[2:]
failures = []


def expect(holds, what):
    print(("ok    " if holds else "FAILED"), what)
    if not holds:
        failures.append(what)


def points(report):
    return report if isinstance(report, list) else report["points"]


def series(page, name, **labels):
    total = 0.0
    for line in page.splitlines():
        match = re.match(rf"{name}(?:{{(.*)}})? (\S+)$", line)
        if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
            total += float(match[2])
    return total


shares = {"kv": [], "random": []}
for seed in seeds:
    for mode in shares:
        point = points(json.loads((folder / f"{mode}{seed}.json").read_text()))[0]
        share = point["prefix_token_share"]
        shares[mode].append(share)
        usage, counted = point["usage_token_share"], point.get("counter_token_share")
        print(f"seed {seed} {mode}: {share:.1%} of prefix tokens hit, {usage:.1%} of prompt tokens by usage, "
              f"by counters {counted if counted is None else format(counted, '.1%')}, failed {point['failed']}, "
              f"by worker {point.get('requests_by_worker')}")
        expect(point["failed"] == 0, "no request failed")
        expect(counted is not None and abs(counted - usage) < 0.02, "usage and counters agree within 2 points")
        if mode == "kv":
            expect(share >= 0.97, "kv hits at least 97 % of prefix tokens")
        page = (folder / f"{mode}{seed}.txt").read_text()
        name = "warmroute_worker_cached_tokens_total"
        predicted, confirmed = (series(page, name, source=source) for source in ("predicted", "confirmed"))
        prompt = series(page, "warmroute_worker_prompt_tokens_total", source="confirmed")
        off = abs(predicted - confirmed) / max(1.0, prompt)
        print(f"predicted {predicted:.0f}, confirmed {confirmed:.0f} of {prompt:.0f} prompt tokens")
        expect(prompt > 0 and off < 0.03, f"predictions are off by {off:.2%} of prompt tokens, less than 3 %")
        told = series(page, "warmroute_worker_capacity_tokens", kind="told")
        expect(told == 3 * 9_344, f"three capacities of 9,344 tokens were read: {told:.0f}")

expect(len(shares["kv"]) == len(shares["random"]) == len(seeds), "both modes ran for all seeds")
mean = sum(shares["random"]) / max(1, len(shares["random"]))
expect(0.40 <= mean <= 0.75, f"random hits as a Service does: {mean:.1%} (45-59 % were measured before)")

sys.exit(1 if failures else 0)
