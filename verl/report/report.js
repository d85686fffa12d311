"use strict";
// The page: reads the embedded data, draws every section, and follows a live run where a server answers.

const COLOR = { blue: "var(--c1)", orange: "var(--c2)", green: "var(--c3)", violet: "var(--c4)", gold: "var(--c5)", pink: "var(--c6)" };

const CHARTS = [
  { title: "Held-out accuracy", form: "percent", big: true, dots: true, help: "Share of held-out tasks answered correctly", curves: [["greedy", ["eval/acc/greedy"], COLOR.blue], ["sampled", ["eval/acc/sampled"], COLOR.orange]] },
  { title: "Reward", big: true, help: "Mean score of the step's training samples; the band spans its least and greatest sample", curves: [["mean", ["critic/score/mean", "critic/rewards/mean"], COLOR.blue, "critic/score/min", "critic/score/max"]] },
  { title: "Loss", canLog: true, curves: [["train", ["train/loss"], COLOR.blue], ["held-out", ["val/loss"], COLOR.orange]] },
  { title: "Entropy", unit: "nats per token", zero: true, canLog: true, curves: [["entropy", ["actor/entropy"], COLOR.blue]] },
  { title: "Response length", unit: "tokens", form: "tokens", zero: true, curves: [["mean", ["response_length/mean"], COLOR.blue, "response_length/min", "response_length/max"]] },
  { title: "Truncated, no signal, invalid", form: "percent", zero: true, help: "Responses cut at the token limit; groups whose rewards are all equal; rewards that could not be given", curves: [["truncated", ["response_length/clip_ratio"], COLOR.orange], ["no signal", ["groups/zero_variance_share"], COLOR.violet], ["invalid", ["reward/invalid_share"], COLOR.pink]] },
  { title: "KL to the reference", unit: "nats per token", canLog: true, curves: [["KL", ["actor/kl_loss", "actor/kl"], COLOR.blue]] },
  { title: "Rollout/trainer KL", unit: "nats per token", canLog: true, log: true, help: "Is the policy that generated the policy that is trained? k1 and k3 estimate KL(rollout || trainer)", curves: [["k3", ["mismatch/k3"], COLOR.blue], ["k1", ["mismatch/k1"], COLOR.orange]] },
  { title: "Largest log-prob gap", unit: "nats", canLog: true, help: "max |dlogp| between rollout and trainer", curves: [["max |dlogp|", ["mismatch/max_abs_dlogp"], COLOR.blue]] },
  { title: "Importance ratio, 99th percentile", help: "trainer over rollout, per token", curves: [["ratio", ["mismatch/ratio_p99"], COLOR.blue]] },
  { title: "Effective sample size", form: "percent", help: "Of the importance weights between rollout and trainer, as a share of the tokens", curves: [["ESS", ["mismatch/ess"], COLOR.blue]] },
  { title: "Gradient norm", canLog: true, zero: true, curves: [["norm", ["actor/grad_norm", "train/grad_norm"], COLOR.blue]] },
  { title: "Learning rate", canLog: true, zero: true, curves: [["lr", ["actor/lr", "train/lr"], COLOR.blue]] },
  { title: "Policy loss", curves: [["loss", ["actor/pg_loss"], COLOR.blue]] },
  { title: "Clipped tokens", form: "percent", zero: true, help: "Share of tokens whose ratio left the clip range", curves: [["clip fraction", ["actor/pg_clipfrac"], COLOR.blue]] },
  { title: "Staleness", unit: "versions", zero: true, curves: [["mean", ["pipeline/staleness_mean"], COLOR.blue], ["max", ["pipeline/staleness_max"], COLOR.orange]] },
  { title: "Tokens per second", form: "count", zero: true, curves: [["throughput", ["perf/throughput"], COLOR.blue]] },
];

// Of held-out rewards that are not all 0 or 1.
const SCORE = { title: "Held-out score", form: "number", help: "Mean reward of the held-out tasks" };

const page = { data: null, live: null, weight: 0, timeMode: "seconds", logs: {}, undo: [], undoMetrics: [] };

function byId(id) { return document.getElementById(id); }
function embedded(id) { return JSON.parse(byId(id).textContent); }

function stepsOf(data) {
  const all = new Set();
  for (const one of Object.values(data.series)) for (const x of one.x) all.add(x);
  return [...all].sort((a, b) => a - b);
}

function curvesOf(data, definition) {
  const curves = [];
  for (const [label, names, color, low, high] of definition.curves) {
    const name = names.find((candidate) => data.series[candidate]);
    if (!name) continue;
    const { x, y, unit, thinned } = data.series[name];
    const curve = { label, color, x, y, name, unit, thinned, dots: definition.dots };
    const band = [low, high].map((n) => data.series[n]);
    if (band[0] && band[1] && band.every((b) => !b.thinned)) {
      const at = band.map((b) => new Map(b.x.map((step, i) => [step, b.y[i]])));
      curve.low = x.map((step) => (at[0].has(step) ? at[0].get(step) : null));
      curve.high = x.map((step) => (at[1].has(step) ? at[1].get(step) : null));
    }
    curves.push(curve);
  }
  if (definition.dots && !curves.length) return perSource(data);
  return curves;
}

