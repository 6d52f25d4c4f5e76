// The operator's page: asks the admin listener every few seconds and draws what it says. All text goes in as text, never as markup.

const EVERY = 5_000;
const SPAN = 15 * 60_000; // of the charts
const WINDOW = 60_000; // over which shares and medians are taken
const SVG = "http://www.w3.org/2000/svg";

const $ = (id) => document.getElementById(id);

function make(name, props = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(props)) {
    if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

function draw(name, attributes, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const whole = (share) => `${Math.round(100 * share)} %`;
const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(1)} %` : "–");
const seconds = (time) =>
  !Number.isFinite(time) ? "–" : time < 1 ? `${(1000 * time).toPrecision(3).replace(/\.0+$/, "")} ms` : `${time.toPrecision(3)} s`;
function short(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1e3) return value.toFixed(0);
  return value < 1e6 ? `${(value / 1e3).toPrecision(3)}k` : `${(value / 1e6).toPrecision(3)}M`;
}
/** Sets text only where it differs, so that nothing is read out or selected anew. */
function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// --- what is asked, and how it went

let samples = [];
let bounds = [];
let mode = null;
let lost = false;

async function ask(path) {
  const answer = await fetch(path, { headers: { accept: "application/json" }, signal: AbortSignal.timeout(10_000) });
  if (!answer.ok) throw Object.assign(new Error(`${path}: status ${answer.status}`), { status: answer.status });
  return answer.json();
}

function news(text, bad = false) {
  say($("news"), text);
  $("news").classList.toggle("bad", bad);
}

async function look() {
  try {
    const since = samples.length ? samples.at(-1).seq : 0;
    const [fleet, series, { prefixes }, { decisions }] = await Promise.all([
      ask("fleet"),
      ask(`series?since=${since}`),
      ask("prefixes?most=16"),
      ask("decisions?last=12"),
    ]);
    take(series);
    if (lost) news("The proxy answers again.");
    lost = false;
    showMode(fleet.mode);
    showSplit(fleet.split);
    showSharing(fleet.sharing);
    showFaults(fleet);
    showNow(series, fleet.workers);
    showCharts();
    showWorkers(fleet.workers);
    showPrefixes(prefixes, fleet.workers);
    showDecisions(decisions);
  } catch (error) {
    if (!lost) news(`No answer since ${new Date().toLocaleTimeString()}: ${error.message}. What is shown is from before.`, true);
    lost = true;
  }
}

function take(series) {
  bounds = series.bounds;
  // A proxy that was started anew counts from the beginning.
  if (samples.length && series.next <= samples.at(-1).seq) samples = [];
  const last = samples.length ? samples.at(-1).seq : 0;
  samples.push(...series.samples.filter((sample) => sample.seq > last));
  const oldest = samples.length ? samples.at(-1).at - SPAN - WINDOW : 0;
  samples = samples.filter((sample) => sample.at >= oldest);
}

// --- what the samples say: all are counted since the start, so two of them make an interval

const sum = (sample, key) => sample.tokens.kv[key] + sample.tokens.random[key];

function share(before, after, part, whole) {
  const all = whole(after) - whole(before);
  return all > 0 ? (part(after) - part(before)) / all : NaN;
}

function median(before, after, which) {
  const count = (sample, at) => sample.first_tokens[which][at] ?? 0;
  const grown = bounds.map((_, at) => count(after, at) - count(before, at));
  const all = count(after, bounds.length) - count(before, bounds.length);
  if (all <= 0) return NaN;
  const at = grown.findIndex((upTo) => upTo >= all / 2);
  if (at < 0) return bounds.at(-1);
  const [from, below] = at ? [bounds[at - 1], grown[at - 1]] : [0, 0];
  return from + ((bounds[at] - from) * (all / 2 - below)) / (grown[at] - below);
}

/** `figure` of each sample and the one a window before it. */
function over(figure) {
  let start = 0;
  const points = [];
  samples.forEach((sample, at) => {
    while (samples[start].at < sample.at - WINDOW) start += 1;
    if (at > start) points.push([sample.at, figure(samples[start], sample)]);
  });
  return points;
}

const hitLines = () => {
  const lines = [
    { name: "as workers say", points: over((a, b) => share(a, b, (s) => sum(s, "confirmed_cached"), (s) => sum(s, "confirmed_prompt"))) },
    { name: "as predicted", points: over((a, b) => share(a, b, (s) => sum(s, "predicted_cached"), (s) => sum(s, "prompt"))) },
  ];
  // What the shadow has played; nothing grows where it is switched off.
  const other = mode === "kv" ? "random" : "kv";
  const played = (policy) => over((a, b) => share(a, b, (s) => s.shadow[policy].cached, (s) => s.shadow[policy].prompt));
  for (const [policy, name] of [[other, `would be in ${other}`], ["ideal", "in a cache without end"]]) {
    const points = played(policy);
    if (points.some(([, value]) => Number.isFinite(value))) lines.push({ name, points });
  }
  return lines;
};
const timeLines = () => [
  { name: "predicted hits", points: over((a, b) => median(a, b, "hit")) },
  { name: "predicted misses", points: over((a, b) => median(a, b, "miss")) },
];

// --- charts

/** The smallest round number that is at least `value`. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((round) => round >= value * 0.999);
}

const cursors = new Map(); // where the pointer is over which chart, as a time

function chart(box, lines, { top, format, mark, title }) {
  const width = Math.max(260, box.clientWidth);
  const [height, left, right, above, below] = [200, 46, 12, 8, 22];
  const now = samples.length ? samples.at(-1).at : Date.now();
  const x = (at) => left + ((width - left - right) * (at - now + SPAN)) / SPAN;
  const y = (value) => above + (height - above - below) * (1 - Math.min(1, value / top));
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (let part = 0; part <= 4; part += 1) {
    const at = y((top * part) / 4);
    svg.append(draw("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at }));
    if (part % 2 === 0) svg.append(draw("text", { class: "axis", x: left - 6, y: at + 4, "text-anchor": "end" }, mark((top * part) / 4)));
  }
  for (const minutes of width < 420 ? [15, 0] : [15, 10, 5, 0]) {
    const anchor = minutes === 15 ? "start" : minutes === 0 ? "end" : "middle";
    svg.append(draw("text", { class: "axis", x: x(now - minutes * 60_000), y: height - 5, "text-anchor": anchor }, minutes ? `${minutes} min ago` : "now"));
  }
  const cursor = cursors.get(box.id);
  const shown = lines.map(({ name, points }, at) => {
    const known = points.filter(([time, value]) => Number.isFinite(value) && time >= now - SPAN);
    let path = "";
    let before = -Infinity;
    for (const [time, value] of known) {
      path += `${time - before > 4 * EVERY ? "M" : "L"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
      before = time;
    }
    svg.append(draw("path", { class: `c${at}`, d: path }));
    let point = known.at(-1);
    if (cursor !== undefined && known.length) {
      point = known.reduce((best, each) => (Math.abs(each[0] - cursor) < Math.abs(best[0] - cursor) ? each : best));
    }
    if (point) svg.append(draw("circle", { class: `c${at}`, r: 4, cx: x(point[0]), cy: y(point[1]) }));
    return { name, value: point ? format(point[1]) : "–" };
  });
  if (cursor !== undefined) svg.append(draw("line", { class: "cursor", x1: x(cursor), x2: x(cursor), y1: above, y2: height - below }));
  svg.setAttribute("aria-label", `${title}: ${shown.map(({ name, value }) => `${name} ${value}`).join(", ")}`);
  const key = make("ul", { className: "key" });
  shown.forEach(({ name, value }, at) => {
    const line = draw("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, draw("path", { class: `c${at}`, d: "M1 5H25" }));
    key.append(make("li", {}, line, `${name} `, make("b", {}, value)));
  });
  box.replaceChildren(svg, key);
  svg.addEventListener("pointermove", (event) => {
    const place = ((event.clientX - svg.getBoundingClientRect().left) * width) / svg.clientWidth;
    const time = now - SPAN + (SPAN * (place - left)) / (width - left - right);
    cursors.set(box.id, Math.min(now, Math.max(now - SPAN, time)));
    showCharts();
  });
  svg.addEventListener("pointerleave", () => {
    cursors.delete(box.id);
    showCharts();
  });
}

