// Boxes, clicks and scribbles become objects: what was said goes to the program, its mask comes back.

import { complain } from "./api.js";
import { runs, unrun } from "./marks.js";

export class Smart {
  constructor(app) { Object.assign(this, { app, waiting: new Map(), busy: false }); }

  // Ask for the object of a frame; while an answer is awaited, only the latest wish for each is kept.
  ask(frame, id) {
    this.waiting.set(`${frame} ${id}`, { frame, id });
    if (!this.busy) this.work();
  }

  async work() {
    const { app } = this, { marks, visit } = app;
    this.busy = true;
    app.refresh();
    try {
      while (this.waiting.size) {
        const [[wish, { frame, id }]] = this.waiting, { key } = app.clip;
        this.waiting.delete(wish);
        // What was undone, cleared or painted over meanwhile stays so.
        if (!marks.hints.get(frame)?.has(id) || !marks.masks.has(frame)) continue;
        const hint = marks.prepare(frame, id);
        const pixels = Object.fromEntries(["scribble", "brush"].map((name) => [name, hint[name] && runs(hint[name])]));
        const { runs: found } = await visit.mark({ frame, box: hint.box, clicks: hint.clicks, clicks_not: hint.clicks_not, ...pixels });
        if (key !== app.clip.key || marks.hints.get(frame)?.get(id) !== hint) continue;
        marks.assign(frame, id, unrun(found, marks.width * marks.height));
        app.changed();
      }
    } catch (error) {
      this.waiting.clear();
      complain(error.message);
    } finally {
      this.busy = false;
      app.changed();
    }
  }
}