function perSource(data) {
  // No overall accuracy: one curve per data source.
  const names = Object.keys(data.series).filter((n) => /^eval\/.+\/acc\/(greedy|sampled)$/.test(n)).slice(0, 6);
  const colors = Object.values(COLOR);
  return names.map((name, i) => ({ label: name.slice(5).replace("/acc/", " "), color: colors[i], name, dots: true, ...data.series[name] }));
}

function pickStep(step) {
  if (browser.openStep(step)) byId("samples").scrollIntoView({ behavior: "smooth" });
}

function drawCharts() {
  for (const undo of page.undo.splice(0)) undo();
  const data = page.data, steps = stepsOf(data), room = byId("charts"), domain = [steps[0] || 0, steps[steps.length - 1] || 1];
  const drawn = [];
  for (const known of CHARTS) {
    const definition = known.dots && data.held_out === "score" ? { ...known, ...SCORE } : known;
    const curves = curvesOf(data, definition);
    if (!curves.length) continue;
    const node = el("div", { class: definition.big ? "chart wide" : "chart" });
    drawn.push([node, definition, curves]);
  }
  room.replaceChildren(...drawn.map(([node]) => node));
  byId("curves").hidden = !drawn.length;
  for (const [node, definition, curves] of drawn) {
    const metrics = new Set(curves.map((curve) => curve.name)), key = definition.title;
    const log = key in page.logs ? page.logs[key] : Boolean(definition.log);
    const units = [...new Set(curves.map((curve) => curve.unit).filter(Boolean))].join(", ");
    const thinned = curves.some((curve) => curve.thinned) ? "; long curves show the extremes of each stretch" : "";
    page.undo.push(lineChart(node, {
      ...definition, curves, domain, steps, log, weight: page.weight, height: definition.big ? 250 : 172,
      help: [definition.help, curves.map((c) => c.name).join(", "), units].filter(Boolean).join("\n") + thinned,
      marks: { resumes: data.resumes, alarms: data.alarms.filter((alarm) => metrics.has(alarm.metric)) },
      onLog: (on) => { page.logs[key] = on; drawCharts(); }, onPick: pickStep,
    }));
  }
  drawTime();
}

function drawTime() {
  const { phases, known, totals, bars } = page.data.time, all = totals.reduce((a, b) => a + b, 0);
  byId("time").hidden = !bars.length;
  if (!bars.length) return;
  const layers = phases.map((name, i) => ({ label: name, color: `var(--phase-${known.includes(name) ? name : "other"})`, total: totals[i], share: totals[i] / (all || 1) }));
  byId("time-total").replaceChildren(
    el("div", { class: "total-bar" }, ...layers.filter((l) => l.share > 0.002).map((l) => el("i", { style: { background: l.color, "flex-grow": l.share }, title: `${l.label} ${showSeconds(l.total)} · ${showPercent(l.share)}` }))),
    el("div", { class: "legend" }, ...layers.map((l) => el("span", {}, el("i", { class: "swatch", style: { background: l.color } }), l.label + " ", el("b", {}, showPercent(l.share)), el("span", { class: "dim" }, " " + showSeconds(l.total))))));
  for (const button of byId("time-mode").children) button.setAttribute("aria-pressed", String(button.dataset.value === page.timeMode));
  page.undo.push(stackChart(byId("time-chart"), { height: 220, bars, layers, share: page.timeMode === "share", marks: { resumes: page.data.resumes }, onPick: pickStep }));
}

function drawSummary() {
  const { run, summary, highlights } = page.data;
  byId("run-name").textContent = run.name;
  const progress = run.planned ? `step ${run.steps} of ${run.planned}` : `step ${run.steps}`;
  const facts = [progress, showSeconds(run.wall_s) + " of work", run.attempts > 1 ? `${run.attempts} attempts` : null, `written ${run.written}`, run.folder];
  byId("run-facts").textContent = facts.filter(Boolean).join(" · ");
  byId("cards").replaceChildren(...summary.map(card));
  byId("highlights").replaceChildren(...highlights.map((h) => el("div", { title: h.key }, el("dt", {}, h.label), el("dd", {}, h.value))));
  byId("config-text").textContent = page.data.config || "no config.yaml in the run directory";
}

