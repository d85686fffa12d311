"use strict";
// The sample browser: a filtered list on the left, one sample with its coloured tokens on the right.

const COLORINGS = {
  adv: { label: "advantage", needs: "adv", low: "pushed down", high: "pushed up", diverging: true },
  lp: { label: "log-probability", needs: "lp", low: "certain", high: "surprising", rgb: "var(--surprise)" },
  gap: { label: "rollout/trainer gap", needs: "gap", low: "agree", high: "differ", rgb: "var(--gap)" },
  ent: { label: "entropy", needs: "ent", low: "certain", high: "undecided", rgb: "var(--entropy)" },
  none: { label: "plain", needs: null },
};

const browser = {
  samples: { files: [] },
  state: { file: "", id: "", text: "", least: "", most: "", purpose: "", stop: "", sort: "reward", grouped: true, color: "" },
  nodes: {},

  mount(room) {
    const n = this.nodes;
    const input = (name, attributes) => el("input", { ...attributes, on: { input: (event) => { this.state[name] = event.target.value; this.list(); } } });
    const select = (name, label) => el("select", { "aria-label": label, title: label, on: { change: (event) => { this.state[name] = event.target.value; if (name === "file") this.changeFile(); else this.list(); } } });
    n.file = select("file", "Step");
    n.back = el("button", { class: "quiet", type: "button", title: "Earlier step", on: { click: () => this.shift(-1) } }, "◀");
    n.forth = el("button", { class: "quiet", type: "button", title: "Later step", on: { click: () => this.shift(1) } }, "▶");
    n.text = input("text", { type: "search", placeholder: "text in prompt or response", "aria-label": "Filter by text" });
    n.least = input("least", { type: "number", step: "any", placeholder: "reward ≥", "aria-label": "Least reward" });
    n.most = input("most", { type: "number", step: "any", placeholder: "reward ≤", "aria-label": "Greatest reward" });
    n.purpose = select("purpose", "Purpose");
    n.stop = select("stop", "Stop reason");
    n.sort = select("sort", "Order");
    for (const [value, label] of [["reward", "highest reward"], ["-reward", "lowest reward"], ["tokens", "longest"], ["-tokens", "shortest"], ["gap", "largest mismatch"], ["file", "as chosen"]]) n.sort.append(el("option", { value }, label));
    n.grouped = el("input", { type: "checkbox", checked: true, on: { change: (event) => { this.state.grouped = event.target.checked; this.list(); } } });
    n.count = el("span", { class: "note" });
    n.list = el("div", { class: "sample-list", tabindex: "0", role: "listbox", "aria-label": "Samples", on: { keydown: (event) => this.key(event), click: (event) => this.click(event) } });
    n.detail = el("div", { class: "sample-detail" });
    const bar = el("div", { class: "filters" }, n.back, n.file, n.forth, n.text, n.least, n.most, n.purpose, n.stop, n.sort, el("label", { class: "inline" }, n.grouped, "by group"), n.count);
    room.replaceChildren(bar, el("div", { class: "panes" }, n.list, n.detail));
  },

  keepOpen(samples) {
    // A live run's choice of samples moves on; the file that is being read stays as it is.
    const old = this.file(), holds = (file) => file && file.groups.some((group) => group.rows.some((row) => row.id === this.state.id));
    if (!holds(old)) return samples;
    const at = samples.files.findIndex((file) => file.kind === old.kind && file.step === old.step);
    if (holds(samples.files[at])) return samples;
    const files = samples.files.filter((_, i) => i !== at).concat([old]).sort((a, b) => b.kind.localeCompare(a.kind) || a.step - b.step);
    return { ...samples, files };
  },

  update(arrived) {
    const samples = this.keepOpen(arrived);
    this.samples = samples;
    const keys = samples.files.map((file) => file.kind + ":" + file.step), n = this.nodes;
    if (!keys.includes(this.state.file)) {
      const train = keys.filter((key) => key.startsWith("train"));
      this.state.file = (train.length ? train : keys).slice(-1)[0] || "";
    }
    const options = (kind, label) => {
      const files = samples.files.filter((file) => file.kind === kind);
      return files.length ? el("optgroup", { label }, ...files.map((file) => el("option", { value: kind + ":" + file.step }, `${kind === "eval" ? "eval " : ""}step ${file.step}`))) : null;
    };
    n.file.replaceChildren(...[options("train", "training"), options("eval", "evaluation")].filter(Boolean));
    n.file.value = this.state.file;
    this.changeFile();
  },

  file() { return this.samples.files.find((file) => file.kind + ":" + file.step === this.state.file); },

  changeFile() {
    const rows = this.rows(), n = this.nodes;
    const fill = (node, name, label, values) => {
      node.replaceChildren(el("option", { value: "" }, label), ...[...new Set(values)].sort().map((value) => el("option", { value }, value)));
      if (![...node.options].some((option) => option.value === this.state[name])) this.state[name] = "";
      node.value = this.state[name];
      node.hidden = node.options.length < 3;
    };
    fill(n.purpose, "purpose", "any purpose", rows.map(({ row }) => row.purpose));
    fill(n.stop, "stop", "any ending", rows.map(({ row }) => row.stop));
    this.list();
  },

  rows() {
    const file = this.file();
    return file ? file.groups.flatMap((group) => group.rows.map((row) => ({ row, group }))) : [];
  },

  shift(by) {
    const options = [...this.nodes.file.options], at = options.findIndex((option) => option.value === this.state.file);
    const next = options[at + by];
    if (next) this.open(next.value);
  },

  open(key, id) {
    this.state.file = key;
    if (id) this.state.id = id;
    this.nodes.file.value = key;
    this.changeFile();
  },

  openStep(step) {
    // From a click in a chart: the nearest training step that is on the page.
    const files = this.samples.files.filter((file) => file.kind === "train");
    if (!files.length) return false;
    const nearest = files.reduce((a, b) => (Math.abs(b.step - step) < Math.abs(a.step - step) ? b : a));
    this.open("train:" + nearest.step);
    return true;
  },

  matches({ row, group }) {
    const s = this.state, needle = s.text.trim().toLowerCase();
    if (s.purpose && row.purpose !== s.purpose) return false;
    if (s.stop && row.stop !== s.stop) return false;
    if (s.least !== "" && !(row.reward !== undefined && row.reward >= Number(s.least))) return false;
    if (s.most !== "" && !(row.reward !== undefined && row.reward <= Number(s.most))) return false;
    return !needle || responseText(row).toLowerCase().includes(needle) || (row.prompt || group.prompt).toLowerCase().includes(needle) || row.id.toLowerCase().includes(needle);
  },

  order(found) {
    const name = this.state.sort.replace("-", ""), sign = this.state.sort.startsWith("-") ? 1 : -1;
    if (name === "file") return found;
    const value = ({ row }) => (name === "gap" ? greatest(row.gap) : row[name] === undefined ? -Infinity * -sign : row[name]);
    return found.map((item, i) => [item, i]).sort((a, b) => sign * (value(a[0]) - value(b[0])) || a[1] - b[1]).map(([item]) => item);
  },

  list() {
    const n = this.nodes, file = this.file(), found = this.order(this.rows().filter((item) => this.matches(item)));
    n.count.textContent = file ? `${found.length} of ${file.all_rows} samples (${file.groups.length} of ${file.all_groups} groups on this page)` : "";
    if (!found.some(({ row }) => row.id === this.state.id)) this.state.id = found.length ? (found.find(({ row }) => greatest(row.adv) > 0) || found[0]).row.id : "";
    const parts = [];
    if (this.state.grouped) {
      for (const group of new Set(found.map((item) => item.group))) {
        const rows = found.filter((item) => item.group === group);
        parts.push(this.groupHead(group), ...rows.map((item) => this.line(item, false)));
      }
    } else parts.push(...found.map((item) => this.line(item, true)));
    const scroll = n.list.scrollTop;
    n.list.replaceChildren(...(parts.length ? parts : [el("p", { class: "note pad" }, file ? "No sample matches these filters." : "No samples were stored.")]));
    n.list.scrollTop = scroll;
    this.order_ids = found.map(({ row }) => row.id);
    if (this.state.grouped) this.order_ids = [...n.list.querySelectorAll("[data-id]")].map((node) => node.dataset.id);
    this.show();
  },

  groupHead(group) {
    const rewards = group.rows.map((row) => row.reward).filter((r) => r !== undefined);
    const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    const flat = rewards.length > 1 && rewards.every((r) => r === rewards[0]);
    return el("div", { class: "group-head" },
      el("div", { class: "group-line" }, el("span", { class: "dots" }, ...group.rows.map((row) => rewardDot(row))), el("span", { class: "note" }, group.rows.length > 1 ? `mean ${showNumber(mean)}${flat ? " · no signal" : ""}` : "")),
      el("div", { class: "snippet", title: group.task ? "task " + group.task : "" }, lastLine(group.prompt)));
  },

  line({ row, group }, withPrompt) {
    const chosen = row.id === this.state.id;
    return el("div", { class: "sample-line" + (chosen ? " chosen" : ""), "data-id": row.id, role: "option", "aria-selected": String(chosen) },
      rewardChip(row), el("div", { class: "snippet" }, withPrompt ? el("span", { class: "dim" }, lastLine(group.prompt) + " → ") : null, snippet(row)),
      el("span", { class: "note" }, `${row.tokens}${row.stop === "length" || row.stop === "context_full" ? " ✂" : ""}`));
  },

  click(event) {
    const line = event.target.closest("[data-id]");
    if (line) { this.state.id = line.dataset.id; this.choose(); }
  },

  key(event) {
    const by = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (!by || event.metaKey || event.ctrlKey) return;
    const at = this.order_ids.indexOf(this.state.id), next = this.order_ids[at + by];
    if (next) { this.state.id = next; this.choose(); }
    event.preventDefault();
  },

  choose() {
    for (const node of this.nodes.list.querySelectorAll("[data-id]")) {
      const chosen = node.dataset.id === this.state.id;
      node.classList.toggle("chosen", chosen);
      node.setAttribute("aria-selected", String(chosen));
      if (chosen) {
        const list = this.nodes.list, top = node.offsetTop - list.offsetTop;
        if (top < list.scrollTop) list.scrollTop = top - 40;
        else if (top + node.offsetHeight > list.scrollTop + list.clientHeight) list.scrollTop = top + node.offsetHeight - list.clientHeight + 8;
      }
    }
    this.show();
  },

  show() {
    const item = this.rows().find(({ row }) => row.id === this.state.id), n = this.nodes;
    tip.hide();
    if (!item) { n.detail.replaceChildren(); return; }
    const { row, group } = item, available = Object.entries(COLORINGS).filter(([, c]) => !c.needs || row[c.needs] !== undefined);
    if (!available.some(([name]) => name === this.state.color)) this.state.color = available[0][0];
    const toggle = el("div", { class: "segmented", role: "group", "aria-label": "Colour of tokens" }, ...available.map(([name, c]) => el("button", { type: "button", "aria-pressed": String(name === this.state.color), on: { click: () => { this.state.color = name; this.show(); } } }, c.label)));
    n.detail.replaceChildren(
      this.facts(row, group), promptBox(row.prompt || group.prompt, row.prompt_tokens || group.prompt_tokens), mediaStrip(row.prompt ? row.media : group.media, "prompt"),
      el("div", { class: "box-head" }, el("h4", {}, `response · ${row.tokens} tokens`), toggle, legendOf(row, group, this.state.color)),
      tokenView(row, group, this.state.color), mediaStrip(row.later_media, "later turns"), this.elsewhere(row, group));
  },

  facts(row, group) {
    const pairs = [["sample", row.id], ["ground truth", group.truth], ["task", group.task], ["purpose", row.purpose], ["stop", row.stop], ["version", row.versions[0] === row.versions[1] ? row.versions[0] : row.versions.join("–")], ["temperature", row.temperature]];
    if (row.outcome !== "ok") pairs.push(["outcome", row.outcome]);
    if (row.loss_tokens !== row.tokens) pairs.push(["trained on", `${row.loss_tokens} of ${row.tokens} tokens`]);
    if (typeof row.adv === "number") pairs.push(["advantage", showNumber(row.adv)]);
    for (const [name, value] of Object.entries(row.components)) pairs.push([name, showNumber(value)]);
    return el("div", { class: "sample-facts" }, rewardChip(row, true), ...pairs.filter(([, value]) => value !== "" && value !== undefined).map(([name, value]) => el("span", {}, el("span", { class: "dim" }, name + " "), String(value))));
  },

  elsewhere(row, group) {
    // The same task at other steps: what changed.
    const here = this.state.file, found = [];
    for (const file of this.samples.files) for (const other of file.groups) {
      const key = file.kind + ":" + file.step;
      if (group.task && other.task === group.task && key !== here) found.push([key, file, other]);
    }
    if (!found.length) return el("div");
    return el("div", { class: "elsewhere" }, el("h4", {}, "the same task at other steps"), ...found.map(([key, file, other]) => el("button", { class: "quiet", type: "button", on: { click: () => this.open(key, other.rows[0].id) } }, `${file.kind === "eval" ? "eval " : ""}step ${file.step} `, ...other.rows.map((r) => rewardDot(r)))));
  },
};