function showCharts() {
  chart($("hits"), hitLines(), { top: 1, format: percent, mark: whole, title: "Share of prompt tokens found cached" });
  const times = timeLines();
  const most = Math.max(0.001, ...times.flatMap(({ points }) => points.map(([, value]) => value).filter(Number.isFinite)));
  chart($("ttft"), times, { top: roundUp(most), format: seconds, mark: seconds, title: "Median time to first token" });
}

// --- figures, workers

function showNow(series, workers) {
  const after = samples.at(-1);
  const before = samples.find((sample) => sample.at >= (after?.at ?? 0) - WINDOW);
  const between = after && before && after !== before;
  const rate = between ? ((after.requests - before.requests) * 1000) / (after.at - before.at) : NaN;
  const failed = between ? after.failed - before.failed : 0;
  const usable = workers.filter((worker) => worker.usable).length;
  const arm = (name) => (between ? share(before, after, (s) => s.tokens[name].confirmed_cached, (s) => s.tokens[name].confirmed_prompt) : NaN);
  const [kv, random] = [arm("kv"), arm("random")];
  const both = Number.isFinite(kv) && Number.isFinite(random);
  const [hits, misses] = ["hit", "miss"].map((which) => (between ? median(before, after, which) : NaN));
  const firsts = !Number.isFinite(hits) ? (Number.isFinite(misses) ? "on misses" : "median") : Number.isFinite(misses) ? `on hits, ${seconds(misses)} on misses` : "on hits, no misses";
  const tiles = [
    ["Requests", Number.isFinite(rate) ? rate.toFixed(rate < 10 ? 1 : 0) : "–", "a second"],
    ["In flight", String(series.in_flight), series.queued ? `and ${series.queued} queued` : ""],
    ["Failed", String(failed), "in the last minute"],
    ["Workers usable", `${usable}`, `of ${workers.length}`],
    ["Cached", percent(between ? hitLines()[0].points.at(-1)?.[1] : NaN), both ? `kv ${percent(kv)}, random ${percent(random)}` : "of prompt tokens"],
    ["First token", seconds(Number.isFinite(hits) ? hits : misses), firsts],
  ];
  const list = $("now");
  tiles.forEach(([name, value, unit], at) => {
    const tile = list.children[at] ?? list.appendChild(make("div", {}, make("dt"), make("dd", {}, make("span"), " ", make("small"))));
    say(tile.querySelector("dt"), name);
    say(tile.querySelector("span"), value);
    say(tile.querySelector("small"), unit);
  });
}