function card({ label, before, after, form, note, better }) {
  const show = FORMS[form];
  const change = before === null || after === null ? null : after - before;
  const tone = !better || !change ? "" : (change > 0) === (better === "up") ? "good" : "bad";
  const by = change === null ? null : form === "percent" ? `${change >= 0 ? "+" : "−"}${(Math.abs(change) * 100).toFixed(1)} points` : (change >= 0 ? "+" : "−") + show(Math.abs(change));
  return el("div", { class: "card" }, el("div", { class: "card-label" }, label),
    el("div", { class: "card-value" }, before === null ? null : el("span", { class: "before" }, show(before)), before === null ? null : el("span", { class: "arrow" }, "→"), el("b", {}, show(after))),
    el("div", { class: "card-note" }, by ? el("span", { class: "delta " + tone }, by) : null, by ? " · " : null, note));
}

function drawAlarms() {
  const { alarms } = page.data, room = byId("alarms");
  if (!alarms.length) { room.replaceChildren(el("p", { class: "fine" }, "✓ No detector fired.")); return; }
  room.replaceChildren(el("ul", { class: "alarms" }, ...alarms.map((alarm) => el("li", { class: alarm.level },
    el("span", { class: "level" }, (alarm.level === "stop" ? "■ " : "▲ ") + alarm.level),
    el("button", { class: "quiet", type: "button", title: "Samples near this step", on: { click: () => pickStep(alarm.first) } }, alarm.first === alarm.last ? `step ${alarm.first}` : `steps ${alarm.first}–${alarm.last}`),
    el("b", {}, alarm.name.replace(/_/g, " ")), el("span", {}, alarm.message)))));
}

function drawSamples() {
  const { samples } = page.data;
  byId("samples-note").textContent = samples.note || "No samples were stored in this run.";
  byId("samples-room").hidden = !samples.files.length;
  if (samples.files.length) browser.update(samples);
}

function drawMetrics() {
  for (const undo of page.undoMetrics.splice(0)) undo();
  const needle = byId("metric-filter").value.trim().toLowerCase(), room = byId("all-metrics"), most = needle ? 48 : 0;
  const names = Object.keys(page.data.series), found = names.filter((name) => name.toLowerCase().includes(needle));
  if (!most) {
    room.replaceChildren(el("p", { class: "note" }, `${names.length} metrics: `, ...names.map((name) => el("button", { class: "quiet tiny", type: "button", on: { click: () => { byId("metric-filter").value = name; drawMetrics(); } } }, name))));
    return;
  }
  const steps = stepsOf(page.data), domain = [steps[0] || 0, steps[steps.length - 1] || 1];
  const nodes = found.slice(0, most).map((name) => [name, el("div", { class: "chart" })]);
  room.replaceChildren(...nodes.map(([, node]) => node), el("p", { class: "note" }, found.length > most ? `${most} of ${found.length} shown` : found.length ? "" : "no metric of that name"));
  for (const [name, node] of nodes) {
    const one = page.data.series[name], key = "metric:" + name;
    page.undoMetrics.push(lineChart(node, { title: name, unit: one.unit || "", curves: [{ label: name, color: COLOR.blue, name, ...one }], domain, steps, height: 150, canLog: true, log: page.logs[key], weight: page.weight, onLog: (on) => { page.logs[key] = on; drawMetrics(); }, onPick: pickStep }));
  }
}

function drawAll() { drawSummary(); drawCharts(); drawAlarms(); drawSamples(); drawMetrics(); }

function wireControls() {
  byId("smooth").addEventListener("input", (event) => {
    page.weight = Number(event.target.value);
    byId("smooth-value").textContent = page.weight ? page.weight.toFixed(2) : "off";
    drawCharts();
  });
  byId("time-mode").addEventListener("click", (event) => { if (event.target.dataset.value) { page.timeMode = event.target.dataset.value; drawCharts(); } });
  byId("metric-filter").addEventListener("input", drawMetrics);
  const root = document.documentElement, button = byId("theme");
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const label = () => { button.textContent = dark() ? "☀" : "☾"; };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); });
  label();
  addEventListener("scroll", () => tip.hide(), { passive: true });
  let width = innerWidth, timer = 0;
  addEventListener("resize", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { if (innerWidth !== width) { width = innerWidth; drawCharts(); drawMetrics(); } }, 120);
  });
}

async function follow() {
  // Ask for the version; when it changes, fetch the data and redraw. Selection, filters and scroll stay.
  const badge = byId("live-state");
  badge.hidden = false;
  const state = (text, tone) => { badge.textContent = text; badge.className = "live " + tone; };
  state("live", "on");
  for (;;) {
    await new Promise((done) => setTimeout(done, page.live.poll_s * 1000));
    try {
      const { version } = await (await fetch("version.json")).json();
      if (version !== page.live.version) {
        const next = await (await fetch("data.json")).json();
        page.live.version = next.version;
        page.data = next.payload;
        const place = scrollY;
        drawAll();
        scrollTo(0, place);
      }
      state("live · step " + page.data.run.steps, "on");
    } catch (fault) {
      state("server gone", "off");
    }
  }
}

page.data = embedded("data");
page.live = embedded("live");
browser.mount(byId("samples-room"));
wireControls();
drawAll();
if (page.live) follow();