function responseText(row) { return row.pieces ? row.pieces.join("") : row.text; }
function snippet(row) { return (row.snippet || row.text || responseText(row)).replace(/\s+/g, " ").trim().slice(0, 220) || "(empty)"; }
function lastLine(prompt) {
  const lines = prompt.split("\n").map((line) => line.replace(/<\|[^|]*\|>/g, " ").replace(/\s+/g, " ").trim()).filter(Boolean);
  return lines.reduce((best, line) => (line.length > best.length ? line : best), "").slice(0, 200) || "(empty prompt)";
}
function cell(column, i) { return Array.isArray(column) ? column[i] : column; }
function greatest(column) {
  if (column === undefined) return 0;
  return Array.isArray(column) ? column.reduce((a, v) => Math.max(a, Math.abs(v || 0)), 0) : Math.abs(column);
}

function rewardTone(row) {
  if (row.reward === undefined) return "invalid";
  return row.reward > 0.999 ? "good" : row.reward <= 0 ? "bad" : "middle";
}
function rewardChip(row, big) {
  return el("span", { class: `chip ${rewardTone(row)}${big ? " big" : ""}`, title: "reward" }, row.reward === undefined ? "invalid" : (big ? "reward " : "") + showNumber(row.reward));
}
function rewardDot(row) { return el("i", { class: "dot-chip " + rewardTone(row), title: row.reward === undefined ? "invalid" : "reward " + showNumber(row.reward) }); }

