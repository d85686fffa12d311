"use strict";
// Small drawing kit: elements, number formats, scales, line and stacked-bar charts with one shared cursor.

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (name === "style") for (const [key, v] of Object.entries(value)) node.style.setProperty(key, v);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) if (value !== null) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function showNumber(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return (value / 1e9).toPrecision(3) + "G";
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return (value / 1e3).toPrecision(3) + "k";
  if (size >= 1000) return value.toFixed(0);
  if (size < 1e-3) return value.toExponential(1).replace("e-0", "e-");
  return String(Number(value.toPrecision(3)));
}

function showPercent(value) {
  return value === null || value === undefined ? "–" : (value * 100).toFixed(1) + "%";
}

function showSeconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 1) return (value * 1000).toFixed(0) + " ms";
  if (value < 60) return value.toFixed(1) + " s";
  const whole = Math.round(value);
  if (whole < 3600) return Math.floor(whole / 60) + "m " + String(whole % 60).padStart(2, "0") + "s";
  if (whole < 86400) return Math.floor(whole / 3600) + "h " + String(Math.floor((whole % 3600) / 60)).padStart(2, "0") + "m";
  return Math.floor(whole / 86400) + "d " + Math.floor((whole % 86400) / 3600) + "h";
}

const FORMS = { number: showNumber, percent: showPercent, seconds: showSeconds, count: showNumber, tokens: (v) => (v === null ? "–" : v.toFixed(0)) };

function niceTicks(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted) || 1;
  const power = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) ticks.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  return ticks;
}

function tickLabels(values, form) {
  // Three digits where they say what the neighbours' distance asks for, else as many as that needs.
  const show = form === "percent" ? (v) => Number((v * 100).toFixed(1)) + "%" : FORMS[form || "number"], labels = values.map(show);
  const gap = Math.min(...values.slice(1).map((v, i) => Math.abs(v - values[i])));
  const enough = Math.max(...values.map(Math.abs)) * 0.005 <= gap / 2 && new Set(labels).size === values.length;
  if (enough || values.length < 2) return labels;
  const scale = form === "percent" ? 100 : 1, unit = { percent: "%", seconds: " s" }[form] || "";
  const least = String(Number((gap * scale).toPrecision(2))), decimals = (least.split("e-")[0].split(".")[1] || "").length + Number(least.split("e-")[1] || 0);
  return values.map((v) => (v * scale).toFixed(Math.min(20, decimals)) + unit);
}

function logTicks(low, high) {
  // Positions are exponents; below two decades 2 and 5 (or every whole number) join the powers of ten.
  const stride = Math.max(1, Math.ceil((high - low) / 5)), ticks = [];
  const within = high - low > 2 ? [1] : high - low > 0.5 ? [1, 2, 5] : [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8];
  for (let e = Math.floor(low); e <= Math.floor(high); e += stride) for (const m of within) ticks.push(e + Math.log10(m));
  return ticks.filter((t) => t >= low && t <= high);
}

