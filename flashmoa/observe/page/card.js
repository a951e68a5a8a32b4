// The card that describes the call or the notes under the pointer or the focus.

const PLACES = { prompt: 1, cached: 2, streamed: 3, late: 4, written: 5 };

class Card {
  constructor(node, run) {
    this.node = node;
    this.run = run;
  }

  // `at`: the rectangle, in the window, that the card must not cover.
  show(rows, title, at) {
    const list = element("dl");
    for (const [name, value] of rows) {
      if (value === "" || value === undefined || value === null) continue;
      list.append(element("dt", name), element("dd", value));
    }
    this.node.replaceChildren(element("strong", title), list);
    this.node.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.node;
    const below = at.bottom + 10;
    const top = below + height < innerHeight ? below : Math.max(8, at.top - height - 10);
    const most = document.documentElement.clientWidth - width - 8;
    const left = Math.max(8, Math.min(at.left, most));
    this.node.style.top = `${top}px`;
    this.node.style.left = `${left}px`;
  }

  hide() {
    this.node.hidden = true;
  }

  call(index, span, at) {
    const call = this.run.calls[index];
    this.show(callRows(this.run, call, span), this.run.lanes[call.lane].agent, at);
  }

  notes(indices, at) {
    const notes = indices.map((index) => this.run.notes[index]);
    const rows = notes.slice(0, 8).map((note) => [`${seconds(note.at)}, ${note.kind}`, note.text]);
    if (notes.length > 8) rows.push(["", `and ${notes.length - 8} more; zoom in`]);
    this.show(rows, this.run.lanes[notes[0].lane].agent, at);
  }
}

function callRows(run, call, span) {
  const told = (name) => call.cells[PLACES[name]];
  const agents = call.from.map(([index]) => run.lanes[run.calls[index].lane].agent);
  const rows = [];
  if (span !== undefined) {
    const [start, end, tokens] = call.spans[span];
    const which = `${span + 1} of ${call.spans.length}`;
    rows.push(["this prefill", `${tokens} tokens in ${seconds(end - start)}, ${which}`]);
  }
  rows.push(["call", `${seconds(call.start)} to ${seconds(call.end)}, ${state(call)}`]);
  if (call.token !== null) {
    rows.push(["first token", `after ${seconds(call.token - call.start)}`]);
    rows.push(["decode", amount(told("written"), seconds(call.end - call.token))]);
  }
  const parts = promptParts(told, call.link).join(", ");
  rows.push(["prompt", told("prompt") && `${told("prompt")} tokens${parts && `: ${parts}`}`]);
  rows.push(["link", (call.link || "none") + (agents.length ? `, from ${agents.join(", ")}` : "")]);
  if (call.overlap) {
    const { ahead, left, ahead_tokens, left_tokens } = call.overlap;
    rows.push(["prefilled ahead", `${ahead_tokens} tokens over ${seconds(ahead)}`]);
    rows.push(["left", `${left_tokens} tokens, ${seconds(left)} to the first token`]);
  }
  rows.push(["model", call.model], ["error", call.failed], ["text", call.text]);
  return rows;
}

// A prompt's tokens are cached or late. Those that were streamed are cached, too; an engine without
// the plugin does not say whether it still had them.
function promptParts(told, link) {
  const parts = ["cached", "streamed", "late"].filter((name) => told(name) !== "");
  const texts = parts.map((name) => `${told(name)} ${name}`);
  if (link === "plain" || parts[0] !== "cached" || parts[1] !== "streamed") return texts;
  return [`${told("cached")} cached (${told("streamed")} of them streamed)`, ...texts.slice(2)];
}

function state(call) {
  if (call.open) return "not ended";
  return call.failed === null ? `took ${seconds(call.end - call.start)}` : "failed";
}

function amount(tokens, time) {
  return tokens ? `${tokens} tokens in ${time}` : time;
}