function promptBox(prompt, tokens) {
  return el("details", { class: "prompt", open: prompt.length < 900 }, el("summary", {}, `prompt · ${tokens} tokens`), el("pre", {}, prompt));
}

function mediaStrip(media, place) {
  // Thumbnails of the images and videos of a prompt or of later turns, with their sizes.
  if (!media || !media.length) return "";
  return el("div", { class: "media-strip", role: "list", "aria-label": `media of the ${place}` }, ...media.map((m) => el("figure", { role: "listitem" }, m.image ? el("img", { src: m.image, alt: `${m.text} (${place})` }) : null, el("figcaption", { class: "note" }, m.text))));
}

function colorScale(group, name) {
  // One scale per group, so that the samples of a group can be compared.
  const c = COLORINGS[name];
  if (!c.needs) return null;
  const most = Math.max(...group.rows.map((row) => greatest(row[c.needs])), 1e-12);
  return name === "lp" ? Math.min(most, 5) : most;
}

function tokenColor(name, value, most) {
  if (value === null || value === undefined || !most) return "";
  const c = COLORINGS[name], strength = Math.min(1, Math.abs(value) / most);
  if (strength < 0.01) return "";
  const base = c.diverging ? (value > 0 ? "var(--up)" : "var(--down)") : c.rgb;
  return `color-mix(in srgb, ${base} ${(8 + 62 * strength).toFixed(0)}%, transparent)`;
}

