"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A number in a few digits: 1234567 -> 1.235M. Numbers of one axis have the suffix of its largest.
function short(value, largest = value) {
  const size = Math.abs(largest);
  if (value === 0) return "0";
  if (size >= 1e9) return trim(value / 1e9) + "G";
  if (size >= 1e6) return trim(value / 1e6) + "M";
  if (size >= 1e4) return trim(value / 1e3) + "k";
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return trim(value);
}

// A time of the timeline with its unit; `largest` decides between s, ms and µs.
function time(value, largest = value) {
  if (data.unit !== "s") return short(value, largest);
  const [factor, unit] = largest >= 1 ? [1, "s"] : largest >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return `${trim(value * factor)} ${unit}`;
}

function trim(value) {
  return String(Number(value.toPrecision(4)));
}

// About `count` round numbers from low to high, at least `least` apart.
function ticks(low, high, count, least = 0) {
  const span = Math.max(high - low, least * count) || 1;
  const power = 10 ** Math.floor(Math.log10(span / count));
  const step = [1, 2, 5, 10].map((k) => k * power).find((k) => span / k <= count);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + span * 1e-9; k++) {
    found.push(k * step);
  }
  return found;
}

// ---- texts; as text, what a plan or a run calls something is never markup

function element(name, text, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  if (text !== null) made.textContent = text;
  return made;
}

for (const [name, value] of data.facts) {
  const fact = element("div", null, element("dt", name), element("dd", value));
  document.getElementById("facts").append(fact);
}
for (const note of data.notes) document.getElementById("notes").append(element("li", note));
const unitName = data.unit === "s" ? "seconds" : data.unit;
document.getElementById("unit").textContent = `Timeline, in ${unitName}`;

// ---- timeline

const KINDS = ["forward", "backward", "weight gradients", "images encoded", "images' backward"];
const LANE = 13, LABEL = 18, GAP = 8, AXIS = 22;

class Timeline {
  constructor(steps) {
    this.steps = steps;
    this.canvas = document.getElementById("canvas");
    this.tip = document.getElementById("tip");
    this.select = document.getElementById("step");
    for (const [i, step] of steps.entries()) this.select.add(new Option(step.label, i));
    this.select.addEventListener("change", () => this.show(Number(this.select.value)));
    const buttons = { in: 2, out: 0.5, all: 0 };
    for (const [id, factor] of Object.entries(buttons)) {
      document.getElementById(id).addEventListener("click", () => this.zoom(factor, 0.5));
    }
    this.listen();
    document.getElementById("timeline").hidden = false;
    this.show(0);
  }