function smoothed(values, weight) {
  // Exponential moving average with bias correction; gaps stay gaps.
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

function nearestIndex(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

// One cursor for all charts: hovering a step in one of them marks it in each.
const cursor = {
  watchers: new Set(),
  move(step, source) { for (const watcher of this.watchers) watcher(step, source); },
};

const tip = {
  node: null,
  show(event, ...content) {
    this.node = this.node || document.getElementById("tip");
    this.node.replaceChildren(...content);
    this.node.hidden = false;
    const box = this.node.getBoundingClientRect(), gap = 14;
    let x = event.clientX + gap, y = event.clientY + gap;
    if (x + box.width > innerWidth - 8) x = event.clientX - box.width - gap;
    if (y + box.height > innerHeight - 8) y = event.clientY - box.height - gap;
    this.node.style.left = Math.max(4, x) + "px";
    this.node.style.top = Math.max(4, y) + "px";
  },
  hide() { if (this.node) this.node.hidden = true; },
};

function tipRow(color, label, value) {
  return el("div", { class: "tip-row" }, color ? el("i", { class: "swatch", style: { background: color } }) : null, el("span", {}, label), el("b", {}, value));
}

const MARGIN = { left: 52, right: 14, top: 8, bottom: 24 };

function plotFrame(width, height, domain, yTicks, showY) {
  // Axes and grid; returns the svg, its layers and the two scales. yTicks: [[position in the y domain, label]].
  const [x0, x1, y0, y1] = domain;
  const inner = { w: width - MARGIN.left - MARGIN.right, h: height - MARGIN.top - MARGIN.bottom };
  const sx = (x) => MARGIN.left + (x1 === x0 ? 0.5 : (x - x0) / (x1 - x0)) * inner.w;
  const sy = (y) => MARGIN.top + inner.h - (y1 === y0 ? 0.5 : (y - y0) / (y1 - y0)) * inner.h;
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const [position, label] of yTicks) {
    const y = sy(position);
    root.append(svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y, class: "grid" }));
    root.append(svg("text", { x: MARGIN.left - 7, y: y + 3.5, class: "tick", "text-anchor": "end" }, label));
  }
  const wanted = Math.max(2, Math.min(8, Math.floor(inner.w / 62)));
  for (const tick of niceTicks(x0, x1, wanted).filter((t) => Number.isInteger(t))) {
    const label = String(tick), tight = sx(tick) + label.length * 3.4 > width - 2;
    root.append(svg("text", { x: tight ? width - 2 : sx(tick), y: height - 7, class: "tick", "text-anchor": tight ? "end" : "middle" }, label));
  }
  root.append(svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: MARGIN.top + inner.h, y2: MARGIN.top + inner.h, class: "axis" }));
  const toX = (px) => x0 + ((px - MARGIN.left) / inner.w) * (x1 - x0);
  return { root, sx, sy, toX, inner };
}

function yScale(curves, wish) {
  // Domain and ticks over everything drawn; `log` works on positive values only, so without any the axis is linear.
  const options = { ...wish, log: wish.log && curves.some((curve) => curve.y.some((v) => v > 0)) };
  const transform = options.log ? (v) => (v > 0 ? Math.log10(v) : null) : (v) => v;
  let low = Infinity, high = -Infinity;
  for (const curve of curves) for (const list of [curve.y, curve.low, curve.high]) for (const value of list || []) {
    const t = value === null ? null : transform(value);
    if (t !== null) { low = Math.min(low, t); high = Math.max(high, t); }
  }
  if (low > high) return { transform, low: 0, high: 1, ticks: [] };
  if (options.zero && !options.log && low > 0) low = 0;
  const pad = (high - low || Math.abs(high) * 0.2 || 1) * 0.06;
  const floor = options.zero && low === 0 ? 0 : low - pad;
  let ceiling = high + pad;
  if (options.form === "percent" && high <= 1) ceiling = Math.min(ceiling, Math.max(1.02, high));
  const positions = options.log ? logTicks(floor, ceiling) : niceTicks(floor, ceiling, options.big ? 6 : 4);
  const labels = tickLabels(positions.map((p) => (options.log ? Math.pow(10, p) : p)), options.form);
  return { transform, low: floor, high: ceiling, ticks: positions.map((p, i) => [p, labels[i]]) };
}

function pathOf(points) {
  let path = "", open = false;
  for (const point of points) {
    if (point === null) { open = false; continue; }
    path += (open ? "L" : "M") + point[0].toFixed(1) + "," + point[1].toFixed(1);
    open = true;
  }
  return path;
}

function bandOf(curve, sx, toY) {
  const up = [], down = [];
  curve.x.forEach((x, i) => {
    const a = curve.high[i], b = curve.low[i];
    if (a === null || b === null || a === undefined || b === undefined) return;
    const ya = toY(a), yb = toY(b);
    if (ya !== null && yb !== null) { up.push([sx(x), ya]); down.unshift([sx(x), yb]); }
  });
  return up.length > 1 ? pathOf(up.concat(down)) + "Z" : "";
}