const kind = (state) =>
  state === "up" ? "good" : ["starting", "trial", "draining"].includes(state) ? "warn" : "bad";

function chip(state, count) {
  return make("span", { className: `chip ${kind(state)}` }, count === undefined ? state : `${count} ${state}`);
}

function shareCell(label, extra) {
  return make("td", { "data-label": label }, make("div", { className: `share ${extra}` }, make("i", { ariaHidden: "true" }, make("i")), make("span")));
}

function fill(cell, part, text, title) {
  const bar = cell.querySelector("i i");
  bar.style.width = `${Math.min(100, 100 * (Number.isFinite(part) ? part : 0))}%`;
  say(cell.querySelector("span"), text);
  cell.title = title;
}

const rows = new Map();

function workerRow(name) {
  const number = (label) => make("td", { className: "number", "data-label": label });
  const row = make(
    "tr",
    {},
    make("th", { scope: "row" }, name),
    make("td", { "data-label": "State" }),
    make("td", { "data-label": "Basis" }),
    number("In flight"),
    number("Queue, tokens"),
    number("Speed, tokens/s"),
    shareCell("Cache", "cache"),
    shareCell("Hit share", "hits"),
  );
  rows.set(name, row);
  return row;
}

function showWorkers(workers) {
  const body = $("workers");
  const names = new Set(workers.map((worker) => worker.name));
  for (const [name, row] of rows) {
    if (!names.has(name)) {
      row.remove();
      rows.delete(name);
    }
  }
  workers.forEach((worker, at) => {
    const row = rows.get(worker.name) ?? workerRow(worker.name);
    if (body.children[at] !== row) body.insertBefore(row, body.children[at] ?? null);
    const [, state, basis, inFlight, queue, speed, cache, hits] = row.children;
    if (state.textContent !== worker.state) state.replaceChildren(chip(worker.state));
    say(basis, worker.basis ?? "–");
    basis.title = worker.basis_reason ?? "";
    const believed = worker.believed ?? {};
    say(inFlight, String(worker.in_flight));
    say(queue, short(believed.queue_tokens));
    say(speed, short(believed.prefill_tokens_per_s));
    const capacity = believed.capacity_tokens;
    fill(
      cache,
      believed.held_tokens / capacity,
      capacity ? `${short(believed.held_tokens)} of ${short(capacity)}` : short(believed.held_tokens),
      "tokens believed to be in its KV cache, of what is believed to fit",
    );
    const { predicted, confirmed, prompt } = worker.hits;
    fill(hits, confirmed / prompt, percent(confirmed / prompt), `${percent(predicted / prompt)} were predicted`);
    row.dataset.words = `${worker.name} ${worker.state} ${worker.basis ?? ""} ${worker.basis_reason ?? ""}`.toLowerCase();
  });
  const counts = new Map();
  for (const { state } of workers) counts.set(state, (counts.get(state) ?? 0) + 1);
  $("states").replaceChildren(...[...counts].sort().map(([state, count]) => make("li", {}, chip(state, count))));
  filter();
}

