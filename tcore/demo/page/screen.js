// What is on the screen: the frame, the playback controls, and which buttons are enabled.

import { byId, complain, seconds } from "./api.js";
import { css, drawStage, drawTimeline } from "./draw.js";

const HINTS = {
  brush: "Paint the object on any frame. Painting on a further frame corrects it, and the frames around it.",
  box: "Drag a box around the object.",
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
    byId("stage").setAttribute("aria-label", `Frame ${wanted}`);
    try {
      const image = await this.image(wanted);
      if (this.result.kind === "masks" && wanted < this.result.done && !this.masks.has(wanted)) {
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
    const canvas = byId("stage"), { width, height } = this.clip;
    const shown = Math.min(byId("frame-box").clientWidth, Math.max(240, (innerHeight - 260)) * (width / height), 4 * width);
    canvas.style.width = `${Math.floor(shown)}px`;
    canvas.width = Math.floor(shown * devicePixelRatio);
    canvas.height = Math.floor((shown * height / width) * devicePixelRatio);
    this.draw();
  }

  draw() {
    if (!this.clip) return;
    const { marks, frame, hands, result } = this, opacity = byId("opacity").value / 100;
    const view = { image: this.shown, opacity, id: this.object, cells: this.inspector.cells(frame) };
    if (marks.kind === "masks") {
      view.ids = marks.masks.get(frame) || this.masks.get(frame);
      view.cursor = hands.cursor || (["brush", "eraser"].includes(this.tool) ? hands.hover : null);
      view.radius = ["brush", "eraser"].includes(this.tool) ? hands.radius : 2;
      if (hands.corner) view.box = [hands.corner, hands.cursor || hands.hover || hands.corner];
    } else {
      view.points = this.pointsHere();
      view.selected = this.object - 1;
      view.cursor = hands.cursor;
      view.radius = 4;
    }
    drawStage(byId("stage"), this.clip, view);
    drawTimeline(byId("timeline"), this.clip.frames, result.kind === marks.kind ? result.confidence : [], marks.frames(), frame);
  }

  refresh() {
    const { marks, clip, result, busy } = this, masks = marks.kind === "masks";
    const ready = Boolean(clip) && !busy && marks.frames().some((frame) => !marks.empty(frame));
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
    byId("tools").querySelector("[data-tool=box]").disabled = !masks;
    byId("tools").querySelector("[data-tool=brush]").textContent = masks ? "Brush" : "Point";
    byId("hint").textContent = !clip ? "" : HINTS[this.tool === "brush" && !masks ? "points" : this.tool];
    for (const button of byId("downloads").children) {
      const file = button.dataset.file;
      const here = Boolean(result && result.done && !busy);
      const only = { "masks.zip": "masks", "yolo.zip": "masks", "dlc.csv": "points" }[file];
      button.disabled = !here || (only && result.kind !== only) || (file === "overlay.mp4" && !this.info.video);
    }
    this.listObjects();
  }

  tellProgress() {
    const { state, done, start, share, left, confidence, clip } = this.result;
    byId("bar").value = share;
    const mean = confidence.reduce((a, b) => a + b, 0) / Math.max(1, confidence.length);
    const text = {
      running: left === null ? "Waiting for the first frame …" : `${done > start ? `Frame ${done} of ${clip.frames}` : "Backward first"}, about ${seconds(left)} left.`,
      done: `Done: ${done} frames, mean confidence ${mean.toFixed(2)}.`,
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
    for (const button of box.children) button.setAttribute("aria-pressed", String(Number(button.dataset.object) === this.object));
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
