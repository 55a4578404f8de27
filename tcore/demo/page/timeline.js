// The strip under the frame: small pictures of the video, confidence, marked frames, and where objects are lost.

import { byId } from "./api.js";
import { css } from "./draw.js";

const MARGIN = 8; // half the knob of the slider
const LANE = 4, LANES = 4; // objects that are lost somewhere: height of a line, and how many fit

const frameAt = (canvas, count, x) => {
  const width = canvas.clientWidth - 2 * MARGIN;
  return Math.round(Math.max(0, Math.min(1, (x - MARGIN) / width)) * (count - 1));
};

export class Timeline {
  constructor(app) {
    this.app = app;
    const seek = (event) => {
      if (!app.clip || (event.type === "pointermove" && !event.buttons)) return;
      app.seek(frameAt(event.target, app.clip.frames, event.offsetX));
    };
    for (const id of ["thumbs", "timeline"]) for (const name of ["pointerdown", "pointermove"]) byId(id).addEventListener(name, seek);
  }

  // Pictures spread over the clip; they are those that playing would load anyway.
  async drawThumbs() {
    const { app } = this, { clip } = app, canvas = byId("thumbs");
    const width = (canvas.width = canvas.clientWidth * devicePixelRatio), height = (canvas.height = canvas.clientHeight * devicePixelRatio);
    const inner = width - 2 * MARGIN * devicePixelRatio, count = Math.max(1, Math.min(clip.frames, Math.round(inner / (height * (clip.width / clip.height)))));
    const tile = inner / count, context = canvas.getContext("2d");
    const shown = Math.min(count, 16), each = inner / shown;
    for (let i = 0; i < shown; i++) {
      const image = await app.image(Math.round(((i + 0.5) / shown) * (clip.frames - 1)));
      if (clip.key !== app.clip.key || canvas.width !== width) return;
      const left = MARGIN * devicePixelRatio + i * each, scale = Math.max(Math.max(tile, each) / clip.width, height / clip.height);
      const w = each / scale, h = height / scale;
      context.drawImage(image, (clip.width - w) / 2, (clip.height - h) / 2, w, h, left, 0, each - 1, height);
    }
    canvas.dataset.shown = shown;
  }

  // Confidence as bars, marked frames as triangles, a line of its color wherever an object is lost.
  draw({ count, confidence, given, current, lost }) {
    const canvas = byId("timeline"), style = getComputedStyle(document.documentElement), ratio = devicePixelRatio;
    const width = (canvas.width = canvas.clientWidth * ratio), height = (canvas.height = canvas.clientHeight * ratio);
    const context = canvas.getContext("2d"), margin = MARGIN * ratio;
    const at = (frame) => margin + ((width - 2 * margin) * frame) / Math.max(1, count - 1);
    const bar = Math.max(1, (width - 2 * margin) / count - 1);
    const names = [...new Set(lost.flat())].sort((a, b) => a - b).slice(0, LANES), base = height - 1 - names.length * LANE * ratio;
    context.fillStyle = style.getPropertyValue("--line");
    context.fillRect(margin, base, width - 2 * margin, 1);
    context.fillStyle = style.getPropertyValue("--accent");
    confidence.forEach((value, frame) => {
      context.globalAlpha = frame === current ? 1 : 0.45;
      context.fillRect(at(frame) - bar / 2, base - value * (base - 8 * ratio), bar, value * (base - 8 * ratio));
    });
    context.globalAlpha = 1;
    lost.forEach((objects, frame) => objects.forEach((id) => {
      const lane = names.indexOf(id);
      if (lane < 0) return;
      context.fillStyle = css(id);
      context.fillRect(at(frame) - bar / 2 - 0.5, base + 1 + lane * LANE * ratio, bar + 1.5, (LANE - 1) * ratio);
    }));
    context.fillStyle = "#e0862f";
    for (const frame of given) {
      context.beginPath();
      context.moveTo(at(frame) - 5 * ratio, 0);
      context.lineTo(at(frame) + 5 * ratio, 0);
      context.lineTo(at(frame), 8 * ratio);
      context.fill();
    }
    canvas.dataset.lost = names.join(" ");
  }
}
