// What is on the screen: the frame, the transport, and which buttons can be pressed.

import { byId, complain } from "./api.js";
import { css, drawStage, drawTimeline } from "./draw.js";

const HINTS = {
  brush: "Paint the object. On a later frame you correct what was carried there; the run then starts anew from it.",
  box: "Drag a box around the object.",
  eraser: "Wipe marks away.",
  look: "Click a patch: where did its label come from?",
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
    const view = { image: this.shown, opacity, id: this.object, cells: this.look.cells(frame) };
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
    const ready = Boolean(clip) && !busy && !marks.empty(0);
    const again = ready && result.kind === marks.kind && Number.isFinite(marks.first) && marks.first > 0;
    byId("run").disabled = !ready;
    byId("run").textContent = again ? `Run again from frame ${Math.max(...marks.frames().filter((f) => f <= marks.first))}` : "Run";
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
      button.disabled = !here || (file === "masks.zip" && result.kind !== "masks") || (file === "overlay.mp4" && !this.info.video);
    }
    this.listObjects();
  }

  listObjects() {
    const masks = this.marks.kind === "masks", names = masks ? Array.from({ length: this.objects }, (_, i) => String(i + 1)) : this.marks.names;
    const focused = document.activeElement?.dataset?.object;
    const buttons = names.map((name, index) => {
      const button = document.createElement("button"), swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = css(index + 1);
      button.append(swatch, name);
      button.type = "button";
      button.dataset.object = index + 1;
      button.setAttribute("role", "radio");
      button.setAttribute("aria-checked", String(this.object === index + 1));
      button.setAttribute("aria-label", `${masks ? "Object" : "Point"} ${name}`);
      button.addEventListener("click", () => this.select(index + 1));
      return button;
    });
    if (masks && this.objects < this.info.most.objects) {
      const add = document.createElement("button");
      Object.assign(add, { type: "button", textContent: "+", title: "Another object" });
      add.setAttribute("aria-label", "Another object");
      add.dataset.object = "add";
      add.addEventListener("click", () => { this.objects++; this.select(this.objects); });
      buttons.push(add);
    }
    byId("objects").replaceChildren(...buttons);
    if (focused) byId("objects").querySelector(`[data-object="${focused}"]`)?.focus();
  }

  say(text) { byId("hint").textContent = text; }
}
