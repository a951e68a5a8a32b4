// Positions of the lanes from top to bottom: a heading for each engine, rows for each agent.

const HEADING = 28;
const BADGES = 17;
const ROW = { height: 44, ahead: 5, aheadHeight: 11, call: 18, callHeight: 21 };

function layout(run) {
  const noted = new Set(run.notes.map((note) => note.lane));
  const headings = [];
  const lanes = [];
  let top = 0;
  let engine = null;
  run.lanes.forEach((lane, index) => {
    if (lane.engine !== engine) {
      engine = lane.engine;
      headings.push({ top, text: engine || "engine unknown" });
      top += HEADING;
    }
    const badges = noted.has(index) ? BADGES : 0;
    const height = badges + lane.rows * ROW.height;
    lanes.push({ ...lane, top, height, first: top + badges });
    top += height;
  });
  return { headings, lanes, height: top + 6 };
}

// The tops, in a call's row, of the prefills ahead of it and of the call itself.
function rowOf(places, call) {
  const top = places.lanes[call.lane].first + call.row * ROW.height;
  return { top, ahead: top + ROW.ahead, call: top + ROW.call };
}
