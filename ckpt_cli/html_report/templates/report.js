"use strict";
// Every text is set by textContent or setAttribute: nothing from a checkpoint is parsed as HTML.
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const PAGE = 50;

const fill = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(name, value);
  node.append(...children);
  return node;
};
const element = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const drawing = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
const count = (n, noun, plural = `${noun}s`) => `${n.toLocaleString("en")} ${n === 1 ? noun : plural}`;
const bytes = (n) => {
  if (n < 1024) return `${n} B`;
  let unit = 0;
  for (n /= 1024; n >= 999.5 && unit < 4; unit++) n /= 1024;
  return `${n < 9.995 ? n.toFixed(2) : n < 99.95 ? n.toFixed(1) : n.toFixed(0)} ${["KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
};
const number = (value) => typeof value !== "number" ? String(value) : Number.isInteger(value) ? value.toLocaleString("en") : value.toPrecision(4);

// Tooltips, for the pointer and for the keyboard.
const tip = document.getElementById("tip");
const hideTip = () => { tip.hidden = true; };
const showTip = (target, x, y) => {
  tip.textContent = target.dataset.tip;
  tip.hidden = false;
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight < innerHeight ? y + 18 : Math.max(4, y - tip.offsetHeight - 10)}px`;
};
document.addEventListener("pointermove", (event) => {
  const target = event.target instanceof Element && event.target.closest("[data-tip]");
  target ? showTip(target, event.clientX, event.clientY) : hideTip();
});
document.addEventListener("focusin", (event) => {
  const target = event.target.closest("[data-tip]");
  if (!target || !target.matches(":focus-visible")) return hideTip();
  const box = target.getBoundingClientRect();
  showTip(target, box.left, Math.min(box.top + 10, innerHeight - 40));
});
document.addEventListener("focusout", hideTip);
document.addEventListener("scroll", hideTip, { passive: true });

// Arrow keys go through the parts of a drawing, which is one stop of the Tab key.
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const group = event.target.closest && event.target.closest("[data-roving]");
  if (!group || !step) return;
  event.preventDefault();
  const parts = [...group.querySelectorAll("[tabindex]")];
  const next = parts[(parts.indexOf(event.target) + step + parts.length) % parts.length];
  event.target.setAttribute("tabindex", "-1");
  next.setAttribute("tabindex", "0");
  next.focus();
});

// Names of folded rows: texts and, at odd positions, runs of numbers; the last number runs fastest.
const label = (parts) => parts.map((part, at) => at % 2 ? `[${part.map(([first, last]) => first === last ? first : `${first}-${last}`).join(",")}]` : part).join("");
const members = (parts) => {
  let names = [parts[0]];
  for (let at = 1; at < parts.length; at += 2) {
    const numbers = parts[at].flatMap(([first, last]) => Array.from({ length: last - first + 1 }, (_, i) => first + i));
    names = names.flatMap((name) => numbers.map((value) => name + value + parts[at + 1]));
  }
  return names;
};