function filter() {
  const word = $("find").value.trim().toLowerCase();
  let shown = 0;
  for (const row of rows.values()) {
    row.hidden = !row.dataset.words.includes(word);
    shown += row.hidden ? 0 : 1;
  }
  $("none").hidden = shown > 0 || rows.size === 0;
}

// --- which prefixes live where, and what was decided

function showPrefixes(prefixes, workers) {
  $("cache").hidden = prefixes.length === 0;
  const holding = new Set(prefixes.flatMap(({ holders }) => holders.map(({ worker }) => worker)));
  const names = workers.map(({ name }) => name).filter((name) => holding.has(name));
  const head = make("tr", {}, make("th", { scope: "col" }, "Prefix"), make("th", { scope: "col", className: "number" }, "Requests"));
  for (const name of names) head.append(make("th", { scope: "col", className: "up" }, make("span", {}, name)));
  $("map").tHead.replaceChildren(head);
  $("map").tBodies[0].replaceChildren(
    ...prefixes.map(({ prefix, requests, blocks, holders }) => {
      const row = make("tr", {}, make("th", { scope: "row" }, prefix), make("td", { className: "uses" }, short(requests)));
      const held = new Map(holders.map((holder) => [holder.worker, holder.blocks]));
      for (const name of names) {
        const count = held.get(name) ?? 0;
        const bar = make("i");
        bar.style.height = `${blocks ? (100 * count) / blocks : 0}%`;
        const words = count ? `${count} of ${blocks} blocks` : "none";
        row.append(make("td", { title: `${name}: ${words}` }, make("i", { ariaHidden: "true" }, bar), make("span", { className: "unseen" }, words)));
      }
      return row;
    }),
  );
}