function legendOf(row, group, name) {
  const c = COLORINGS[name];
  if (!c.needs) return null;
  const most = colorScale(group, name), show = (v) => showNumber(v);
  if (most < 1e-9) return el("span", { class: "legend-bar" }, name === "adv" ? "every advantage of this group is 0: no signal" : "all 0");
  const stops = [-1, -0.5, 0, 0.5, 1].filter((s) => c.diverging || s >= 0).map((s) => tokenColor(name, s * most, most) || "transparent");
  const ends = c.diverging ? [`${show(-most)} ${c.low}`, `${c.high} ${show(most)}`] : [c.low, `${c.high} ${name === "lp" ? (most >= 5 ? "≤ " : "") + show(-most) : show(most)}`];
  return el("span", { class: "legend-bar" }, ends[0], el("i", { style: { background: `linear-gradient(90deg, ${stops.join(",")})` } }), ends[1]);
}

function tokenView(row, group, name) {
  const most = colorScale(group, name), column = COLORINGS[name].needs ? row[COLORINGS[name].needs] : undefined;
  const box = el("div", { class: "tokens" + (row.pieces ? "" : " ids") });
  if (!row.pieces) box.append(el("pre", { class: "plain" }, row.text), el("p", { class: "note" }, "No tokenizer was found for this run (tokenizer.json in the run directory, a checkpoint or the model folder): the strip below shows token ids."));
  row.ids.forEach((id, i) => {
    if (row.cut && i === row.cut.at) box.append(el("span", { class: "cut" }, ` … ${row.cut.left_out} tokens not on this page … `));
    const masked = cell(row.mask, i) === 0, piece = row.pieces ? row.pieces[i] : String(id);
    const color = masked ? "" : tokenColor(name, cell(column, i), most);
    box.append(el("span", { class: masked ? "tk env" : "tk", "data-i": i, style: color ? { background: color } : {} }, visible(piece)));
  });
  box.addEventListener("pointermove", (event) => {
    const token = event.target.closest("[data-i]");
    if (token) tip.show(event, ...tokenTip(row, Number(token.dataset.i))); else tip.hide();
  });
  box.addEventListener("pointerleave", () => tip.hide());
  return box;
}

