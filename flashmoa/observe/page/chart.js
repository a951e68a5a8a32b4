// The timeline. Only what lies within the view is drawn, so that thousands of calls cost no more
// than what fits on the screen.

const SIDE = 18;
const MOST_FLOWS = 400;
const THIN = 3;
const BADGE = {
  "failed": "✕", "upstream failed": "↯", "mispredicted": "≠", "late": "L",
  "declined": "–", "waits": "…", "ended": "∎", "unlinked": "○", "no gain": "0",
  "link failed": "✕",
};

class Chart {
  constructor(run, nodes) {
    this.run = run;
    this.nodes = nodes;
    this.places = layout(run);
    this.length = Math.max(run.seconds, 1e-3);
    this.view = { from: 0, to: this.length };
    this.active = null;
    this.nodes.names.style.height = `${this.places.height}px`;
    this.nodes.lanes.setAttribute("height", this.places.height);
    this.#name();
  }

  x(time) {
    const { from, to } = this.view;
    return SIDE + ((time - from) / (to - from)) * (this.width - 2 * SIDE);
  }

  time(x) {
    const { from, to } = this.view;
    return from + ((x - SIDE) / (this.width - 2 * SIDE)) * (to - from);
  }

  // From the first prefill for a call to its end.
  extent(call) {
    return [call.spans.length ? Math.min(call.spans[0][0], call.start) : call.start, call.end];
  }

  // The call in a lane that is drawn nearest to `x`.
  nearest(lane, x) {
    let found = null;
    this.run.calls.forEach((call, index) => {
      const gap = call.lane === lane ? Math.abs(this.x(call.start) - x) : Infinity;
      if (gap < (found?.gap ?? 20)) found = { index, gap };
    });
    return found?.index;
  }

  draw() {
    this.width = this.nodes.lanes.clientWidth;
    const { from, to } = this.view;
    const marks = ticks(from, to, (80 / this.width) * (to - from));
    const shown = this.#shown();
    this.nodes.axis.replaceChildren(...marks.map((tick) => this.#tick(tick)));
    this.nodes.lanes.replaceChildren(
      hatch(),
      ...this.#bands(),
      ...marks.map((tick) => line("grid", this.x(tick.at), 0, this.places.height)),
      ...this.#flows(shown),
      ...this.#calls(shown),
      ...this.#badges(),
    );
  }

  #name() {
    const { headings, lanes } = this.places;
    const engines = headings.map(({ top, text }) => {
      return placed(element("h3", text, { title: text }), top);
    });
    const agents = lanes.map((lane) => {
      const node = placed(element("div", undefined, { title: lane.agent }), lane.first);
      node.append(element("b", lane.agent), element("small", lane.model));
      return node;
    });
    this.nodes.names.replaceChildren(...engines, ...agents);
  }

  // Calls whose bars lie within the view, in lanes that are scrolled to.
  #shown() {
    const box = this.nodes.chart;
    const [above, below] = [box.scrollTop - 200, box.scrollTop + box.clientHeight + 200];
    const found = [];
    this.run.calls.forEach((call, index) => {
      const top = this.places.lanes[call.lane].first + call.row * ROW.height;
      const [start, end] = this.extent(call);
      if (top > below || top + ROW.height < above) return;
      if (end >= this.view.from && start <= this.view.to) found.push(index);
    });
    return found;
  }