function drawCurve(frame, curve, scale, weight) {
  const toY = (v) => { const t = v === null || v === undefined ? null : scale.transform(v); return t === null ? null : frame.sy(t); };
  const points = (ys) => curve.x.map((x, i) => { const y = toY(ys[i]); return y === null ? null : [frame.sx(x), y]; });
  if (curve.low && curve.high) frame.root.append(svg("path", { d: bandOf(curve, frame.sx, toY), fill: curve.color, class: "band" }));
  const dense = curve.x.length > 60;
  if (weight > 0 && !curve.dots) {
    frame.root.append(svg("path", { d: pathOf(points(curve.y)), stroke: curve.color, class: "line raw" }));
    frame.root.append(svg("path", { d: pathOf(points(smoothed(curve.y, weight))), stroke: curve.color, class: "line" }));
  } else {
    frame.root.append(svg("path", { d: pathOf(points(curve.y)), stroke: curve.color, class: "line" + (dense && !curve.dots ? " dense" : "") }));
  }
  const lonely = curve.y.filter((v) => v !== null).length === 1;
  if ((curve.dots && curve.x.length <= 80) || lonely) {
    for (const point of points(curve.y)) if (point) frame.root.append(svg("circle", { cx: point[0], cy: point[1], r: 3.5, fill: curve.color, class: "dot" }));
  }
}

function drawMarks(frame, height, marks) {
  // Resumes as dashed lines, alarms as small triangles on the axis.
  for (const mark of marks.resumes || []) {
    const x = frame.sx(mark.step);
    frame.root.append(svg("line", { x1: x, x2: x, y1: MARGIN.top, y2: height - MARGIN.bottom, class: "resume" }, svg("title", {}, `attempt ${mark.attempt} takes over at step ${mark.step}`)));
  }
  for (const alarm of marks.alarms || []) {
    const x = frame.sx(alarm.first), y = height - MARGIN.bottom;
    frame.root.append(svg("path", { d: `M${x - 5},${y}L${x + 5},${y}L${x},${y - 9}Z`, class: "alarm-mark " + alarm.level }, svg("title", {}, `step ${alarm.first}: ${alarm.message}`)));
  }
}

function lineChart(node, spec) {
  // spec: {title, unit, height, curves: [{label, color, x, y, low?, high?, dots?}], form, log, zero, big, weight, marks, domain, onPick}
  const readout = el("span", { class: "readout" });
  const log = spec.canLog ? el("button", { class: "quiet tiny", type: "button", title: "Logarithmic axis", "aria-pressed": String(Boolean(spec.log)), on: { click: () => spec.onLog(!spec.log) } }, "log") : null;
  const head = el("div", { class: "chart-head" }, el("div", { class: "chart-title" }, el("h3", { title: spec.help || "" }, spec.title), spec.unit ? el("span", { class: "unit" }, spec.unit) : null, log), readout);
  const width = Math.max(220, node.clientWidth), height = spec.height;
  const scale = yScale(spec.curves, spec);
  const frame = plotFrame(width, height, [spec.domain[0], spec.domain[1], scale.low, scale.high], scale.ticks);
  for (const curve of spec.curves) drawCurve(frame, curve, scale, spec.weight || 0);
  drawMarks(frame, height, spec.marks || {});
  const hair = svg("line", { y1: MARGIN.top, y2: height - MARGIN.bottom, class: "hair", visibility: "hidden" });
  const dots = spec.curves.map((curve) => svg("circle", { r: 4, fill: curve.color, class: "dot", visibility: "hidden" }));
  frame.root.append(hair, ...dots);
  node.replaceChildren(head, frame.root);
  const show = FORMS[spec.form || "number"];
  const at = (curve, step) => { const i = nearestIndex(curve.x, step); return [curve.x[i], curve.y[i]]; };
  const mark = (step) => {
    const last = step === null;
    hair.setAttribute("visibility", last ? "hidden" : "visible");
    if (!last) { hair.setAttribute("x1", frame.sx(step)); hair.setAttribute("x2", frame.sx(step)); }
    readout.replaceChildren(...spec.curves.map((curve, k) => {
      const [x, value] = last ? lastPoint(curve) : at(curve, step);
      const t = value === null ? null : scale.transform(value);
      dots[k].setAttribute("visibility", last || t === null ? "hidden" : "visible");
      if (t !== null) { dots[k].setAttribute("cx", frame.sx(x)); dots[k].setAttribute("cy", frame.sy(t)); }
      return el("span", {}, spec.curves.length > 1 ? el("i", { class: "swatch", style: { background: curve.color } }) : null, spec.curves.length > 1 ? curve.label + " " : null, el("b", {}, show(value)));
    }));
  };
  mark(null);
  cursor.watchers.add(mark);
  hoverSteps(frame, spec, (event, step) => {
    const rows = spec.curves.map((curve) => {
      const [x, value] = at(curve, step);
      return tipRow(curve.color, curve.label + (x === step ? "" : ` (step ${x})`), bandText(curve, x, value, show));
    });
    tip.show(event, el("div", { class: "tip-head" }, "step " + step), ...rows);
  });
  return () => cursor.watchers.delete(mark);
}

