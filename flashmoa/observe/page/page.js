// Puts a run on the page.

function summarise(run) {
  const { end_to_end: whole, calls, failed, first_token: token, linked, overlap } = run.summary;
  const ahead = `${seconds(overlap.ahead)}, added up over calls`;
  const figures = [
    ["End to end", seconds(whole), "first request to last token"],
    ["Calls", count(calls), failed ? `${failed} failed` : `of ${run.lanes.length} agents`],
    ["To the first token", seconds(token), "median of all calls"],
    ["Linked", `${count(linked)} of ${count(calls)}`, ends(run.links)],
    ["Tokens prefilled ahead", count(overlap.ahead_tokens), ahead],
    ["Tokens left", count(overlap.left_tokens), `${seconds(overlap.left)} to first tokens`],
  ];
  for (const [name, value, about] of figures) {
    const box = element("div");
    box.append(element("dt", name), element("dd", value), element("dd", about));
    document.getElementById("summary").append(box);
  }
}

function ends(links) {
  const parts = Object.entries(links).map(([reason, number]) => `${count(number)} ${reason}`);
  return `links: ${parts.join(", ") || "none"}`;
}

// With `act`, the first cell of a row is a button.
function fill(table, columns, rows, act) {
  const head = element("tr");
  for (const name of columns) head.append(element("th", name, { scope: "col", ...align(name) }));
  const body = element("tbody");
  rows.forEach((cells, index) => {
    const line = element("tr");
    cells.forEach((cell, column) => line.append(element("td", cell, align(columns[column]))));
    if (act) {
      const attributes = { type: "button", title: "Show it in the timeline" };
      const button = element("button", cells[0], attributes);
      button.addEventListener("click", () => act(index));
      line.firstChild.replaceChildren(button);
    }
    body.append(line);
  });
  const top = element("thead");
  top.append(head);
  table.replaceChildren(top, body);
}

const WORDS = ["agent", "link", "what", "why"];

function align(column) {
  return WORDS.includes(column) ? {} : { class: "number" };
}

function start() {
  const node = (id) => document.getElementById(id);
  const run = JSON.parse(node("run").textContent);
  const [chart, axis, names, lanes] = ["chart", "axis", "names", "lanes"].map(node);
  const view = new View(new Chart(run, { chart, axis, names, lanes }), new Card(node("card"), run));
  const begin = new Date(run.begin * 1000).toLocaleString();
  node("when").textContent = run.calls.length ? begin : "This trace has no calls.";
  summarise(run);
  const rows = run.calls.map((call) => [seconds(call.start), ...call.cells]);
  fill(node("calls"), ["at", ...run.columns], rows, (index) => {
    lanes.focus({ preventScroll: true });
    view.fit(index);
    chart.scrollIntoView({ block: "nearest" });
  });
  const notes = run.notes.map(({ at, lane, kind, text }) => {
    return [seconds(at), run.lanes[lane].agent, `${BADGE[kind]} ${kind}`, text];
  });
  fill(node("notes").querySelector("table"), ["at", "agent", "what", "why"], notes);
  node("notes").hidden = notes.length === 0;
}

start();