  listen() {
    const at = (event) => event.offsetX / this.canvas.clientWidth;
    this.canvas.addEventListener("dblclick", (event) => this.zoom(2, at(event)));
    this.canvas.addEventListener("pointerdown", (event) => {
      this.from = event.clientX;
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointerup", () => { this.from = null; });
    this.canvas.addEventListener("pointercancel", () => { this.from = null; });
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("pointermove", (event) => {
      if (this.from == null) return this.hover(event);
      this.move((this.from - event.clientX) / this.canvas.clientWidth);
      this.from = event.clientX;
    });
    // A wheel alone scrolls the page.
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? 1.25 : 0.8, at(event));
    }, { passive: false });
    this.canvas.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -0.1, ArrowRight: 0.1 }[event.key];
      const factor = { "+": 2, "=": 2, "-": 0.5, "0": 0 }[event.key];
      if (move === undefined && factor === undefined) return;
      event.preventDefault();
      if (move !== undefined) this.move(move);
      else this.zoom(factor, 0.5);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    addEventListener("resize", () => this.draw());
  }

  show(index) {
    this.step = this.steps[index];
    const rows = this.step.tracks.flatMap((track) => track.rows);
    const has = {
      shared: rows.some((row) => row[3].dp_ranks),
      pieces: rows.some((row) => row[3].piece),
      packings: this.step.tracks.some(({ source }) => source === "next-fit"),
      padded: rows.some((row) => !row[0]),
      weights: this.step.tracks.some(({ events }) => events.some((event) => event[3] === 2)),
      images: this.step.tracks.some(({ events }) => events.some((event) => event[3] > 2)),
    };
    for (const id in has) document.getElementById(id).hidden = !has[id];
    this.lit = null;
    this.tip.hidden = true;
    this.zoom(0, 0);
  }

  // Factor 0 shows everything; `at` is the fixed point, as a share of the width.
  zoom(factor, at) {
    const end = this.step.end;
    const span = factor ? Math.max(end * 1e-5, Math.min(end, (this.high - this.low) / factor)) : end;
    this.low = factor ? this.low + (this.high - this.low - span) * at : 0;
    this.high = this.low + span;
    this.move(0);
  }

  move(share) {
    const span = this.high - this.low;
    this.low = Math.max(0, Math.min(this.step.end - span, this.low + share * span));
    this.high = this.low + span;
    this.draw();
  }

  draw() {
    const tops = [];
    let height = AXIS;
    for (const track of this.step.tracks) {
      tops.push(height);
      height += LABEL + track.stages * LANE + GAP;
    }
    const width = this.canvas.clientWidth, scale = devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const paint = this.canvas.getContext("2d");
    paint.scale(scale, scale);
    paint.font = "12px system-ui, sans-serif";
    paint.textBaseline = "middle";
    this.boxes = [];
    this.step.tracks.forEach((track, i) => this.drawTrack(paint, track, tops[i], width));
    this.drawShared(paint);
    this.drawPieces(paint);
    this.drawAxis(paint, width);
  }

  drawTrack(paint, track, top, width) {
    const names = ["forward", "backward", "weights", "images", "images"];
    const colours = names.map((name) => css(`--${name}`));
    const padding = css("--padding"), ground = css("--ground"), x = this.scale(width);
    paint.fillStyle = css("--faint");
    paint.fillText(track.label, 0, top + LABEL / 2);
    const first = top + LABEL;
    paint.fillStyle = css("--idle");
    paint.fillRect(0, first, width, track.stages * LANE);
    for (const event of track.events) {
      const [stage, chunk, microbatch, kind, start, end] = event;
      const left = Math.max(0, x(start)), right = Math.min(width, x(end));
      if (right <= 0 || left >= width) continue;
      const y = first + stage * LANE, wide = right - left;
      // A line between neighbours, if they are wide enough.
      const box = [left, y + 0.5, Math.max(0.5, wide - (wide > 3 ? 1 : 0)), LANE - 1];
      paint.fillStyle = ground;
      paint.fillRect(...box);
      const strength = 1 - (0.5 * chunk) / Math.max(1, track.chunks - 1);
      paint.globalAlpha = strength;
      paint.fillStyle = rowOf(event, track)[0] ? colours[kind] : padding;
      paint.fillRect(...box);
      paint.globalAlpha = 1;
      if (wide > 20 && microbatch >= 0) {
        const ink = strength < 0.75 ? css("--ink") : "#14171b";
        this.drawNumber(paint, microbatch, (left + right) / 2, y + LANE / 2, ink);
      }
      this.boxes.push({ box, event, track });
    }
  }

  // Frames of micro-batches that several ranks share, joined where the first stage begins them; one
  // that the pointer is on is joined everywhere.
  drawShared(paint) {
    const joins = new Map();
    paint.strokeStyle = css("--shared");
    for (const { box, event, track } of this.boxes) {
      const [stage, chunk, microbatch, kind] = event, ranks = rowOf(event, track)[3].dp_ranks;
      if (!ranks) continue;
      const [x, y, w, h] = box, hit = this.lit === sharedKey(event, track);
      if (!frame(paint, box, hit) || (!hit && (stage || chunk))) continue;
      const key = `${sharedKey(event, track)} ${stage} ${chunk} ${kind}`;
      if (!joins.has(key)) joins.set(key, []);
      joins.get(key).push([x + 0.5, y], [x + 0.5, y + h]);
    }
    paint.lineWidth = 1.5;
    for (const corners of joins.values()) {
      paint.beginPath();
      for (const corner of corners) paint.lineTo(...corner);
      paint.stroke();
    }
  }

  // Frames of the micro-batches that hold a piece of a sample; the pointer on one thickens those of
  // the whole sample.
  drawPieces(paint) {
    paint.strokeStyle = css("--ink");
    for (const { box, event, track } of this.boxes) {
      if (!rowOf(event, track)[3].piece) continue;
      frame(paint, box, this.lit === pieceKey(event, track));
    }
  }

  drawNumber(paint, microbatch, x, y, ink) {
    paint.save();
    paint.fillStyle = ink;
    paint.font = "10px system-ui, sans-serif";
    paint.textAlign = "center";
    paint.fillText(microbatch, x, y + 0.5);
    paint.restore();
  }

  drawAxis(paint, width) {
    const x = this.scale(width);
    paint.fillStyle = css("--faint");
    const values = ticks(this.low, this.high, Math.max(2, width / 90));
    for (const value of values) {
      const at = x(value);
      paint.textAlign = at < 24 ? "start" : at > width - 24 ? "end" : "center";
      paint.fillRect(Math.min(at, width - 1), AXIS - 5, 1, 4);
      paint.fillText(time(value, values[values.length - 1]), at, 8);
    }
    paint.textAlign = "start";
  }

  scale(width) {
    return (time) => ((time - this.low) / (this.high - this.low)) * width;
  }

  hover(pointer) {
    const px = pointer.offsetX, py = pointer.offsetY;
    const hit = this.boxes.find(
      ({ box: [x, y, w, h] }) => px >= x && px <= x + w && py >= y && py <= y + h,
    );
    const lit = hit ? litKey(hit.event, hit.track) : null;
    if (lit !== this.lit) {
      this.lit = lit;
      this.draw();
    }
    this.tip.hidden = !hit;
    if (!hit) return;
    const [stage, chunk, microbatch, kind, start, end] = hit.event;
    const [samples, tokens, rowTokens, facts] = rowOf(hit.event, hit.track);
    const ofRow = microbatch >= 0;
    this.tip.textContent =
      `${KINDS[kind]}${ofRow ? ` of micro-batch ${microbatch}` : ""}\n` +
      `${hit.track.label}, stage ${stage}${ofRow ? `, chunk ${chunk}` : ""}\n` +
      (ofRow ? `${samples} samples, ${tokens} tokens, row of ${rowTokens}\n` : "") +
      Object.values(facts).map((fact) => `${fact}\n`).join("") +
      `${time(start, end)} to ${time(end)}: ${time(end - start, end)}` +
      (data.unit === "s" ? "" : ` ${data.unit}`);
    const room = this.canvas.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(room, px + 12))}px`;
    this.tip.style.top = `${py + 14}px`;
  }
}

// Frame a box. A narrow one gets only its lower edge: outlines would hide its colour. Returns whether
// it has a frame.
function frame(paint, [x, y, w, h], hit) {
  paint.lineWidth = hit ? 2.5 : 1;
  const whole = hit || w >= 6;
  if (whole) paint.strokeRect(x + 0.5, y + 0.5, Math.max(0.5, w - 1), h - 1);
  else {
    paint.beginPath();
    paint.moveTo(x, y + h - 0.5);
    paint.lineTo(x + w, y + h - 0.5);
    paint.stroke();
  }
  return whole;
}

// The row of an event; images ahead of all micro-batches have none.
function rowOf(event, track) {
  return track.rows[event[2]] ?? [1, 0, 0, {}];
}

// The micro-batch of an event among those that several ranks share, of one source.
function sharedKey(event, track) {
  return `${track.source} ${event[2]} ${rowOf(event, track)[3].dp_ranks}`;
}

// The sample of an event's piece, of one source: the text of a piece begins with it.
function pieceKey(event, track) {
  return `${track.source} ${rowOf(event, track)[3].piece.split(",")[0]}`;
}

// What lights up with an event that the pointer is on; null: nothing.
function litKey(event, track) {
  const facts = rowOf(event, track)[3];
  if (facts.dp_ranks) return sharedKey(event, track);
  return facts.piece ? pieceKey(event, track) : null;
}

// ---- charts

const WIDTH = 380, HEIGHT = 190, LEFT = 46, RIGHT = 10, TOP = 10, BOTTOM = 30;

function node(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const most = (values) => Math.max(...values.map(Math.abs));

// Add a figure with axes; returns its svg and the scales of both axes.
function chart(section, title, xRange, yRange, xLabel, yLeast = 0) {
  const svg = node("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  const figure = element("figure", null, element("h3", title), svg);
  document.getElementById(section).append(figure);
  const between = ([low, high], from, to) => (value) =>
    from + ((value - low) / (high - low || 1)) * (to - from);
  const x = between(xRange, LEFT, WIDTH - RIGHT), y = between(yRange, HEIGHT - BOTTOM, TOP);
  const yTicks = ticks(...yRange, 5, yLeast), xTicks = ticks(...xRange, 5, 1);
  for (const value of yTicks) {
    svg.append(node("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    svg.append(node("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, short(value, most(yTicks))));
  }
  // Steps, tokens, samples and percents are whole.
  for (const value of xTicks) {
    const at = { x: x(value), y: HEIGHT - BOTTOM + 14, "text-anchor": "middle" };
    svg.append(node("text", at, short(value, most(xTicks))));
  }
  svg.append(node("text", { x: WIDTH - RIGHT, y: HEIGHT - 3, "text-anchor": "end" }, xLabel));
  return { svg, x, y };
}

function histogram({ title, unit, what, low, high, counts }) {
  const named = `${title} (${what})`, top = Math.max(1, ...counts);
  const { svg, x, y } = chart("histograms", named, [low, high], [0, top], unit, 1);
  const edge = (i) => low + (i * (high - low)) / counts.length;
  counts.forEach((count, i) => {
    if (!count) return;
    const left = x(edge(i)), right = x(edge(i + 1));
    const box = { x: left + 0.5, width: right - left - 1, y: y(count), height: y(0) - y(count) };
    const bar = node("rect", { class: "bar", ...box });
    bar.append(
      node("title", {}, `${short(edge(i))} to ${short(edge(i + 1))} ${unit}: ${count} ${what}`),
    );
    svg.append(bar);
  });
}

function curve({ title, unit, x: steps, series }) {
  const known = series.flatMap(({ y }) => y.filter((value) => value !== null));
  if (!known.length) return;
  let low = Math.min(...known), high = Math.max(...known);
  // A constant is a line in the middle.
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  if (low > 0 && low < high / 2) low = 0;
  const range = [steps[0], steps[steps.length - 1]];
  const shown = unit ? `${title} (${unit})` : title;
  const { svg, x, y } = chart("curves", shown, range, [low, high], "step");
  series.forEach(({ name, y: values }, s) => {
    let path = "", pen = "M";
    values.forEach((value, i) => {
      if (value === null) return void (pen = "M");
      path += `${pen}${x(steps[i]).toFixed(2)},${y(value).toFixed(2)}`;
      pen = "L";
      if (steps.length <= 60) {
        const dot = node("circle", { class: `key${s}`, cx: x(steps[i]), cy: y(value), r: 2.4 });
        dot.append(node("title", {}, `${name}, step ${steps[i]}: ${short(value)} ${unit}`));
        svg.append(dot);
      }
    });
    svg.append(node("path", { class: `line${s}`, d: path }));
    if (series.length > 1) {
      const at = LEFT + 90 * s;
      svg.append(node("rect", { class: `key${s}`, x: at, y: HEIGHT - 11, width: 9, height: 9 }));
      svg.append(node("text", { x: at + 13, y: HEIGHT - 3 }, name));
    }
  });
}

if (data.steps.length) new Timeline(data.steps);
data.curves.forEach(curve);
data.histograms.forEach(histogram);