// Shard maps: the first two cut axes span the drawing, further cut axes make several drawings.
const mapOf = (maps, member) => {
  const number = typeof maps === "number" ? maps : maps[member];
  return number === undefined ? null : data.table.layouts.maps[number];
};
const drawShards = (shape, map, title, cut) => {
  const { names, boxes, holders } = data.table.layouts;
  const [boxesNumber, holdersNumber, cutAxes, total] = map;
  const rank = shape.length;
  const held = holders[holdersNumber];
  const shards = boxes[boxesNumber].map((numbers, at) => ({ offset: numbers.slice(0, rank), size: numbers.slice(rank), held: held[at], at }));
  const axes = [...new Set([...cutAxes, ...cut])].slice(0, 2);
  for (const axis of rank > 1 ? [rank - 2, rank - 1] : rank ? [0] : []) if (axes.length < Math.min(2, rank) && !axes.includes(axis)) axes.push(axis);
  axes.sort((a, b) => a - b);
  const across = axes.at(-1), down = axes.length > 1 ? axes[0] : undefined;
  const others = cutAxes.filter((axis) => axis !== across && axis !== down);
  const panels = new Map();
  for (const shard of shards) {
    const key = others.map((axis) => `axis ${axis} from ${shard.offset[axis].toLocaleString("en")}`).join(", ");
    panels.set(key, [...(panels.get(key) || []), shard]);
  }
  const width = 420, extent = (axis) => axis === undefined ? 1 : Math.max(shape[axis], 1);
  const height = down === undefined ? 64 : Math.min(Math.max(width * extent(down) / extent(across), 110), 420);
  const colors = new Map();
  const place = element("div", {}, element("h3", {}, title));
  place.append(element("p", { class: "lead" }, cutAxes.length ? `cut along axis ${cutAxes.join(" and ")} into ${count(total, "box", "boxes")}` : "not cut: one box"));
  const parts = [];
  for (const [key, members] of [...panels].slice(0, 6)) {
    const svg = drawing("svg", { class: "shards", viewBox: `0 0 ${width + 46} ${height + 22}`, role: "group", "aria-label": `${title}: boxes of the tensor; arrow keys go from box to box`, "data-roving": "" });
    if (key) place.append(element("p", { class: "quiet" }, key));
    for (const shard of members) {
      const [ranks, files, copies, size] = shard.held;
      const rankText = ranks.map((i) => names[i]).join(", ");
      const fileText = files.map((i) => names[i]).join(", ");
      const box = `[${shard.offset.map((start, axis) => `${start}:${start + shard.size[axis]}`).join(", ")}]`;
      const holder = rankText || fileText;
      if (!colors.has(holder)) colors.set(holder, colors.size % 8);
      const x = across === undefined ? 0 : width * shard.offset[across] / extent(across), y = down === undefined ? 0 : height * shard.offset[down] / extent(down);
      const w = across === undefined ? width : width * shard.size[across] / extent(across), h = down === undefined ? height : height * shard.size[down] / extent(down);
      const text = `${box}\n${rankText}${rankText ? "\n" : ""}${fileText}\n${bytes(size)}${copies > 1 ? ` · ${copies} copies` : ""}`;
      const part = drawing("g", { class: `c${colors.get(holder)}`, role: "img", "aria-label": text, "data-tip": text, "data-box": shard.at, tabindex: members[0] === shard ? 0 : -1 },
        drawing("rect", { x: (x + 40).toFixed(1), y: (y + 16).toFixed(1), width: Math.max(w, .5).toFixed(1), height: Math.max(h, .5).toFixed(1) }));
      const short = holder.split("/").at(-1), room = Math.floor((w - 8) / 6.9);
      if (h > 14 && room >= Math.min(short.length, 6)) part.append(drawing("text", { x: (x + 45).toFixed(1), y: (y + 16 + Math.min(h / 2 + 4, 22)).toFixed(1) }, short.length > room ? `${short.slice(0, room - 1)}…` : short));
      svg.append(part);
      parts.push(part);
    }
    if (across !== undefined) svg.append(drawing("text", { class: "axis", x: 40, y: 11 }, `axis ${across}: ${shape[across].toLocaleString("en")}${cutAxes.includes(across) ? ", cut" : ""}`));
    if (down !== undefined) svg.append(drawing("text", { class: "axis", transform: `translate(30 ${height + 16}) rotate(-90)` }, `axis ${down}: ${shape[down].toLocaleString("en")}${cutAxes.includes(down) ? ", cut" : ""}`));
    place.append(svg);
  }
  if (panels.size > 6) place.append(element("p", { class: "quiet" }, `and ${panels.size - 6} more positions along the other axes`));
  if (total > shards.length) place.append(element("p", { class: "quiet" }, `${(total - shards.length).toLocaleString("en")} more boxes are not drawn`));
  const rows = shards.slice(0, 64).map((shard) => element("tr", {}, ...[
    `[${shard.offset.map((start, axis) => `${start}:${start + shard.size[axis]}`).join(", ")}]`, shard.held[0].map((i) => names[i]).join(", "), shard.held[1].map((i) => names[i]).join(", "), bytes(shard.held[3]),
  ].map((text) => element("td", {}, text))));
  const head = element("tr", {}, ...["box", "ranks", "files", "bytes"].map((text) => element("th", { scope: "col" }, text)));
  const note = shards.length > 64 ? [element("p", { class: "quiet" }, `the first 64 of ${total}`)] : [];
  place.append(element("details", {}, element("summary", {}, "Boxes as a table"), element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": `${title}: boxes` }, element("table", { class: "list" }, element("thead", {}, head), element("tbody", {}, ...rows))), ...note));
  return { place, parts };
};

// Statistics of one tensor, with a histogram if there is one.
const drawStatistics = (values) => {
  const place = element("div", {}, element("h3", {}, "Values"));
  const list = element("dl", { class: "numbers" });
  for (const [name, value] of Object.entries(values)) {
    if (name === "bins") continue;
    const isBad = (name === "NaN" || name === "Inf") && value > 0;
    list.append(element("div", {}, element("dt", {}, name), element("dd", { class: isBad ? "bad" : null }, number(value))));
  }
  place.append(list);
  if (values.bins) {
    // From the most negative values by powers of two to those near zero, and up to the greatest.
    const [top, zeros, negative, positive] = values.bins;
    const last = negative.length - 1;
    const range = (at) => at === last ? `below 2^${top - at + 1}` : `from 2^${top - at} to 2^${top - at + 1}`;
    const used = Math.min(last, Math.max(1, negative.findLastIndex((n) => n), positive.findLastIndex((n) => n)));
    const bars = [];
    for (let at = 0; at <= used; at++) bars.push([negative[at], `negative, magnitude ${range(at)}`]);
    bars.push([zeros, "zero"]);
    for (let at = used; at >= 0; at--) bars.push([positive[at], `positive, ${range(at)}`]);
    const most = Math.max(...bars.map(([n]) => n), 1), width = 420, height = 110, step = width / bars.length;
    const svg = drawing("svg", { class: "histogram", viewBox: `0 0 ${width} ${height + 18}`, role: "img", "aria-label": `Histogram of the values by sign and power of two, from ${number(values.min)} to ${number(values.max)}` });
    bars.forEach(([n, text], at) => {
      const h = n ? Math.max(height * n / most, 1.5) : 0;
      svg.append(drawing("g", { "data-tip": `${text}: ${count(n, "value")}` },
        drawing("rect", { class: "hit", x: (at * step).toFixed(1), y: 0, width: step.toFixed(1), height }),
        drawing("rect", { x: (at * step + .5).toFixed(1), y: (height - h).toFixed(1), width: Math.max(step - 1, .5).toFixed(1), height: h.toFixed(1) })));
    });
    svg.append(drawing("line", { x1: 0, x2: width, y1: height, y2: height }));
    svg.append(drawing("text", { class: "axis", x: 0, y: height + 14 }, `−2^${top + 1}`));
    svg.append(drawing("text", { class: "axis", x: width / 2, y: height + 14, "text-anchor": "middle" }, "0"));
    svg.append(drawing("text", { class: "axis", x: width, y: height + 14, "text-anchor": "end" }, `2^${top + 1}`));
    place.append(svg, element("p", { class: "quiet" }, "Each bar is a power of two; zero is in the middle."));
  }
  return place;
};

// One line for each layer, all to one scale, so that an outlier is seen; it is marked in words, too.
const MOST_LINES = 128;
const drawLines = (parts, names) => {
  const measured = parts.map((part, at) => [part, names[at]]).filter(([part]) => part && part.bins);
  const stds = measured.map(([part]) => part.std).filter((std) => std > 0).sort((a, b) => a - b);
  const middle = stds.length ? (stds[(stds.length - 1) >> 1] + stds[stds.length >> 1]) / 2 : 0;
  const top = Math.max(...measured.map(([part]) => part.bins[0]));
  const place = element("div", { class: "lines" }, element("h3", {}, "Layer by layer"));
  const rows = measured.slice(0, MOST_LINES).map(([part, name]) => {
    const [own, zeros, negative, positive] = part.bins;
    const shown = negative.length - 1, shift = top - own;
    const column = (side, at) => at < shift ? 0 : side[at - shift] || 0;
    const counts = [...Array.from({ length: shown }, (_, at) => column(negative, at)), zeros, ...Array.from({ length: shown }, (_, at) => column(positive, shown - 1 - at))];
    const most = Math.max(...counts.filter((_, at) => at !== shown), 1), width = 5;
    const svg = drawing("svg", { class: "line", viewBox: `0 0 ${counts.length * width} 24`, role: "img", "aria-label": `Histogram of ${name}, from ${number(part.min)} to ${number(part.max)}`, "data-tip": `${name}\nfrom ${number(part.min)} to ${number(part.max)}` });
    counts.forEach((n, at) => { if (n) { const h = Math.max(Math.min(n / most, 1) * 24, 1); svg.append(drawing("rect", { x: at * width, y: (24 - h).toFixed(1), width: width - 1, height: h.toFixed(1) })); } });
    const ratio = middle && part.std ? part.std / middle : 1, bad = (part.NaN || 0) + (part.Inf || 0);
    const mark = bad ? `${count(bad, "NaN or Inf", "NaN or Inf")}` : ratio >= 3 || ratio <= 1 / 3 ? `${ratio.toPrecision(3)} × the median std` : "";
    const cell = (text, kind) => element("td", { class: kind }, text);
    return element("tr", {}, element("th", { scope: "row" }, name), cell(part.std === undefined ? "–" : number(part.std), "number"), cell(number(Math.max(Math.abs(part.min ?? 0), Math.abs(part.max ?? 0))), "number"), element("td", {}, svg), cell(mark, mark ? "bad" : null));
  });
  const head = element("tr", {}, element("th", { scope: "col" }, "layer"), element("th", { scope: "col", class: "number" }, "std"), element("th", { scope: "col", class: "number" }, "max |x|"), element("th", { scope: "col" }, `−2^${top + 1} to 2^${top + 1}`), element("th", { scope: "col" }, "unusual"));
  place.append(element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Values layer by layer" }, element("table", { class: "list compact" }, element("thead", {}, head), element("tbody", {}, ...rows))));
  if (measured.length > rows.length) place.append(element("p", { class: "quiet" }, `the first ${rows.length} of ${measured.length}`));
  return place;
};

// The details of a row: one of its tensors at a time.
const showMember = (place, row, names, member) => {
  const [, , shape, , , before, after, moves, statistics] = row;
  const sides = element("div", { class: "sides" });
  const map = mapOf(before, member), target = mapOf(after, member);
  if (map) {
    const cut = [...map[2], ...(target ? target[2] : [])];
    const first = drawShards(shape, map, target ? "Source" : "Shard map", cut);
    sides.append(first.place);
    if (target) {
      const second = drawShards(shape, target, "Target", cut);
      sides.append(second.place);
      linkMoves(first, second, moves[moves.length === 1 ? 0 : member] || [], place);
    }
  }
  const values = statistics[member];
  if (values) sides.append(drawStatistics(values));
  if (!map && !values) sides.append(element("p", { class: "quiet" }, data.table.command ? `No shard map in this report. To see it: ${data.table.command}` : "No further details in this report."));
  place.querySelector(".sides")?.remove();
  place.insertBefore(sides, place.querySelector(".lines"));
};
const linkMoves = (first, second, moves) => {
  const links = [];
  for (let at = 0; at < moves.length; at += 3) links.push(moves.slice(at, at + 3));
  const mark = (side, other, from, to) => side.parts.forEach((part) => {
    const number = Number(part.dataset.box);
    const own = links.filter((link) => link[from] === number);
    if (!own.length) return;
    const total = own.reduce((sum, link) => sum + link[2], 0);
    const text = `${part.dataset.tip}\n${from ? "from" : "to"} ${count(own.length, "box", "boxes")}, ${bytes(total)}`;
    part.dataset.tip = text;
    part.setAttribute("aria-label", text);
    const ends = new Set(own.map((link) => link[to]));
    const toggle = (on) => other.parts.forEach((end) => end.classList.toggle("linked", on && ends.has(Number(end.dataset.box))));
    for (const name of ["pointerenter", "focus"]) part.addEventListener(name, () => toggle(true));
    for (const name of ["pointerleave", "blur"]) part.addEventListener(name, () => toggle(false));
  });
  mark(first, second, 0, 1);
  mark(second, first, 1, 0);
};

// The table of tensors: rows are made when they are shown.
const body = document.querySelector("#tensor-table tbody");
if (body) {
  const rows = data.table.rows.map((row, at) => ({ row, at, label: label(row[0]), names: null, chosen: null }));
  const filter = document.getElementById("filter"), order = document.getElementById("order"), more = document.getElementById("more"), output = document.getElementById("count");
  const namesOf = (entry) => entry.names || (entry.names = members(entry.row[0]));
  let shown = rows, limit = PAGE;

  const openRow = (entry, line, button) => {
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!isOpen));
    if (isOpen) return void line.nextSibling.remove();
    const names = namesOf(entry);
    const choice = entry.chosen || names.map((_, at) => at);
    const place = element("td", { colspan: 4 });
    if (choice.length > 1) {
      const select = element("select", { "aria-label": "Tensor" }, ...choice.slice(0, 500).map((at) => element("option", { value: at }, names[at])));
      select.addEventListener("change", () => showMember(place, entry.row, names, Number(select.value)));
      place.append(element("div", { class: "chooser" }, select, element("span", { class: "quiet" }, choice.length > 500 ? `the first 500 of ${choice.length.toLocaleString("en")}: filter for the others` : `${count(choice.length, "tensor")} of this shape`)));
    } else if (names.length > 1) {
      place.append(element("h3", {}, names[choice[0]]));
    }
    showMember(place, entry.row, names, choice[0]);
    // The layers of the row, whether each is a tensor or all are stacked in one.
    const [, , , , , , , , measured, stacked] = entry.row;
    if (stacked.length > 1) place.append(drawLines(stacked, stacked.map((_, at) => `layer ${at}`)));
    else if (measured.length > 1) place.append(drawLines(choice.map((at) => measured[at]), choice.map((at) => names[at])));
    line.after(element("tr", { class: "detail" }, place));
  };
  const lineOf = (entry) => {
    const [, dtype, shape, size] = entry.row;
    const n = namesOf(entry).length;
    const button = element("button", { type: "button", class: "row-button", "aria-expanded": "false" }, element("code", {}, entry.label));
    if (n > 1) button.append(element("span", { class: "times" }, `× ${n.toLocaleString("en")}`));
    const line = element("tr", {}, element("td", {}, button), element("td", {}, dtype), element("td", { class: "mono" }, `[${shape.join(", ")}]`), element("td", { class: "number" }, bytes(size * n)));
    button.addEventListener("click", () => openRow(entry, line, button));
    return line;
  };
  const draw = () => {
    body.replaceChildren(...shown.slice(0, limit).map(lineOf));
    more.hidden = shown.length <= limit;
    more.textContent = `Show ${Math.min(PAGE, shown.length - limit)} more of ${(shown.length - limit).toLocaleString("en")}`;
    const n = shown.reduce((sum, entry) => sum + (entry.chosen || namesOf(entry)).length, 0);
    output.textContent = filter.value.trim() ? `${count(n, "tensor")} of ${data.table.tensors.toLocaleString("en")} match` : count(data.table.tensors, "tensor");
  };
  const select = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    shown = rows.filter((entry) => {
      const rest = ` ${entry.row[1]} ${entry.row[4]}`;
      const matches = (name) => { const text = (name + rest).toLowerCase(); return words.every((word) => text.includes(word)); };
      entry.chosen = words.length && !matches(entry.label) ? namesOf(entry).flatMap((name, at) => matches(name) ? [at] : []) : null;
      return !entry.chosen || entry.chosen.length;
    });
    if (order.value === "name") shown = [...shown].sort((a, b) => a.label < b.label ? -1 : a.label > b.label ? 1 : 0);
    limit = PAGE;
    draw();
  };
  let timer = 0;
  filter.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(select, 80); });
  order.addEventListener("change", select);
  more.addEventListener("click", () => {
    const first = limit;
    limit += PAGE;
    body.append(...shown.slice(first, limit).map(lineOf));
    more.hidden = shown.length <= limit;
    more.textContent = `Show ${Math.min(PAGE, shown.length - limit)} more of ${(shown.length - limit).toLocaleString("en")}`;
    body.children[first]?.querySelector("button")?.focus();
  });
  draw();
}

// Lists that are in the page already, such as findings: filtered by text, severity and rank.
for (const list of document.querySelectorAll("[data-filtered]")) {
  const input = document.getElementById(list.dataset.filtered), output = document.getElementById(`${input.id}-count`);
  const severity = document.getElementById(`${input.id}-severity`);
  const items = [...list.children].map((item) => ({ item, text: `${item.textContent} ${item.dataset.ranks || ""}`.toLowerCase() }));
  const apply = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let n = 0;
    for (const { item, text } of items) {
      item.hidden = !(words.every((word) => text.includes(word) || word.startsWith("rank:") && text.includes("rank:*;")) && (!severity || !severity.value || item.classList.contains(severity.value)));
      n += !item.hidden;
    }
    output.textContent = `${n.toLocaleString("en")} of ${items.length.toLocaleString("en")} shown`;
  };
  input.addEventListener("input", apply);
  severity?.addEventListener("change", apply);
  for (const button of document.querySelectorAll("[data-filter-rank]")) button.addEventListener("click", () => {
    if (!list.closest("article")?.contains(button)) return;
    input.value = `rank:${button.dataset.filterRank};`;
    apply();
    input.focus();
    input.scrollIntoView({ block: "center" });
  });
  apply();
}
})();
