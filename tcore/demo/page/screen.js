// What is on the screen: the frame, the playback controls, and which buttons are enabled.

import { byId, complain, seconds } from "./api.js";
import { css, drawStage } from "./draw.js";

const HINTS = {
  box: "Drag a box around the object: it is found inside. Marking a further frame corrects it, and those around it.",
  click: "Click on the object; Shift or the right button: on what is not part of it.",
  not: "Click on what is not part of the object.",
  scribble: "Draw a rough line on the object.",
  brush: "Paint exactly the pixels of the object.",
  rectangle: "Drag: exactly this rectangle becomes the object.",
  move: "Drag the enlarged frame; the wheel or two fingers zoom.",
  eraser: "Erase marks.",
  inspect: "Click a patch to see where its label came from.",
  points: "Click to add a point; drag one to move it. The eraser hides a point.",
};

export class Screen {
  async image(frame) {
    if (!this.images.has(frame)) {
      const image = new Image();
      image.src = this.visit.frame(this.clip.key, frame);
      this.images.set(frame, image.decode().then(() => image));
    }
    return this.images.get(frame);
  }

  async show(frame) {
    if (!this.clip) return;
    this.frame = Math.max(0, Math.min(this.clip.frames - 1, frame));
    const wanted = this.frame, { clip } = this;
    byId("scrub").value = wanted;
    byId("scrub").setAttribute("aria-valuetext", `Frame ${wanted} of ${clip.frames}`);
    byId("frame-text").textContent = `${wanted} / ${clip.frames - 1}`;
    try {
      const image = await this.image(wanted);
      if (this.result.kind === "masks" && wanted < this.result.done && !this.masks.has(wanted) && !this.starting) {
        const start = this.result.start;
        const ids = await this.visit.mask(wanted);
        if (clip === this.clip && start === this.result.start) this.masks.set(wanted, ids);
      }
      if (wanted !== this.frame || clip !== this.clip) return;
      this.shown = image;
    } catch (error) { complain(error.message); }
    this.refresh();
    this.draw();
  }

  // Go to a frame, as a person wants it: playing and following end.
  seek(frame) {
    this.pause();
    this.follow = false;
    return this.show(frame);
  }

  play() {
    if (this.timer) return this.pause();
    if (!this.clip) return undefined;
    this.follow = false;
    byId("play").textContent = "Pause";
    const step = async () => {
      await this.show((this.frame + 1) % this.clip.frames);
      if (this.timer) this.timer = setTimeout(step, 1000 / Math.min(30, this.clip.rate));
    };
    this.timer = setTimeout(step, 0);
    return undefined;
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    byId("play").textContent = "Play";
  }

  fit() {
    if (!this.clip) return;
    const canvas = byId("stage"), box = byId("frame-box"), { width, height } = this.clip;
    const shown = Math.min(box.clientWidth, box.clientHeight * (width / height));
    canvas.style.width = `${Math.floor(shown)}px`;
    canvas.width = Math.floor(shown * devicePixelRatio);
    canvas.height = Math.floor((shown * height / width) * devicePixelRatio);
    this.draw();
  }

  // Enlarge by a factor around a place, or the middle of what is shown; 0 shows the whole frame.
  zoom(factor, place = null) {
    if (!this.clip) return;
    const { view, clip } = this;
    if (factor) view.scale(factor, place || [view.x + clip.width / view.zoom / 2, view.y + clip.height / view.zoom / 2], clip);
    else view.reset();
    byId("zoom-fit").textContent = `${Math.round(100 * view.zoom)} %`;
    this.draw();
  }

  draw() {
    if (!this.clip) return;
    const { marks, frame, hands, result } = this, opacity = byId("opacity").value / 100;
    const view = { image: this.shown, opacity, id: this.object, cells: this.inspector.cells(frame), window: this.view };
    const ours = result.kind === marks.kind;
    if (marks.kind === "masks") {
      view.ids = marks.masks.get(frame) || this.masks.get(frame);
      view.cursor = hands.cursor || (["brush", "eraser"].includes(this.tool) ? hands.hover : null);
      view.radius = ["brush", "eraser"].includes(this.tool) ? hands.radius : hands.path ? hands.thin : 2;
      view.said = marks.hints.get(frame)?.get(this.object);
      view.path = hands.path;
      if (hands.corner) view.box = [hands.corner, hands.cursor || hands.hover || hands.corner];
    } else {
      const gone = this.lostHere();
      view.points = this.pointsHere().map((place, index) => (gone.includes(index + 1) ? null : place));
      view.lost = this.lostPoints();
      view.selected = this.object - 1;
      view.cursor = hands.cursor;
      view.radius = 4;
    }
    drawStage(byId("stage"), this.clip, view);
    this.timeline.draw({ count: this.clip.frames, confidence: ours ? result.confidence : [], given: marks.frames(), current: frame, lost: ours ? result.lost : [] });
  }

  // Numbers of the objects or points that are lost in the frame that is shown.
  lostHere() {
    const { marks, result, frame } = this;
    return !result || result.kind !== marks.kind || marks.has(frame) ? [] : result.lost[frame] || [];
  }

  // Lost points, each where it was seen last.
  lostPoints() {
    return this.lostHere().map((number) => {
      let at = this.frame;
      while (at > 0 && (!this.result.points[at]?.[number - 1] || (this.result.lost[at] || []).includes(number))) at--;
      return { index: number - 1, place: this.result.points[at]?.[number - 1] };
    }).filter(({ place }) => place);
  }

  goToSuggested() {
    const { frame, object } = this.result.suggest;
    this.select(object);
    return this.seek(frame);
  }

