// Input on the stage: pointers and keys become boxes, clicks, strokes, points, inspections, zoom.

import { byId } from "./api.js";

const NEAR = 14; // a click within this many screen pixels selects a point
const SMART = ["box", "click", "not", "scribble"];
const CORNERS = ["box", "rectangle"];

export class Hands {
  constructor(app) {
    this.app = app;
    this.canvas = byId("stage");
    this.cursor = null; // position of the keyboard cursor
    this.hover = null;
    this.corner = null; // first corner of a box
    this.drag = null;
    this.path = null; // of a scribble
    this.tapped = false; // a click was made with the pointer that is down
    this.pan = null; // last place of a pointer that moves the frame
    this.fingers = new Map();
    const on = (name, work) => this.canvas.addEventListener(name, work);
    on("pointerdown", (event) => this.down(event));
    on("pointermove", (event) => this.move(event));
    on("pointerup", (event) => this.up(event));
    on("pointercancel", (event) => { this.fingers.delete(event.pointerId); this.drop(); });
    on("pointerleave", () => { this.hover = null; app.draw(); });
    on("contextmenu", (event) => event.preventDefault());
    on("wheel", (event) => this.wheel(event));
    on("keydown", (event) => this.key(event));
    on("blur", () => { this.cursor = null; app.draw(); });
  }

  // Pixel of the clip under the pointer; pixel centers lie at whole numbers.
  place(event) {
    const box = this.canvas.getBoundingClientRect(), { clip, view } = this.app;
    const across = (event.clientX - box.left) / box.width, down = (event.clientY - box.top) / box.height;
    return [(across * clip.width) / view.zoom + view.x - 0.5, (down * clip.height) / view.zoom + view.y - 0.5];
  }

  // Pixels of the clip in one of the screen.
  get unit() { return this.app.clip.width / this.canvas.getBoundingClientRect().width / this.app.view.zoom; }
  get radius() { return Number(byId("size").value) / 2; }
  get id() { return this.app.tool === "eraser" ? 0 : this.app.object; }

  down(event) {
    if (!this.app.clip) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.cursor = null;
    this.fingers.set(event.pointerId, [event.clientX, event.clientY]);
    if (this.fingers.size === 2) return this.drop(true);
    if (this.fingers.size > 2) return undefined;
    const clicks = ["click", "not"].includes(this.app.tool) && this.app.marks.kind === "masks";
    if (event.button === 1 || this.app.tool === "move") {
      this.pan = [event.clientX, event.clientY];
      return event.preventDefault();
    }
    if (event.button === 0) return this.begin(this.place(event), event.shiftKey);
    if (event.button === 2 && clicks) return this.begin(this.place(event), true);
    return undefined;
  }

  // Let go of what is under way; with `back`, as if it had not begun.
  drop(back = false) {
    const started = this.drag || this.tapped || (this.corner && this.app.tool === "box");
    if (back && started) this.app.undo();
    Object.assign(this, { drag: null, corner: null, path: null, pan: null, tapped: false });
    this.app.draw();
  }

  begin(place, other = false) {
    const { app } = this;
    if (app.tool === "inspect") return app.inspect(place);
    if (app.tool === "move") return undefined;
    if (app.busy) return app.say("Wait for the run to end, or cancel it, before marking.");
    app.pause();
    if (app.marks.kind === "points") return this.beginPoint(place);
    this.hover = place;
    if (CORNERS.includes(app.tool)) {
      this.corner = place;
      if (app.tool === "box") app.begin();
    } else {
      app.begin();
      if (SMART.includes(app.tool)) this.beginSmart(this.inside(place), other);
      else {
        app.marks.forget(app.frame);
        app.marks.stroke(app.marks.masks.get(app.frame), place, place, this.radius, this.id);
        this.drag = place;
      }
    }
    return app.draw();
  }

  beginSmart(place, other) {
    const { app } = this, { marks } = app;
    const hint = marks.prepare(app.frame, app.object);
    if (app.tool === "scribble") {
      if (!hint.scribble) hint.scribble = new Uint8Array(marks.width * marks.height);
      this.path = [place];
      this.drag = place;
      marks.stroke(hint.scribble, place, place, this.thin, 1);
    } else {
      (app.tool === "not" || other ? hint.clicks_not : hint.clicks).push(place);
      this.tapped = this.fingers.size > 0;
      app.changed();
      app.smart.ask(app.frame, app.object);
    }
  }

  // A scribble is on the object: thinner than a brush, which covers it.
  get thin() { return Math.max(1.5, this.radius / 3); }

  beginPoint(place) {
    const { app } = this, { marks } = app, now = app.pointsHere();
    const near = now.findIndex((p) => p && Math.hypot(p[0] - place[0], p[1] - place[1]) < NEAR * this.unit);
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
    const { app } = this, before = this.fingers.get(event.pointerId), now = [event.clientX, event.clientY];
    if (!app.clip) return;
    if (before) this.fingers.set(event.pointerId, now);
    if (this.fingers.size > 1) return before && this.pinch(event.pointerId, before, now);
    if (this.pan) {
      app.view.move((this.pan[0] - now[0]) * this.unit, (this.pan[1] - now[1]) * this.unit, app.clip);
      this.pan = now;
      return app.draw();
    }
    this.follow((this.hover = this.place(event)));
    return app.draw();
  }

