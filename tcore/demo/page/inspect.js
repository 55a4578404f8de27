// The panel that shows where a label came from and what a patch matches.

import { byId, complain } from "./api.js";
import { css, drawCrop, drawHeat } from "./draw.js";

const named = (label) => (label ? `object ${label}` : "background");

// Which share of a label came from which object; empty for points.
function shares(sources) {
  const sums = new Map();
  for (const { label, weight } of sources) if (label !== null) sums.set(label, (sums.get(label) || 0) + weight);
  const parts = [...sums].sort((a, b) => b[1] - a[1]).map(([label, sum]) => `${Math.round(100 * sum)} % ${named(label)}`);
  return parts.length ? `: ${parts.join(", ")}` : "";
}

export class Inspector {
  constructor(app) {
    this.app = app;
    this.found = null;
    byId("offset").addEventListener("input", () => {
      byId("offset-text").textContent = byId("offset").value;
      this.again();
    });
    for (const radio of document.querySelectorAll("input[name=match]")) radio.addEventListener("change", () => this.again());
  }

  clear() {
    this.found = null;
    byId("sources").replaceChildren();
    byId("matches").replaceChildren();
    byId("match-controls").hidden = true;
    byId("inspect-text").textContent = "Choose Inspect and click a patch on any frame to see where its label came from and what it matches.";
  }

  again() {
    if (this.found) this.at(this.found.frame, this.found.row, this.found.column);
  }

  // Cells to outline on a frame: the patch itself, and those that its label was mixed from.
  cells(frame) {
    if (!this.found) return [];
    const sources = this.found.sources.filter((source) => source.frame === frame).map((s) => ({ ...s, color: "#ffd54a" }));
    const own = this.found.frame === frame ? [{ row: this.found.row, column: this.found.column, color: "#fff", weight: 0.5 }] : [];
    return [...sources, ...own];
  }

  async at(frame, row, column) {
    const kind = document.querySelector("input[name=match]:checked").value;
    const ticket = (this.ticket = {}); // an answer that arrives after a later request is dropped
    byId("inspect-text").textContent = "Computing …";
    try {
      const found = await this.app.visit.inspect({ frame, row, column, offset: byId("offset").value, kind });
      if (ticket !== this.ticket) return;
      this.found = found;
      await this.show();
    } catch (error) {
      complain(error.message);
      byId("inspect-text").textContent = "";
    }
    this.app.draw();
  }

  async show() {
    const { found, app } = this;
    const place = `Frame ${found.frame}, row ${found.row}, column ${found.column}`;
    const said = found.given ? "you marked this frame yourself."
      : !found.labeled ? "not labeled yet; run first to see where its label comes from."
        : `its label is mixed from ${found.sources.length} patches${found.sources.length < app.clip.topk ? ", some of them more than once" : ""}${shares(found.sources)}.`;
    byId("inspect-text").textContent = `${place}: ${said}`;
    byId("match-controls").hidden = false;
    byId("sources").replaceChildren(...await Promise.all(found.sources.map((source) => this.source(source))));
    byId("matches").replaceChildren(...await Promise.all(found.matches.map((match) => this.match(match))));
  }

  async source(source) {
    const item = document.createElement("li"), button = document.createElement("button"), canvas = document.createElement("canvas");
    canvas.width = canvas.height = 64;
    canvas.setAttribute("aria-hidden", "true");
    drawCrop(canvas, this.app.clip, await this.app.image(source.frame), source);
    const share = document.createElement("span"), meter = document.createElement("meter"), text = document.createElement("span");
    const numbers = document.createElement("small");
    share.className = "share";
    text.textContent = `Frame ${source.frame}${source.label === null ? "" : `, ${named(source.label)}`}`;
    numbers.textContent = `${(100 * source.weight).toFixed(1)} % of the label, cosine ${source.similarity.toFixed(2)}`;
    meter.value = source.weight;
    meter.setAttribute("aria-hidden", "true");
    share.append(text, numbers, meter);
    if (source.label) {
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = css(source.label);
      text.prepend(swatch, " ");
    }
    button.type = "button";
    button.title = `Row ${source.row}, column ${source.column}: go to frame ${source.frame}`;
    button.append(canvas, share);
    button.addEventListener("click", () => this.app.show(source.frame));
    item.append(button);
    return item;
  }

  async match(match) {
    const figure = document.createElement("figure"), canvas = document.createElement("canvas"), caption = document.createElement("figcaption");
    drawHeat(canvas, this.app.clip, await this.app.image(match.frame), match);
    const cells = this.app.clip.rows * this.app.clip.columns, { row, column, value } = match.best;
    const how = this.found.kind === "attention" ? `attention ${(value * cells).toFixed(1)} times uniform` : `cosine ${value.toFixed(2)}`;
    caption.textContent = `${match.side === "past" ? "Past" : "Future"}, frame ${match.frame}: best at row ${row}, column ${column}, ${how}`;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", caption.textContent);
    figure.append(canvas, caption);
    return figure;
  }
}