  refresh() {
    const { marks, clip, result, busy } = this, masks = marks.kind === "masks";
    const ready = Boolean(clip) && !busy && !this.smart.busy && marks.frames().some((frame) => !marks.empty(frame));
    const from = Math.max(0, ...marks.frames().filter((f) => f < marks.first));
    const again = ready && result.kind === marks.kind && Number.isFinite(marks.first) && marks.first > 0;
    byId("run").disabled = !ready;
    byId("run").textContent = again ? `Run again from frame ${from}` : "Run";
    byId("cancel").hidden = !busy;
    byId("cancel").disabled = false;
    byId("bar").hidden = !busy;
    byId("undo").disabled = busy || !marks.past.length;
    byId("clear").disabled = busy || !marks.has(this.frame);
    byId("truth").disabled = busy;
    byId("size-label").hidden = !masks;
    for (const button of byId("tools").children) button.hidden = !masks && ["box", "click", "not", "scribble", "rectangle"].includes(button.dataset.tool);
    byId("tools").querySelector("[data-tool=brush]").textContent = masks ? "Brush" : "Point";
    for (const radio of byId("details").querySelectorAll("input")) Object.assign(radio, { disabled: !clip || busy, checked: Boolean(clip) && clip.detail === radio.value });
    byId("stage").classList.toggle("moving", this.tool === "move");
    this.tellSuggestion();
    byId("hint").textContent = !clip ? "" : this.smart.busy ? "Finding the object …" : HINTS[this.tool === "brush" && !masks ? "points" : this.tool];
    for (const button of byId("downloads").children) {
      const file = button.dataset.file;
      // A run of the other kind is not what is marked now.
      const here = Boolean(result && result.done && !busy && result.kind === marks.kind);
      const only = { "masks.zip": "masks", "yolo.zip": "masks", "dlc.csv": "points" }[file];
      button.disabled = !here || (only && result.kind !== only) || (file === "overlay.mp4" && !this.info.video);
    }
    this.listObjects();
  }

  tellClip() {
    const { name, frames, width, height, columns, rows, remarks } = this.clip;
    const text = [`${name}: ${frames} frames of ${width} × ${height}, a grid of ${columns} × ${rows} patches.`, ...remarks].join(" ");
    Object.assign(byId("clip-text"), { textContent: text, title: text });
  }

  tellSuggestion() {
    const { result, marks, busy } = this, button = byId("suggest"), next = result && result.suggest;
    button.hidden = busy || !next || result.kind !== marks.kind || marks.has(next.frame);
    if (!button.hidden) button.textContent = `Correct frame ${next.frame}: ${this.nameOf(next.object)} ${next.lost ? "is lost there" : "is least certain there"}`;
  }

  nameOf(number) { return this.marks.kind === "masks" ? `object ${number}` : `point ${this.result.names[number - 1]}`; }

  // Which objects were lost, and where for the first time.
  tellLost() {
    const first = new Map();
    this.result.lost.forEach((numbers, frame) => numbers.forEach((n) => first.has(n) || first.set(n, frame)));
    return [...first].map(([number, frame]) => ` Lost: ${this.nameOf(number)} at frame ${frame}.`).join("");
  }

  tellProgress() {
    const { state, done, start, share, left, confidence, clip } = this.result;
    byId("bar").value = share;
    const mean = confidence.reduce((a, b) => a + b, 0) / Math.max(1, confidence.length);
    const text = {
      running: left === null ? "Waiting for the first frame …" : `${done > start ? `Frame ${done} of ${clip.frames}` : "Backward first"}, about ${seconds(left)} left.`,
      done: `Done: ${done} frames, mean confidence ${mean.toFixed(2)}.${this.tellLost()}`,
      canceled: `Canceled: ${done} of ${clip.frames} frames have labels.`,
      failed: "The run failed.",
    }[state];
    // Screen readers hear every fifth frame, not all of them.
    if (state !== "running" || done % 5 === 0 || left === null) byId("run-text").textContent = text;
  }

  // Buttons are replaced only when the list changes: one that is being pressed must stay.
  listObjects() {
    const masks = this.marks.kind === "masks", box = byId("objects");
    const names = masks ? Array.from({ length: this.objects }, (_, i) => String(i + 1)) : this.marks.names;
    const more = masks && this.objects < this.info.limits.objects;
    const wanted = JSON.stringify([masks, names, more]);
    if (box.dataset.listed !== wanted) {
      box.dataset.listed = wanted;
      const made = names.map((name, index) => this.objectButton(name, index + 1, masks));
      box.replaceChildren(...made, ...(more ? [this.addButton()] : []));
    }
    const lost = this.lostHere(), gone = lost.length ? `; lost: ${lost.map((number) => this.nameOf(number)).join(", ")}` : "";
    byId("stage").setAttribute("aria-label", `Frame ${this.frame}${gone}`);
    for (const button of box.children) {
      const number = Number(button.dataset.object);
      button.setAttribute("aria-pressed", String(number === this.object));
      button.classList.toggle("lost", lost.includes(number));
      if (number) button.title = lost.includes(number) ? `Lost in frame ${this.frame}` : "";
    }
  }

  objectButton(name, number, masks) {
    const button = document.createElement("button"), swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.style.background = css(number);
    button.append(swatch, name);
    button.type = "button";
    button.dataset.object = number;
    button.setAttribute("aria-label", `${masks ? "Object" : "Point"} ${name}`);
    button.addEventListener("click", () => this.select(number));
    return button;
  }

  addButton() {
    const add = document.createElement("button");
    Object.assign(add, { type: "button", textContent: "+", title: "Another object" });
    add.setAttribute("aria-label", "Another object");
    add.addEventListener("click", () => { this.objects++; this.select(this.objects); });
    return add;
  }

  say(text) { byId("hint").textContent = text; }
}
