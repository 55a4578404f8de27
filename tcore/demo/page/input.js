// Input on the stage: pointer and keyboard become strokes, boxes, points and inspections.

import { byId } from "./api.js";

const NEAR = 14; // a click within this many screen pixels selects a point

export class Hands {
  constructor(app) {
    this.app = app;
    this.canvas = byId("stage");
    this.cursor = null; // position of the keyboard cursor
    this.hover = null;
    this.corner = null; // first corner of a box
    this.drag = null;
    const on = (name, work) => this.canvas.addEventListener(name, work);
    on("pointerdown", (event) => this.down(event));
    on("pointermove", (event) => this.move(event));
    on("pointerup", (event) => this.up(event));
    on("pointercancel", () => { this.drag = this.corner = null; app.draw(); });
    on("pointerleave", () => { this.hover = null; app.draw(); });
    on("keydown", (event) => this.key(event));
    on("blur", () => { this.cursor = null; app.draw(); });
  }

  // Pixel of the clip under the pointer; pixel centers lie at whole numbers.
  place(event) {
    const box = this.canvas.getBoundingClientRect(), { clip } = this.app;
    return [((event.clientX - box.left) / box.width) * clip.width - 0.5, ((event.clientY - box.top) / box.height) * clip.height - 0.5];
  }

  get radius() { return Number(byId("size").value) / 2; }
  get id() { return this.app.tool === "eraser" ? 0 : this.app.object; }

  down(event) {
    if (!this.app.clip || event.button) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.cursor = null;
    this.begin(this.place(event));
  }

  begin(place) {
    const { app } = this;
    if (app.tool === "inspect") return app.inspect(place);
    if (app.busy) return app.say("Wait for the run to end, or cancel it, before marking.");
    if (app.marks.kind === "points") return this.beginPoint(place);
    if (app.tool === "box") this.corner = place;
    else {
      app.begin();
      app.marks.stroke(app.frame, place, place, this.radius, this.id);
      this.drag = place;
    }
    this.hover = place;
    app.draw();
  }

  beginPoint(place) {
    const { app } = this, { marks } = app, now = app.pointsHere();
    const reach = NEAR * (app.clip.width / this.canvas.getBoundingClientRect().width);
    const near = now.findIndex((p) => p && Math.hypot(p[0] - place[0], p[1] - place[1]) < reach);
    let index = near;
    if (app.tool === "eraser") {
      if (near < 0) return;
      app.begin();
      marks.points.get(app.frame)[near] = null;
    } else {
      app.begin();
      if (near < 0) index = app.frame > 0 || !now[app.object - 1] ? app.object - 1 : marks.names.length;
      if (index >= marks.names.length) index = app.newPoint();
      if (index < 0) return;
      marks.points.get(app.frame)[index] = this.inside(place);
      app.select(index + 1);
      this.drag = place;
    }
    app.changed();
  }

  inside([x, y]) {
    const { clip } = this.app;
    return [Math.max(0, Math.min(clip.width - 1, x)), Math.max(0, Math.min(clip.height - 1, y))];
  }

  move(event) {
    const { app } = this;
    if (!app.clip) return;
    const place = (this.hover = this.place(event));
    if (this.drag && app.marks.kind === "points") app.marks.points.get(app.frame)[app.object - 1] = this.inside(place);
    else if (this.drag) {
      app.marks.stroke(app.frame, this.drag, place, this.radius, this.id);
      this.drag = place;
    }
    app.draw();
  }

  up(event) {
    if (this.corner) this.finishBox(this.place(event));
    if (this.drag) {
      this.drag = null;
      this.app.changed();
    }
  }

  finishBox(place) {
    const { app } = this, corner = this.corner;
    this.corner = null;
    if (Math.hypot(place[0] - corner[0], place[1] - corner[1]) >= 2) {
      app.begin();
      app.marks.box(app.frame, corner, place, app.object);
      app.changed();
    }
    app.draw();
  }

  key(event) {
    const { app } = this, { clip } = app;
    if (!clip || event.ctrlKey || event.metaKey || event.altKey) return;
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const tools = { b: "brush", r: "box", e: "eraser", i: "inspect" }[event.key];
    if (steps) {
      const far = event.shiftKey ? 32 : 4, [x, y] = this.cursor || [clip.width / 2, clip.height / 2];
      this.cursor = this.inside([x + far * steps[0], y + far * steps[1]]);
      app.say(`x ${Math.round(this.cursor[0])}, y ${Math.round(this.cursor[1])}`);
      app.draw();
    } else if (event.key === " " || event.key === "Enter") this.press();
    else if (tools) app.pick(tools);
    else if (event.key === "z") app.undo();
    else if (/^[1-9]$/.test(event.key)) app.select(Number(event.key));
    else if (event.key === "[" || event.key === "]") {
      byId("size").value = Number(byId("size").value) + (event.key === "]" ? 4 : -4);
      app.draw();
    } else if (event.key === "," || event.key === ".") app.show(app.frame + (event.key === "." ? 1 : -1));
    else if (event.key === "p") app.play();
    else if (event.key === "Escape") { this.corner = null; app.draw(); } else return;
    event.preventDefault();
  }

  // Space or Enter: as a click at the cursor.
  press() {
    const { app } = this, place = (this.cursor = this.cursor || [app.clip.width / 2, app.clip.height / 2]);
    if (this.corner) this.finishBox(place);
    else {
      this.begin(place);
      if (this.corner) app.say("First corner set: move to the other one and press Space.");
      else if (this.drag) {
        this.drag = null;
        app.changed();
        app.say(`Marked object ${app.object} at x ${Math.round(place[0])}, y ${Math.round(place[1])}.`);
      }
    }
    app.draw();
  }
}
