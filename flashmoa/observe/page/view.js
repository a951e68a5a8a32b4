// Zooming, panning, pointing, and moving from call to call with the keyboard.

const CLOSEST = 1e-3;

class View {
  constructor(chart, card) {
    this.chart = chart;
    this.card = card;
    this.lanes = chart.nodes.lanes;
    this.order = order(chart.run);
    this.pending = false;
    this.#listen();
    this.redraw();
  }

  redraw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.chart.draw();
      if (this.chart.active !== null && document.activeElement === this.lanes) this.#tell();
    });
  }

  set(from, to) {
    const whole = this.chart.length;
    const length = Math.min(Math.max(to - from, CLOSEST), whole);
    const start = Math.min(Math.max(from, 0), whole - length);
    this.chart.view = { from: start, to: start + length };
    this.redraw();
  }

  zoom(factor, around) {
    const { from, to } = this.chart.view;
    const fixed = around ?? (from + to) / 2;
    this.set(fixed - (fixed - from) * factor, fixed + (to - fixed) * factor);
  }

  move(seconds) {
    this.set(this.chart.view.from + seconds, this.chart.view.to + seconds);
  }

  all() {
    this.set(0, this.chart.length);
  }

  fit(index) {
    const [start, end] = this.chart.extent(this.chart.run.calls[index]);
    const margin = Math.max((end - start) * 0.15, CLOSEST);
    this.select(index);
    this.set(start - margin, end + margin);
  }

  // Makes a call the active one and brings it into view.
  select(index) {
    const { chart } = this;
    const call = chart.run.calls[index];
    const { from, to } = chart.view;
    chart.active = index;
    const before = call.start - (to - from) / 3;
    if (call.start < from || call.start > to) this.set(before, before + to - from);
    const { top } = rowOf(chart.places, call);
    const box = chart.nodes.chart;
    const room = box.clientHeight - chart.nodes.axis.clientHeight - ROW.height;
    if (top < box.scrollTop) box.scrollTop = top - HEADING;
    else if (top > box.scrollTop + room) box.scrollTop = top - room + 8;
    this.lanes.setAttribute("aria-activedescendant", `call-${index}`);
    this.redraw();
  }

  #tell() {
    const node = document.getElementById(`call-${this.chart.active}`);
    if (node) this.card.call(this.chart.active, undefined, node.getBoundingClientRect());
  }

  #listen() {
    const { lanes, card } = this;
    const box = this.chart.nodes.chart;
    lanes.addEventListener("pointermove", (event) => this.#point(event));
    lanes.addEventListener("pointerleave", () => card.hide());
    lanes.addEventListener("pointerdown", (event) => this.#drag(event));
    lanes.addEventListener("dblclick", (event) => {
      const call = this.#under(event);
      if (call !== undefined) this.fit(call);
    });
    lanes.addEventListener("keydown", (event) => this.#key(event));
    lanes.addEventListener("focus", () => this.#focus());
    lanes.addEventListener("blur", () => card.hide());
    box.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    box.addEventListener("scroll", () => {
      card.hide();
      this.redraw();
    });
    new ResizeObserver(() => this.redraw()).observe(box);
    for (const button of document.querySelectorAll("[data-zoom]")) {
      const act = { in: () => this.zoom(0.5), out: () => this.zoom(2), all: () => this.all() };
      button.addEventListener("click", act[button.dataset.zoom]);
    }
  }

  #focus() {
    if (this.order.length === 0 || !this.lanes.matches(":focus-visible")) return;
    this.select(this.chart.active ?? this.order[0]);
  }

  #point(event) {
    if (this.dragging) return;
    const notes = event.target.closest("[data-notes]");
    const call = this.#under(event);
    const at = event.target.getBoundingClientRect();
    const near = { top: at.top, bottom: at.bottom, left: Math.max(at.left, event.clientX - 40) };
    const { span } = event.target.dataset;
    if (notes) this.card.notes(notes.dataset.notes.split(" ").map(Number), near);
    else if (call !== undefined) this.card.call(call, span && Number(span), near);
    else this.card.hide();
  }

  // The call that an event is on.
  #under(event) {
    const { target } = event;
    const group = target.closest("[data-call]");
    if (group) return Number(group.dataset.call);
    if (target.dataset.lane === undefined) return undefined;
    const { left } = this.lanes.getBoundingClientRect();
    return this.chart.nearest(Number(target.dataset.lane), event.clientX - left);
  }

  #drag(down) {
    if (down.button !== 0) return;
    const call = this.#under(down);
    const { from, to } = this.chart.view;
    const perPixel = (to - from) / (this.chart.width - 2 * SIDE);
    const move = (event) => {
      const by = down.clientX - event.clientX;
      if (!this.dragging && Math.abs(by) < 4) return;
      if (!this.dragging) this.lanes.setPointerCapture(down.pointerId);
      this.dragging = true;
      this.card.hide();
      this.set(from + by * perPixel, to + by * perPixel);
    };
    const up = () => {
      if (!this.dragging && call !== undefined) this.select(call);
      this.dragging = false;
      this.lanes.removeEventListener("pointermove", move);
    };
    this.lanes.addEventListener("pointermove", move);
    addEventListener("pointerup", up, { once: true });
  }

  #wheel(event) {
    const left = this.lanes.getBoundingClientRect().left;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.zoom(1.0015 ** event.deltaY, this.chart.time(event.clientX - left));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      const { from, to } = this.chart.view;
      this.move(((event.deltaX || event.deltaY) / this.chart.width) * (to - from));
    }
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const acts = {
      ArrowRight: () => this.#step(1),
      ArrowLeft: () => this.#step(-1),
      ArrowDown: () => this.#cross(1),
      ArrowUp: () => this.#cross(-1),
      Enter: () => this.chart.active !== null && this.fit(this.chart.active),
      Escape: () => this.card.hide(),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      "0": () => this.all(),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }

  // To the next call in time.
  #step(by) {
    if (this.order.length === 0) return;
    const now = this.order.indexOf(this.chart.active);
    const next = now < 0 ? 0 : Math.min(Math.max(now + by, 0), this.order.length - 1);
    this.select(this.order[next]);
  }

  // To the call nearest in time in the next lane that has any.
  #cross(by) {
    const { run, active } = this.chart;
    if (active === null) return this.#step(0);
    const now = run.calls[active];
    for (let lane = now.lane + by; run.lanes[lane]; lane += by) {
      const there = this.order.filter((index) => run.calls[index].lane === lane);
      const gap = (index) => Math.abs(run.calls[index].start - now.start);
      if (there.length) return this.select(there.reduce((a, b) => (gap(b) < gap(a) ? b : a)));
    }
  }
}

function order(run) {
  return run.calls.map((_, index) => index).sort((a, b) => run.calls[a].start - run.calls[b].start);
}
