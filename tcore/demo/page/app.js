// The page: its state, and what every control does.

import { Visit, byId, complain, info, seconds } from "./api.js";
import { setPalette } from "./draw.js";
import { Hands } from "./input.js";
import { Inspector } from "./inspect.js";
import { Marks, unrun } from "./marks.js";
import { Screen } from "./screen.js";
import { Smart } from "./smart.js";
import { Timeline } from "./timeline.js";
import { View } from "./view.js";

const MASKS_ONLY = ["box", "click", "not", "scribble", "rectangle"];
const POLL = 250; // milliseconds between requests for the state of a run
class App extends Screen {
  constructor() {
    super();
    Object.assign(this, { visit: new Visit(), marks: new Marks(), clip: null, frame: 0, object: 1, objects: 3, tool: "box" });
    this.smart = new Smart(this);
    Object.assign(this, { images: new Map(), masks: new Map(), result: null, timer: null, follow: true, busy: false, starting: null });
    Object.assign(this, { view: new View(), timeline: new Timeline(this) });
    this.inspector = new Inspector(this);
    this.hands = new Hands(this);
    this.wire();
  }

  wire() {
    const click = (id, work) => byId(id).addEventListener("click", () => this.guard(work));
    click("run", () => this.run());
    click("cancel", () => this.cancel());
    click("undo", () => this.undo());
    click("clear", () => { this.marks.clear(this.frame); this.changed(); });
    click("truth", () => this.useTruth());
    click("back", () => this.seek(this.frame - 1));
    click("next", () => this.seek(this.frame + 1));
    click("zoom-in", () => this.zoom(1.5));
    click("zoom-out", () => this.zoom(1 / 1.5));
    click("zoom-fit", () => this.zoom(0));
    click("suggest", () => this.goToSuggested());
    click("play", () => this.play());
    byId("scrub").addEventListener("input", () => this.seek(Number(byId("scrub").value)));
    for (const id of ["opacity", "size"]) byId(id).addEventListener("input", () => this.draw());
    byId("file").addEventListener("change", () => this.guard(() => this.upload()));
    byId("tools").addEventListener("click", (event) => event.target.dataset.tool && this.pick(event.target.dataset.tool));
    byId("downloads").addEventListener("click", (event) => this.guard(() => this.download(event.target)));
    byId("numbers").addEventListener("submit", (event) => { event.preventDefault(); this.boxByNumbers(new FormData(event.target)); });
    for (const radio of document.querySelectorAll("input[name=kind]")) radio.addEventListener("change", () => this.setKind(radio.value));
    new ResizeObserver(() => this.fit()).observe(byId("frame-box"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  async guard(work) {
    complain("");
    try { return await work(); } catch (error) { complain(error.message); }
  }

  async start() {
    this.info = await info();
    const before = await this.visit.open(); // before anything can be clicked
    setPalette(this.info.palette);
    byId("main").hidden = false;
    const { name, device, patch, matching } = this.info.encoder;
    byId("encoder").textContent = `Encoder ${name}, patches of ${patch} pixels, on ${device === "cpu" ? `${this.info.threads} CPU thread${this.info.threads > 1 ? "s" : ""}` : device}`;
    byId("match-kind").hidden = !matching;
    byId("samples").replaceChildren(...this.info.samples.map((sample) => {
      const button = document.createElement("button");
      Object.assign(button, { type: "button", textContent: sample.name, title: sample.description });
      button.dataset.sample = sample.key;
      button.addEventListener("click", () => this.guard(() => this.openClip("Opening the sample …", () => this.visit.sample(sample.key), button)));
      return button;
    }));
    this.listDetails();
    if (before) await this.restore(before);
    else this.refresh();
  }

  // ---- clips

  async openClip(saying, open, button = null) {
    const before = byId("clip-text").textContent;
    byId("clip-text").textContent = saying;
    try {
      const state = await open();
      document.querySelectorAll("[data-sample]").forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
      this.take(state);
      await this.tellEstimate();
    } finally {
      if (byId("clip-text").textContent === saying) byId("clip-text").textContent = before;
    }
  }

  async upload() {
    const [file] = byId("file").files;
    byId("file").value = ""; // the same file may be chosen again
    if (!file) return;
    const most = this.info.limits.upload_mb;
    if (file.size > most * 1e6) throw new Error(`This file has ${Math.round(file.size / 1e6)} MB; the limit is ${most} MB.`);
    await this.openClip("Reading the video …", () => this.visit.upload(file));
  }

  take(state) {
    this.pause();
    this.view.reset();
    const { clip } = state;
    this.clip = clip;
    this.result = state;
    this.images.clear();
    this.masks.clear();
    const { kind } = this.marks;
    this.marks.reset(clip.width, clip.height);
    this.marks.kind = kind;
    this.frame = 0;
    this.object = 1;
    this.inspector.clear();
    byId("scrub").max = clip.frames - 1;
    byId("truth").hidden = !clip.sample;
    byId("empty").hidden = true;
    byId("run-text").textContent = "";
    this.tellClip();
    this.fit();
    this.show(0);
    this.guard(() => this.timeline.drawThumbs());
  }

  async restore(state) {
    this.take(state);
    if (state.kind) {
      this.marks.kind = state.kind;
      this.marks.names = state.names;
      document.querySelector(`input[name=kind][value=${state.kind}]`).checked = true;
      for (const frame of state.given.filter((index) => index < state.done)) {
        if (state.kind === "masks") this.marks.masks.set(frame, await this.visit.mask(frame));
        else this.marks.points.set(frame, state.points[frame].map((p) => p && p.slice(0, 2)));
      }
      if (state.state === "running") this.guard(() => this.poll());
    }
    this.refresh();
    this.show(0);
    await this.tellEstimate();
  }

  async tellEstimate() {
    byId("estimate").textContent = "Timing one frame …";
    const { total, encode, step } = await this.visit.estimate();
    byId("estimate").textContent = `About ${seconds(total)} for ${this.clip.frames} frames (measured: ${(1000 * (encode + step)).toFixed(0)} ms per frame).`;
  }

  listDetails() {
    const names = { coarse: "Coarse, fast", fine: "Fine", finest: "Finest" };
    byId("details").replaceChildren(...this.info.details.map((detail) => {
      const label = document.createElement("label"), radio = document.createElement("input");
      Object.assign(radio, { type: "radio", name: "detail", value: detail, disabled: true });
      radio.addEventListener("change", () => this.guard(() => this.setDetail(detail)));
      label.append(radio, ` ${names[detail]}`);
      return label;
    }));
  }

  // Another grid: the marks stay, what was computed on the grid before does not.
  async setDetail(detail) {
    this.pause();
    const state = await this.visit.detail(detail);
    this.clip = state.clip;
    this.result = state;
    this.masks.clear();
    this.marks.unsettle();
    this.inspector.clear();
    byId("run-text").textContent = "";
    this.tellClip();
    this.show(this.frame);
    await this.tellEstimate();
  }

  async useTruth() {
    const { runs, points } = await this.visit.truth();
    this.marks.remember(0);
    this.marks.forget(0);
    if (this.marks.kind === "masks") {
      const ids = unrun(runs, this.clip.width * this.clip.height);
      this.marks.masks.set(0, ids);
      this.objects = Math.max(this.objects, ids.reduce((a, b) => Math.max(a, b), 0));
    } else {
      this.marks.names = points.map(([name]) => name);
      this.marks.points.clear();
      this.marks.points.set(0, points.map(([, x, y]) => [x, y]));
    }
    this.show(0);
    this.changed();
  }

  // ---- marks

  begin() {
    this.marks.remember(this.frame);
    const propagated = this.marks.kind === "masks" ? this.masks.get(this.frame) : this.result.points[this.frame];
    this.marks.edit(this.frame, this.result.kind === this.marks.kind ? propagated : null);
  }

  changed() {
    this.refresh();
    this.draw();
  }

  undo() {
    const step = this.marks.undo();
    if (!step) return;
    if (step.kind !== this.marks.kind) this.setKind(step.kind);
    this.show(step.frame);
    this.changed();
  }

  newPoint() {
    if (this.marks.names.length >= this.info.limits.points) return -1;
    let number = this.marks.names.length + 1;
    while (this.marks.names.includes(String(number))) number++;
    return this.marks.addPoint(String(number));
  }

  pointsHere() {
    const propagated = this.result.kind === "points" ? this.result.points[this.frame] : null;
    return this.marks.points.get(this.frame) || propagated || this.marks.names.map(() => null);
  }

  boxByNumbers(data) {
    if (!this.clip) return complain("Choose a clip first.");
    if (this.marks.kind !== "masks") return complain("Boxes mark objects: choose Objects first.");
    const [left, top, width, height] = ["left", "top", "width", "height"].map((name) => Number(data.get(name)));
    this.begin();
    if (this.tool === "rectangle") {
      this.marks.forget(this.frame);
      this.marks.box(this.frame, [left, top], [left + width - 1, top + height - 1], this.object);
    } else {
      Object.assign(this.marks.prepare(this.frame, this.object), { box: [left, top, width, height] });
      this.smart.ask(this.frame, this.object);
    }
    this.changed();
    return this.say(`Marked a box as object ${this.object}.`);
  }

  setKind(kind) {
    this.marks.kind = kind;
    document.querySelector(`input[name=kind][value=${kind}]`).checked = true;
    this.object = 1;
    this.pick(kind === "points" && MASKS_ONLY.includes(this.tool) ? "brush" : this.tool);
    this.changed();
  }

  pick(tool) {
    if (this.marks.kind === "points" && MASKS_ONLY.includes(tool)) return;
    this.tool = tool;
    for (const button of byId("tools").children) button.setAttribute("aria-pressed", String(button.dataset.tool === tool));
    this.refresh();
    this.draw();
  }

  select(number) {
    if (number > (this.marks.kind === "masks" ? this.objects : this.marks.names.length)) return;
    this.object = number;
    if (["inspect", "move"].includes(this.tool) || (this.tool === "eraser" && this.marks.kind === "masks")) this.pick("brush");
    this.refresh();
    this.draw();
  }

  async inspect([x, y]) {
    const { rows, columns, width, height } = this.clip;
    const row = Math.floor(((y + 0.5) / height) * rows), column = Math.floor(((x + 0.5) / width) * columns);
    await this.inspector.at(this.frame, Math.max(0, Math.min(rows - 1, row)), Math.max(0, Math.min(columns - 1, column)));
  }

  // ---- runs

  setBusy(busy) {
    this.busy = busy;
    this.refresh();
  }

  async run() {
    this.pause();
    const message = this.marks.message(), said = byId("run-text").textContent;
    // Busy from the click on: a second click must not start a second run, nor a download use the previous one.
    this.setBusy(true);
    byId("run-text").textContent = "Starting …";
    try {
      this.starting = this.visit.run(message);
      this.result = await this.starting;
    } catch (error) {
      byId("run-text").textContent = said;
      this.setBusy(false);
      throw error;
    } finally {
      this.starting = null;
    }
    this.marks.settle();
    for (const frame of [...this.masks.keys()]) if (frame >= this.result.start) this.masks.delete(frame);
    this.inspector.clear();
    this.follow = true;
    await this.poll();
  }

  async poll() {
    const { key } = this.clip;
    this.setBusy(true);
    try {
      for (;;) {
        const state = await this.visit.state();
        if (state.clip.key !== key) return;
        this.result = state;
        this.tellProgress();
        if (this.follow && state.done) this.show(state.done - 1);
        this.refresh();
        if (state.state !== "running") break;
        await new Promise((go) => setTimeout(go, POLL));
      }
    } finally {
      this.setBusy(false);
    }
    if (this.result.state === "failed") complain(this.result.error);
    if (this.result.state === "done" && this.follow) {
      await this.show(this.result.start);
      if (!matchMedia("(prefers-reduced-motion: reduce)").matches) this.play();
    }
  }

  async cancel() {
    byId("cancel").disabled = true;
    await this.starting; // only a run that has started can be canceled
    byId("run-text").textContent = "Canceling …";
    await this.visit.cancel(); // the next poll shows the result
  }

  async download(button) {
    const name = button.dataset.file;
    if (!name) return;
    byId("download-text").textContent = `Writing ${name} …`;
    try {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(await this.visit.download(name));
      link.download = name;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
      const frames = ["coco.json", "yolo.zip"].includes(name) ? " It names the frames 00000.png, 00001.png, …, which ffmpeg -i VIDEO -start_number 0 %05d.png writes." : "";
      byId("download-text").textContent = `${name} is in your downloads.${frames}`;
    } catch (error) {
      byId("download-text").textContent = "";
      throw error;
    }
  }

}

const app = new App();
app.guard(() => app.start());