function visible(piece) {
  // Line ends and tokens without text of their own must not vanish.
  if (piece === "") return "·";
  return piece.replace(/\n/g, "↵\n");
}

function tokenTip(row, i) {
  const place = row.cut && i >= row.cut.at ? i + row.cut.left_out : i;
  const rows = [["token id", row.ids[i]], ["place", `${place + 1} of ${row.tokens}`]];
  if (cell(row.mask, i) === 0) rows.push(["source", "environment (not trained on)"]);
  const lp = cell(row.lp, i), gap = cell(row.gap, i), entropy = cell(row.ent, i), version = cell(row.ver, i), ref = cell(row.ref, i);
  if (lp !== undefined && lp !== null) rows.push(["log-prob, rollout", `${lp.toFixed(4)} (p ${showPercent(Math.exp(lp))})`]);
  if (lp !== undefined && lp !== null && gap !== undefined && gap !== null) rows.push(["log-prob, trainer", `${(lp + gap).toFixed(4)} (${gap >= 0 ? "+" : ""}${showNumber(gap)})`]);
  if (ref !== undefined && ref !== null) rows.push(["log-prob, reference", ref.toFixed(4)]);
  const advantage = cell(row.adv, i);
  if (advantage !== undefined && advantage !== null) rows.push(["advantage", showNumber(advantage)]);
  if (entropy !== undefined && entropy !== null) rows.push(["entropy", showNumber(entropy) + " nats"]);
  if (version !== undefined && version !== null && version >= 0) rows.push(["weight version", version]);
  const piece = row.pieces ? JSON.stringify(row.pieces[i]) : "";
  return [el("div", { class: "tip-head mono" }, piece || "token"), ...rows.map(([label, value]) => tipRow("", label, String(value)))];
}
