// Which part of the frame is on the stage: zoom, and the corner at the top left, in pixels of the clip.

const MOST = 16;

export class View {
  constructor() { this.reset(); }

  reset() { Object.assign(this, { zoom: 1, x: 0, y: 0 }); }

  // Enlarge around a place of the clip, which stays where it is.
  scale(factor, [x, y], clip) {
    const zoom = Math.max(1, Math.min(MOST, this.zoom * factor)), share = this.zoom / zoom;
    this.x = x - (x - this.x) * share;
    this.y = y - (y - this.y) * share;
    this.zoom = zoom;
    this.hold(clip);
  }

  move(dx, dy, clip) {
    this.x += dx;
    this.y += dy;
    this.hold(clip);
  }

  hold({ width, height }) {
    this.x = Math.max(0, Math.min(width - width / this.zoom, this.x));
    this.y = Math.max(0, Math.min(height - height / this.zoom, this.y));
  }
}