function bandText(curve, x, value, show) {
  const i = curve.x.indexOf(x);
  const band = curve.low && curve.high && curve.low[i] !== null && curve.low[i] !== undefined;
  return show(value) + (band ? `  [${show(curve.low[i])}, ${show(curve.high[i])}]` : "");
}

function lastPoint(curve) {
  for (let i = curve.y.length - 1; i >= 0; i--) if (curve.y[i] !== null) return [curve.x[i], curve.y[i]];
  return [0, null];
}

function hoverSteps(frame, spec, onStep) {
  const xs = spec.steps;
  if (!xs.length) return;
  const stepAt = (event) => xs[nearestIndex(xs, frame.toX(event.clientX - frame.root.getBoundingClientRect().left))];
  frame.root.addEventListener("pointermove", (event) => { const step = stepAt(event); cursor.move(step); onStep(event, step); });
  frame.root.addEventListener("pointerleave", () => { cursor.move(null); tip.hide(); });
  if (spec.onPick) {
    frame.root.classList.add("pickable");
    frame.root.addEventListener("click", (event) => spec.onPick(stepAt(event)));
  }
}

function stackChart(node, spec) {
  // spec: {height, bars: [{from, to, parts}], layers: [{label, color}], share, marks, onPick}
  const bins = spec.bars.map((bar) => ({ ...bar, middle: (bar.from + bar.to) / 2, total: bar.parts.reduce((a, b) => a + b, 0) }));
  const width = Math.max(220, node.clientWidth), room = width - MARGIN.left - MARGIN.right;
  const high = spec.share ? 1 : Math.max(...bins.map((bin) => bin.total), 1e-9) * 1.05;
  const levels = niceTicks(0, high, 4), labels = tickLabels(levels, spec.share ? "percent" : "seconds"), ticks = levels.map((t, i) => [t, labels[i]]);
  const first = bins[0].middle, last = bins[bins.length - 1].middle, half = bins.length > 1 ? (last - first) / (bins.length - 1) / 2 : 0.5;
  const frame = plotFrame(width, spec.height, [first - half, last + half, 0, high], ticks);
  const slot = room / bins.length, bar = Math.max(1.5, Math.min(46, slot - (slot > 6 ? 2 : 0.5)));
  for (const bin of bins) {
    let sum = 0;
    spec.layers.forEach((layer, k) => {
      const part = spec.share ? (bin.total > 0 ? bin.parts[k] / bin.total : 0) : bin.parts[k];
      if (part <= 0) return;
      const top = frame.sy(sum + part), bottom = frame.sy(sum), seam = bottom - top > 4 && bar > 4 ? 1 : 0;
      frame.root.append(svg("rect", { x: frame.sx(bin.middle) - bar / 2, width: bar, y: top, height: Math.max(0.5, bottom - top - seam), fill: layer.color }));
      sum += part;
    });
  }
  drawMarks(frame, spec.height, spec.marks || {});
  const hair = svg("line", { y1: MARGIN.top, y2: spec.height - MARGIN.bottom, class: "hair", visibility: "hidden" });
  frame.root.append(hair);
  node.replaceChildren(frame.root);
  const mark = (step) => {
    hair.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) { hair.setAttribute("x1", frame.sx(step)); hair.setAttribute("x2", frame.sx(step)); }
  };
  cursor.watchers.add(mark);
  const middles = bins.map((bin) => bin.middle);
  hoverSteps(frame, { steps: middles, onPick: spec.onPick }, (event, middle) => stackTip(event, bins[middles.indexOf(middle)], spec.layers));
  return () => cursor.watchers.delete(mark);
}

function stackTip(event, bin, layers) {
  const title = bin.from === bin.to ? "step " + bin.from : `mean of steps ${bin.from}–${bin.to}`;
  const rows = layers.map((layer, k) => [layer, bin.parts[k]]).filter(([, part]) => part > 0)
    .map(([layer, part]) => tipRow(layer.color, layer.label, `${showSeconds(part)} · ${((part / bin.total) * 100).toFixed(0)}%`));
  tip.show(event, el("div", { class: "tip-head" }, `${title} · ${showSeconds(bin.total)}`), ...rows.reverse());
}
