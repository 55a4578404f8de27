// An encoder, where there is none: the quickstart is trained, and the page goes on with it.

import { byId, info, train } from "./api.js";

export function offerTraining(app) {
  byId("training").hidden = false;
  byId("training-command").textContent = app.info.training.command;
  byId("train").addEventListener("click", () => app.guard(async () => { await train(); watch(app); }));
  if (app.info.training.state === "running") watch(app);
}

async function watch(app) {
  byId("train").disabled = true;
  byId("training-bar").hidden = false;
  for (;;) {
    const { encoder, training } = await info();
    if (encoder) return app.start();
    byId("training-bar").value = training.step / training.steps;
    byId("training-text").textContent = training.state === "failed" ? `The training failed: ${training.error}` : `Step ${training.step} of ${training.steps}`;
    if (training.state === "failed") { byId("train").disabled = false; return undefined; }
    await new Promise((go) => setTimeout(go, 1000));
  }
}