function showDecisions(decisions) {
  $("recent").hidden = decisions.length === 0;
  const cell = (label, text, className = "") => make("td", { "data-label": label, className }, text);
  $("decisions").replaceChildren(
    ...decisions.map((decision) => {
      const price = (name) => decision.workers.find(({ worker }) => worker === name)?.price_s;
      const next = decision.runner_up;
      const beaten = next && Number.isFinite(price(next)) ? `${next}, ${seconds(price(next))}` : "–";
      return make(
        "tr",
        {},
        make("th", { scope: "row" }, new Date(decision.at_ms).toLocaleTimeString()),
        cell("Model", decision.model || "–"),
        cell("Worker", decision.worker),
        cell("Reason", decision.reason),
        cell("Prompt, tokens", short(decision.prompt_tokens), "number"),
        cell("Cached", short(decision.predicted_cached_tokens), "number"),
        cell("Price", seconds(price(decision.worker) ?? NaN), "number"),
        cell("Next best", beaten),
      );
    }),
  );
}

// --- the mode

const MEANING = {
  kv: "Each request goes where its prefix is believed to be cached and its first token will come soonest.",
  random: "Each client connection is drawn to a worker at random, as a Kubernetes Service does. Fewer prompts will be found cached, and first tokens will take longer.",
};

function showMode(now) {
  mode = now;
  $("mode").disabled = false;
  for (const button of $("mode").querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.mode === now));
}

/** A share of the prompts that goes by the other mode. */
function showSplit(split) {
  $("split").hidden = !split;
  if (!split) return;
  const own = split.by === "workers" ? ", on workers of their own" : "";
  say($("split"), `${+(100 * split.share).toFixed(3)} % of prompts go by ${split.mode}${own}`);
}

const counted = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;

/** Other routers, where there is a store to share over. */
function showSharing(sharing) {
  $("sharing").hidden = !sharing?.connected;
  if (sharing) say($("sharing"), `sharing: ${sharing.line}`);
}

/** What is wrong beside the workers themselves: where they are found, and what routers share over. */
function showFaults({ sources, kept, sharing }) {
  const faults = sources.filter(({ fault }) => fault).map(({ source, fault }) => `${source}: ${fault}`);
  for (const { workers, until_heard: sources } of kept) {
    faults.push(`${counted(workers.length, "worker")} of sources that the config names no more, kept until heard: ${sources.join(", ")}`);
  }
  if (sharing?.fault) faults.push(`sharing: ${sharing.line}`);
  const list = $("faults");
  list.hidden = faults.length === 0;
  while (list.children.length > faults.length) list.lastChild.remove();
  faults.forEach((fault, at) => say(list.children[at] ?? list.appendChild(make("li")), fault));
}

$("mode").addEventListener("click", (event) => {
  const wanted = event.target.closest("button")?.dataset.mode;
  if (!wanted || wanted === mode) return;
  say($("confirm-title"), `Switch to ${wanted}?`);
  say($("confirm-text"), MEANING[wanted]);
  const dialog = $("confirm");
  dialog.returnValue = "no";
  dialog.onclose = () => {
    if (dialog.returnValue === "yes") switchTo(wanted);
  };
  dialog.showModal();
});

async function switchTo(wanted) {
  try {
    const answer = await fetch("mode", { method: "PUT", body: wanted });
    if (!answer.ok) throw new Error((await answer.text()).trim());
    showMode((await answer.json()).mode);
    news(`Mode ${mode} is in force.`);
  } catch (error) {
    news(`The mode was not switched: ${error.message}`, true);
  }
}

// --- begin

$("find").addEventListener("input", filter);
new ResizeObserver(showCharts).observe($("hits"));

let timer = null;
async function begin() {
  clearInterval(timer);
  timer = document.hidden ? null : setInterval(look, EVERY);
  if (!document.hidden) await look();
}
document.addEventListener("visibilitychange", begin);
begin();