  // The pointer, or the cursor, went on while it was down.
  follow(place) {
    const { app } = this, { marks } = app;
    if (this.drag && marks.kind === "points") marks.points.get(app.frame)[app.object - 1] = this.inside(place);
    else if (this.path) {
      marks.stroke(marks.hint(app.frame, app.object).scribble, this.drag, place, this.thin, 1);
      this.path.push((this.drag = place));
      app.smart.ask(app.frame, app.object);
    } else if (this.drag) {
      marks.stroke(marks.masks.get(app.frame), this.drag, place, this.radius, this.id);
      this.drag = place;
    } else if (this.corner && app.tool === "box" && this.far(place)) this.stretch(place);
  }

  far(place) { return Math.min(Math.abs(place[0] - this.corner[0]), Math.abs(place[1] - this.corner[1])) >= 2; }

  // The object of the box so far.
  stretch(place) {
    const { app } = this, [a, b] = [this.inside(this.corner), this.inside(place)];
    const hint = app.marks.prepare(app.frame, app.object), at = [0, 1].map((i) => Math.min(a[i], b[i]));
    Object.assign(hint, { box: [...at, ...[0, 1].map((i) => Math.abs(a[i] - b[i]) + 1)], brush: null });
    app.smart.ask(app.frame, app.object);
  }

  // Two fingers: the frame follows them.
  pinch(id, before, now) {
    const { app } = this, other = [...this.fingers].find(([key]) => key !== id)[1];
    const size = (a, b) => Math.max(1, Math.hypot(a[0] - b[0], a[1] - b[1])), unit = this.unit;
    app.view.move(((before[0] - now[0]) / 2) * unit, ((before[1] - now[1]) / 2) * unit, app.clip);
    const middle = { clientX: (now[0] + other[0]) / 2, clientY: (now[1] + other[1]) / 2 };
    app.zoom(size(now, other) / size(before, other), this.place(middle));
  }

  wheel(event) {
    if (!this.app.clip) return;
    event.preventDefault();
    this.app.zoom(Math.exp(-event.deltaY / 400), this.place(event));
  }

  up(event) {
    this.fingers.delete(event.pointerId);
    this.pan = null;
    this.tapped = false;
    if (this.corner) this.finishBox(this.place(event));
    if (this.path) this.app.smart.ask(this.app.frame, this.app.object);
    this.path = null;
    if (this.drag) {
      this.drag = null;
      this.app.changed();
    }
  }

  finishBox(place) {
    const { app } = this, corner = this.corner, far = this.far(place);
    if (app.tool === "box") {
      if (far) this.stretch(place);
      else app.undo();
    } else if (far) {
      app.begin();
      app.marks.forget(app.frame);
      app.marks.box(app.frame, corner, place, app.object);
    }
    this.corner = null;
    app.changed();
  }

  key(event) {
    const { app } = this, { clip } = app;
    if (!clip || event.ctrlKey || event.metaKey || event.altKey) return;
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const tools = { x: "box", c: "click", n: "not", s: "scribble", b: "brush", r: "rectangle", e: "eraser", m: "move", i: "inspect" }[event.key];
    const zooms = { "+": 1.5, "=": 1.5, "-": 1 / 1.5, 0: 0 }[event.key];
    if (steps) {
      const far = event.shiftKey ? 32 : 4, [x, y] = this.cursor || [clip.width / 2, clip.height / 2];
      this.cursor = this.inside([x + far * steps[0], y + far * steps[1]]);
      app.say(`x ${Math.round(this.cursor[0])}, y ${Math.round(this.cursor[1])}`);
      app.draw();
    } else if (event.key === " " || event.key === "Enter") this.press();
    else if (tools) app.pick(tools);
    else if (zooms !== undefined) app.zoom(zooms, this.cursor || undefined);
    else if (event.key === "z") app.undo();
    else if (/^[1-9]$/.test(event.key)) app.select(Number(event.key));
    else if (event.key === "[" || event.key === "]") {
      byId("size").value = Number(byId("size").value) + (event.key === "]" ? 4 : -4);
      app.draw();
    } else if (event.key === "," || event.key === ".") app.seek(app.frame + (event.key === "." ? 1 : -1));
    else if (event.key === "p") app.play();
    else if (event.key === "Escape") this.drop(true); else return;
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
        if (this.path) app.smart.ask(app.frame, app.object);
        this.drag = this.path = null;
        app.changed();
        app.say(`Marked object ${app.object} at x ${Math.round(place[0])}, y ${Math.round(place[1])}.`);
      }
    }
    app.draw();
  }
}