  #tick({ at, label }) {
    return shape("text", { x: this.x(at), y: 17, class: "tick" }, label);
  }

  #bands() {
    return [
      ...this.places.headings.map(({ top }) => {
        const size = { width: this.width, height: HEADING };
        return shape("rect", { class: "heading", x: 0, y: top, ...size });
      }),
      ...this.places.lanes.map(({ top, height }) => {
        return shape("path", { class: "lane", d: `M0 ${top + height + 0.5}H${this.width}` });
      }),
    ];
  }

  #calls(shown) {
    const thin = new Map();
    const last = new Map();
    const bars = [];
    for (const index of shown) {
      const call = this.run.calls[index];
      const row = rowOf(this.places, call);
      const width = this.x(call.end) - this.x(call.start);
      if (width < THIN && index !== this.active) this.#thin(thin, call, row);
      else bars.push(this.#call(call, index, row, last));
    }
    const lines = [...thin.values()].map(({ kind, lane, marks }) => {
      return shape("path", { class: `thin ${kind}`, d: marks.join(""), "data-lane": lane });
    });
    return [...lines, ...bars];
  }

  // Calls of a few pixels are lines of one path per lane, which is fast for thousands of them.
  #thin(thin, call, row) {
    const marks = call.spans.map(([start]) => ["ahead", start, row.ahead, ROW.aheadHeight]);
    const kind = call.failed === null ? "decode" : "failed";
    marks.push([kind, call.start, row.call, ROW.callHeight]);
    for (const [name, at, y, height] of marks) {
      const key = `${call.lane} ${call.row} ${name}`;
      const path = thin.get(key) ?? { kind: name, lane: call.lane, marks: [], last: -9 };
      thin.set(key, path);
      const x = Math.round(this.x(at) * 2) / 2;
      if (x === path.last) continue;
      path.last = x;
      path.marks.push(`M${x} ${y}v${height}`);
    }
  }

  #call(call, index, row, last) {
    const key = `${call.lane} ${call.row}`;
    const group = shape("g", this.#label(call, index));
    call.spans.forEach(([start, end], span) => {
      const more = { "data-span": span };
      this.#bar(group, last, key, [start, end, row.ahead, ROW.aheadHeight, "ahead", more]);
    });
    const kind = call.failed === null ? "decode" : "decode failed";
    const waiting = call.token === null && call.failed !== null ? "failed" : "waiting";
    const token = call.token ?? call.end;
    const bar = [row.call, ROW.callHeight];
    this.#bar(group, last, key, [call.start, token, ...bar, waiting]);
    if (call.token !== null) this.#bar(group, last, key, [token, call.end, ...bar, kind]);
    this.#inside(group, call, row);
    if (index === this.active) group.append(this.#ring(call, row));
    return group;
  }

  #label(call, index) {
    const { agent } = this.run.lanes[call.lane];
    return {
      id: `call-${index}`,
      class: "call",
      role: "img",
      "data-call": index,
      "aria-label": `${agent}, call at ${seconds(call.start)}, ${state(call)}`,
    };
  }

  // A bar in the same pixel as the previous one of its kind is left out.
  #bar(group, last, row, [start, end, y, height, kind, more = {}]) {
    const key = `${row} ${kind}`;
    const left = Math.max(this.x(start), -5);
    const right = Math.min(this.x(end), this.width + 5);
    if (right < left || right - (last.get(key) ?? -9) < 0.7) return;
    last.set(key, right);
    const width = Math.max(right - left, 1.5);
    const rx = Math.min(2, width / 3);
    group.append(shape("rect", { class: kind, x: left, y, width, height, rx, ...more }));
  }

  #inside(group, call, row) {
    const left = Math.max(this.x(call.token ?? call.start), 0);
    const room = Math.min(this.x(call.end), this.width) - left - 12;
    const text = inside(call).find((one) => one.length * 6.4 < room);
    if (text) group.append(shape("text", { class: "inside", x: left + 6, y: row.call + 15 }, text));
  }

  #ring(call, row) {
    const left = Math.max(this.x(call.start), -5);
    const right = Math.min(this.x(call.end), this.width + 5);
    const size = { width: Math.max(right - left, 2) + 4, height: ROW.callHeight + 4 };
    return shape("rect", { class: "ring", x: left - 2, y: row.call - 2, rx: 3, ...size });
  }

  // Text flows from a decode bar down, or up, to the prefills of the call it is for.
  #flows(shown) {
    const paths = [];
    for (const index of shown) {
      const call = this.run.calls[index];
      for (const [from, start, end] of call.from) {
        const kind = index === this.active || from === this.active ? "flow lit" : "flow";
        call.spans.forEach(([at], span) => {
          // What a prefill computes has arrived since the previous one began.
          const before = span ? call.spans[span - 1][0] : at;
          if (at < start || end < before || at < this.view.from || at > this.view.to) return;
          paths.push(shape("path", { class: kind, d: this.#flow(this.run.calls[from], call, at) }));
        });
      }
    }
    if (paths.length <= MOST_FLOWS) return paths;
    return paths.filter((path) => path.classList.contains("lit"));
  }

  #flow(writer, reader, at) {
    const from = rowOf(this.places, writer).call;
    const to = rowOf(this.places, reader).ahead;
    const [x1, x2] = [this.x(Math.min(at, writer.end)), this.x(at)];
    const [y1, y2] = from < to ? [from + ROW.callHeight, to] : [from, to + ROW.aheadHeight];
    const bend = (y1 + y2) / 2;
    return `M${x1} ${y1}C${x1} ${bend} ${x2} ${bend} ${x2} ${y2}`;
  }

  #badges() {
    const groups = [];
    const last = new Map();
    this.run.notes.forEach((note, index) => {
      const x = this.x(note.at);
      if (x < 0 || x > this.width) return;
      const before = last.get(note.lane);
      if (before && x - before.x < 15) return before.indices.push(index);
      const group = { x, note, indices: [index] };
      last.set(note.lane, group);
      groups.push(group);
    });
    return groups.map(({ x, note, indices }) => {
      const place = { cx: x, cy: this.places.lanes[note.lane].top + 10, r: 7.5 };
      const kind = note.kind.replaceAll(" ", "-");
      const node = shape("g", { class: `badge ${kind}`, "data-notes": indices.join(" ") });
      const sign = indices.length > 1 ? indices.length : BADGE[note.kind];
      node.append(shape("circle", place), shape("text", { x, y: place.cy + 3.5 }, sign));
      return node;
    });
  }
}

// The longest text that fits into a call's bar.
function inside(call) {
  if (call.failed !== null) return ["✕ failed", "✕"];
  if (call.token === null) return [];
  const tokens = call.cells[PLACES.written];
  const time = seconds(call.end - call.token);
  return tokens ? [`${tokens} tokens, ${time}`, time] : [time];
}

function line(kind, x, from, to) {
  return shape("path", { class: kind, d: `M${Math.round(x) + 0.5} ${from}V${to}` });
}

function placed(node, top) {
  node.style.top = `${top}px`;
  return node;
}

function hatch() {
  const pattern = shape("pattern", {
    id: "hatch",
    width: 6,
    height: 6,
    patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)",
  });
  pattern.append(
    shape("rect", { class: "hatch", width: 6, height: 6 }),
    shape("rect", { class: "stripe", width: 2, height: 6 }),
  );
  const definitions = shape("defs", {});
  definitions.append(pattern);
  return definitions;
}
