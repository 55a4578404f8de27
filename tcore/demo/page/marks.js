// What the visitor has marked: masks of ids or points, by frame, with undo. No drawing, no requests.

const DEPTH = 60; // steps that can be undone

export class Marks {
  constructor() { this.reset(1, 1); }

  reset(width, height) {
    Object.assign(this, { width, height, kind: "masks", masks: new Map(), points: new Map(), names: [], past: [] });
    this.hints = new Map(); // by frame, then by object: what was said about it
    this.changed = { masks: Infinity, points: Infinity };
  }

  get given() { return this[this.kind]; }
  has(frame) { return this.given.has(frame); }
  frames() { return [...this.given.keys()].sort((a, b) => a - b); }
  get first() { return this.changed[this.kind]; }
  settle() { this.changed[this.kind] = Infinity; }
  unsettle() { this.changed = { masks: 0, points: 0 }; }

  // Remember a frame as it is before it is changed.
  remember(frame) {
    const now = this.given.get(frame);
    const copy = now && (this.kind === "masks" ? now.slice() : now.map((point) => point && [...point]));
    const said = [...(this.hints.get(frame) || [])].map(([id, hint]) => [id, copyHint(hint)]);
    this.past.push({ kind: this.kind, frame, before: copy, names: [...this.names], hints: new Map(said) });
    if (this.past.length > DEPTH) this.past.shift();
    this.changed[this.kind] = Math.min(this.changed[this.kind], frame);
  }

  undo() {
    const step = this.past.pop();
    if (!step) return null;
    if (step.before) this[step.kind].set(step.frame, step.before);
    else this[step.kind].delete(step.frame);
    this.names = step.names;
    this.hints.set(step.frame, step.hints);
    this.changed[step.kind] = Math.min(this.changed[step.kind], step.frame);
    return step;
  }

  clear(frame) {
    this.remember(frame);
    this.given.delete(frame);
    this.hints.delete(frame);
  }

  // What was said about an object on a frame. `under` is the frame without it.
  hint(frame, id) {
    if (!this.hints.has(frame)) this.hints.set(frame, new Map());
    const here = this.hints.get(frame);
    if (!here.has(id)) here.set(id, { box: null, clicks: [], clicks_not: [], scribble: null, brush: null, under: null });
    return here.get(id);
  }

  // Painting by hand ends what was said before: a later click begins anew.
  forget(frame) { this.hints.delete(frame); }

  // Before a further word about an object: without a place where it is, what is there is taken as a rough brush.
  prepare(frame, id) {
    const hint = this.hint(frame, id), ids = this.masks.get(frame);
    if (!hint.under) hint.under = ids.map((value) => (value === id ? 0 : value));
    const placed = hint.box || hint.clicks.length || hint.scribble;
    if (placed) hint.brush = null;
    else if (!hint.brush && ids.includes(id)) hint.brush = ids.map((value) => (value === id ? 1 : 0));
    return hint;
  }

  // The mask of an object over what else the frame holds.
  assign(frame, id, mask) {
    const hint = this.hint(frame, id), ids = hint.under.slice();
    for (let i = 0; i < ids.length; i++) if (mask[i]) ids[i] = id;
    for (const [other, said] of this.hints.get(frame)) if (other !== id) said.under = null;
    this.masks.set(frame, ids);
  }

  // The labels of a frame, for editing: its own, or a copy of the propagated ones.
  edit(frame, propagated) {
    if (!this.given.has(frame)) {
      if (this.kind === "masks") this.masks.set(frame, propagated ? propagated.slice() : new Uint8Array(this.width * this.height));
      else this.points.set(frame, this.names.map((_, i) => (propagated && propagated[i] ? [propagated[i][0], propagated[i][1]] : null)));
    }
    return this.given.get(frame);
  }

  // A stroke of the brush from one place to another: a capsule of ids.
  stroke(ids, from, to, radius, id) {
    const [x0, y0] = from, [x1, y1] = to, dx = x1 - x0, dy = y1 - y0, length = dx * dx + dy * dy;
    const top = Math.max(0, Math.floor(Math.min(y0, y1) - radius)), bottom = Math.min(this.height - 1, Math.ceil(Math.max(y0, y1) + radius));
    const left = Math.max(0, Math.floor(Math.min(x0, x1) - radius)), right = Math.min(this.width - 1, Math.ceil(Math.max(x0, x1) + radius));
    for (let y = top; y <= bottom; y++) {
      for (let x = left; x <= right; x++) {
        const along = length ? Math.max(0, Math.min(1, ((x - x0) * dx + (y - y0) * dy) / length)) : 0;
        const a = x - x0 - along * dx, b = y - y0 - along * dy;
        if (a * a + b * b <= radius * radius) ids[y * this.width + x] = id;
      }
    }
  }

  box(frame, from, to, id) {
    const ids = this.masks.get(frame);
    const [left, right] = [from[0], to[0]].sort((a, b) => a - b).map((x) => Math.max(0, Math.min(this.width - 1, Math.round(x))));
    const [top, bottom] = [from[1], to[1]].sort((a, b) => a - b).map((y) => Math.max(0, Math.min(this.height - 1, Math.round(y))));
    for (let y = top; y <= bottom; y++) ids.fill(id, y * this.width + left, y * this.width + right + 1);
  }

  addPoint(name) {
    this.names.push(name);
    for (const places of this.points.values()) places.push(null);
    return this.names.length - 1;
  }

  empty(frame) {
    const own = this.given.get(frame);
    return !own || !own.some((value) => value);
  }

  // What a run needs: [length, id, length, id, ...] for a mask, places for points.
  message() {
    const given = {};
    for (const [frame, labels] of this.given) given[frame] = this.kind === "masks" ? runs(labels) : labels;
    const changed = Number.isFinite(this.first) ? this.first : 0;
    return { kind: this.kind, names: this.names, given, changed };
  }
}

const copyHint = (hint) => ({ ...hint, clicks: [...hint.clicks], clicks_not: [...hint.clicks_not], scribble: hint.scribble && hint.scribble.slice() });

export function runs(ids) {
  const found = [];
  for (let start = 0, i = 1; i <= ids.length; i++) {
    if (i === ids.length || ids[i] !== ids[start]) {
      found.push(i - start, ids[start]);
      start = i;
    }
  }
  return found;
}

export function unrun(pairs, size) {
  const ids = new Uint8Array(size);
  for (let i = 0, at = 0; i < pairs.length; i += 2) {
    ids.fill(pairs[i + 1], at, at + pairs[i]);
    at += pairs[i];
  }
  return ids;
}
