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
  const { zoom, x, y } = view.window, scale = (canvas.width / clip.width) * zoom;
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.translate(-x * scale, -y * scale);
  context.imageSmoothingEnabled = scale < 3;
  if (view.image) context.drawImage(view.image, 0, 0, clip.width * scale, clip.height * scale);
  if (view.ids) {
    context.imageSmoothingEnabled = false;
    context.drawImage(paintIds(view.ids, clip.width, clip.height, view.opacity), 0, 0, clip.width * scale, clip.height * scale);
  }
  for (const cell of view.cells || []) outline(context, clip, cell, scale, cell.color, 2 + 3 * (cell.weight || 0));
  (view.points || []).forEach((place, index) => {
    if (place) dot(context, (place[0] + 0.5) * scale, (place[1] + 0.5) * scale, index, index === view.selected);
  });
  for (const { place, index } of view.lost || []) ghost(context, (place[0] + 0.5) * scale, (place[1] + 0.5) * scale, index);
  if (view.said) drawSaid(context, view.said, scale);
  if (view.path) {
    context.beginPath();
    for (const [px, py] of view.path) context.lineTo((px + 0.5) * scale, (py + 0.5) * scale);
    context.lineWidth = Math.max(2, 2 * view.radius * scale);
    context.lineCap = context.lineJoin = "round";
    context.strokeStyle = "#fff8";
    context.stroke();
  }
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

// What was said about an object: its box, and clicks on it and beside it.
function drawSaid(context, said, scale) {
  const size = 6 * devicePixelRatio;
  if (said.box) {
    const [left, top, width, height] = said.box;
    context.lineWidth = 1.5 * devicePixelRatio;
    context.strokeStyle = "#fffb";
    context.setLineDash([4, 4]);
    context.strokeRect(left * scale, top * scale, width * scale, height * scale);
    context.setLineDash([]);
  }
  for (const [places, fill, sign] of [[said.clicks, "#1b8a3a", "+"], [said.clicks_not, "#c22a2a", "−"]]) {
    for (const [x, y] of places) disk(context, (x + 0.5) * scale, (y + 0.5) * scale, size, fill, sign, 1.5);
  }
}

function disk(context, x, y, size, fill, text, line) {
  context.beginPath();
  context.arc(x, y, size, 0, 2 * Math.PI);
  context.fillStyle = fill;
  context.fill();
  context.lineWidth = line;
  context.strokeStyle = "#fff";
  context.stroke();
  context.fillStyle = "#fff";
  context.font = `bold ${size * 1.2}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(text, x, y + 1);
}

// A lost point, where it was seen last.
function ghost(context, x, y, index) {
  const size = 9 * devicePixelRatio;
  context.lineWidth = 2 * devicePixelRatio;
  context.strokeStyle = css(index + 1);
  context.setLineDash([4, 3]);
  context.beginPath();
  context.arc(x, y, size, 0, 2 * Math.PI);
  context.stroke();
  context.setLineDash([]);
  context.beginPath();
  for (const [dx, dy] of [[1, 1], [1, -1]]) {
    context.moveTo(x - dx * size * 0.6, y - dy * size * 0.6);
    context.lineTo(x + dx * size * 0.6, y + dy * size * 0.6);
  }
  context.stroke();
}

function dot(context, x, y, index, selected) {
  disk(context, x, y, 7 * devicePixelRatio, css(index + 1), index + 1, selected ? 4 : 2);
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
