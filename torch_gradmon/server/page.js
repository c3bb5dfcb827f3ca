"use strict";
// follows a run: its state at once, its charts as often as this browser and the server manage without effort
(() => {
  const run = document.body.dataset.run;
  if (!run) return;
  const LEAST = 1000, SHARE = 2;  // milliseconds between two requests, and how many times as long as the last one took
  let wanted = null, shown = document.body.dataset.version, isBusy = false, known = null, failures = 0;

  let latest = null;
  const describe = () => {
    const card = latest;
    const words = [make("span", card.state, "state"), ` ${card.status}`];
    const drawn = window.gradmon?.drawnTo();
    if (drawn !== undefined && card.step !== null && drawn < card.step) words.push(`, drawn to step ${drawn}`);
    if (card.loss !== null) words.push(`, loss ${typeof card.loss === "number" ? card.loss.toPrecision(4) : card.loss}`);
    if (card.worst_spike) {
      const isNew = known !== null && card.spikes > known;
      const link = make("a", `${card.spikes} spike${card.spikes > 1 ? "s" : ""}`, isNew ? "new" : "");
      link.href = `#step=${card.spike_step}`;
      words.push(", ", link, make("span", `, the largest: ${card.worst_spike}`, "desk"));  // a finding says it too
    }
    document.getElementById("live").replaceChildren(...words);
    known = known ?? card.spikes;
  };
  const refresh = async () => {
    if (isBusy || wanted === shown) return;
    isBusy = true;
    const asked = wanted, begin = performance.now();
    try {
      const answer = await fetch(withToken(`content.json?run=${encodeURIComponent(run)}`));
      if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
      window.gradmon.update(await answer.json());
      shown = asked;
      failures = 0;
      describe();
    } catch (error) {
      failures += 1;
      console.warn(`torch_gradmon: ${error}`);  // the next step asks again
    }
    const pause = Math.max(LEAST, SHARE * (performance.now() - begin)) * 2 ** Math.min(failures, 5);
    setTimeout(() => { isBusy = false; refresh(); }, latest.state === "ended" && !failures ? 0 : pause);
  };
  const words = (text) => document.getElementById("live").replaceChildren(make("span", text, "state"));
  listen(`events?run=${encodeURIComponent(run)}`, {
    card: ({ version, card }) => {
      latest = card;
      describe();
      if (!window.gradmon) {  // the page that waits for the first step
        if (card.step !== null) location.reload();
        return;
      }
      wanted = version;
      refresh();
    },
    gone: () => words("the run is gone; this page shows what it had"),
    replaced: () => location.reload(),
  }, () => words("the server does not answer; this page shows what it had"));
})();
