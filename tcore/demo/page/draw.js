// Pictures on canvases: a frame with its labels, the timeline, small views of patches. No state of its own.

let palette = [[230, 57, 70]];

export function setPalette(colors) { palette = colors; }
export const color = (id) => palette[(id - 1) % palette.length];
export const css = (id) => `rgb(${color(id).join(" ")})`;

const layer = document.createElement("canvas");

// Ids as colors, with their outlines stronger.
function paintIds(ids, width, height, opacity) {
  layer.width = width;
  layer.height = height;
  const context = layer.getContext("2d");
  const image = context.createImageData(width, height);
  const alpha = Math.round(255 * opacity), edge = opacity ? Math.min(255, alpha + 90) : 0;
  for (let i = 0; i < ids.length; i++) {
    const id = ids[i];
    if (!id) continue;
    const x = i % width;
    const inner = (x === 0 || ids[i - 1] === id) && (x === width - 1 || ids[i + 1] === id)
      && (i < width || ids[i - width] === id) && (i + width >= ids.length || ids[i + width] === id);
    const [r, g, b] = color(id);
    image.data.set([r, g, b, inner ? alpha : edge], 4 * i);
  }
  context.putImageData(image, 0, 0);
  return layer;
}

// Everything on the stage. `view` holds what to show; a missing part is left out.
export function drawStage(canvas, clip, view) {
  const context = canvas.getContext("2d");
  const scale = canvas.width / clip.width;
  context.imageSmoothingEnabled = scale < 3;
  context.clearRect(0, 0, canvas.width, canvas.height);
  if (view.image) context.drawImage(view.image, 0, 0, canvas.width, canvas.height);
  if (view.ids) {
    context.imageSmoothingEnabled = false;
    context.drawImage(paintIds(view.ids, clip.width, clip.height, view.opacity), 0, 0, canvas.width, canvas.height);
  }
  for (const cell of view.cells || []) outline(context, clip, cell, scale, cell.color, 2 + 3 * (cell.weight || 0));
  (view.points || []).forEach((place, index) => {
    if (place) dot(context, (place[0] + 0.5) * scale, (place[1] + 0.5) * scale, index, index === view.selected);
  });
  if (view.box) {
    const [[x0, y0], [x1, y1]] = view.box;
    context.lineWidth = 2;
    context.strokeStyle = css(view.id);
    context.setLineDash([6, 4]);
    context.strokeRect(x0 * scale, y0 * scale, (x1 - x0) * scale, (y1 - y0) * scale);
    context.setLineDash([]);
  }
  if (view.cursor) ring(context, view.cursor, scale, view.radius);
}

function dot(context, x, y, index, selected) {
  const size = 7 * devicePixelRatio;
  context.beginPath();
  context.arc(x, y, size, 0, 2 * Math.PI);
  context.fillStyle = css(index + 1);
  context.fill();
  context.lineWidth = selected ? 4 : 2;
  context.strokeStyle = "#fff";
  context.stroke();
  context.fillStyle = "#fff";
  context.font = `bold ${size * 1.2}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(index + 1, x, y + 1);
}

function ring(context, [x, y], scale, radius) {
  for (const [width, stroke] of [[3, "#000a"], [1.5, "#fff"]]) {
    context.lineWidth = width * devicePixelRatio;
    context.strokeStyle = stroke;
    context.beginPath();
    context.arc((x + 0.5) * scale, (y + 0.5) * scale, Math.max(3, radius * scale), 0, 2 * Math.PI);
    context.moveTo((x + 0.5) * scale - 4, (y + 0.5) * scale);
    context.lineTo((x + 0.5) * scale + 4, (y + 0.5) * scale);
    context.stroke();
  }
}

export function outline(context, clip, cell, scale, stroke = "#ffd54a", width = 2) {
  const w = (clip.width / clip.columns) * scale, h = (clip.height / clip.rows) * scale;
  for (const [line, style] of [[width + 2, "#000b"], [width, stroke]]) {
    context.lineWidth = line;
    context.strokeStyle = style;
    context.strokeRect(cell.column * w, cell.row * h, w, h);
  }
}

// The neighborhood of a cell, with the cell outlined.
export function drawCrop(canvas, clip, image, cell, around = 2) {
  const context = canvas.getContext("2d");
  const w = clip.width / clip.columns, h = clip.height / clip.rows, side = (2 * around + 1) * Math.max(w, h);
  const x = (cell.column + 0.5) * w - side / 2, y = (cell.row + 0.5) * h - side / 2, scale = canvas.width / side;
  context.fillStyle = "#0c0f13";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.save();
  context.translate(-x * scale, -y * scale);
  context.drawImage(image, 0, 0, clip.width * scale, clip.height * scale);
  outline(context, clip, cell, scale, "#ffd54a", 1.5);
  context.restore();
}

// A frame under a map of the grid: dark where it is low.
export function drawHeat(canvas, clip, image, match) {
  const context = canvas.getContext("2d");
  canvas.width = 320;
  canvas.height = Math.round((320 * clip.height) / clip.width);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  layer.width = clip.columns;
  layer.height = clip.rows;
  const small = layer.getContext("2d"), heat = small.createImageData(clip.columns, clip.rows);
  match.map.forEach((value, i) => heat.data.set(value > 0.5
    ? [255, 213, 74, Math.round(300 * (value - 0.5))] : [8, 12, 40, Math.round(400 * (0.5 - value))], 4 * i));
  small.putImageData(heat, 0, 0);
  context.imageSmoothingEnabled = true;
  context.drawImage(layer, 0, 0, canvas.width, canvas.height);
  const x = ((match.best.column + 0.5) * canvas.width) / clip.columns, y = ((match.best.row + 0.5) * canvas.height) / clip.rows;
  for (const [width, stroke] of [[6, "#000c"], [3, "#fff"]]) {
    context.lineWidth = width;
    context.strokeStyle = stroke;
    context.beginPath();
    context.arc(x, y, 13, 0, 2 * Math.PI);
    context.stroke();
  }
}

// Confidence as bars, annotated frames as triangles, the current frame as a line.
export function drawTimeline(canvas, count, confidence, given, current) {
  const style = getComputedStyle(document.documentElement);
  const width = (canvas.width = canvas.clientWidth * devicePixelRatio), height = (canvas.height = 30 * devicePixelRatio);
  const context = canvas.getContext("2d"), margin = 8 * devicePixelRatio;
  const at = (frame) => margin + ((width - 2 * margin) * frame) / Math.max(1, count - 1);
  const bar = Math.max(1, (width - 2 * margin) / count - 1);
  context.fillStyle = style.getPropertyValue("--line");
  context.fillRect(margin, height - 2, width - 2 * margin, 2);
  context.fillStyle = style.getPropertyValue("--accent");
  confidence.forEach((value, frame) => {
    context.globalAlpha = frame === current ? 1 : 0.45;
    context.fillRect(at(frame) - bar / 2, height - 1 - value * (height - 9), bar, value * (height - 9));
  });
  context.globalAlpha = 1;
  context.fillStyle = "#e0862f";
  for (const frame of given) {
    context.beginPath();
    context.moveTo(at(frame) - 5 * devicePixelRatio, 0);
    context.lineTo(at(frame) + 5 * devicePixelRatio, 0);
    context.lineTo(at(frame), 8 * devicePixelRatio);
    context.fill();
  }
}
