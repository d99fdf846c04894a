// The attention of each layer along the text: a row for each layer, a column for each stretch.

import { make } from "./dom.js";

// Pixels.
const ROW_HEIGHT = 7;
const MOST_HEIGHT = 150;
// One that shows on light and on dark ground.
const COLOUR = "#e2661a";

/** A map of `layers`, lists of shares, named by `numbers`; `onChoose` gets the row and the bin that are clicked. */
export class LayerMap {
  constructor(layers, numbers, onChoose) {
    const bins = layers[0]?.length ?? 0;
    this.rowHeight = Math.min(ROW_HEIGHT, MOST_HEIGHT / layers.length);
    const canvas = make("canvas", {
      width: bins,
      height: layers.length,
      role: "img",
      "aria-label": "Map of all layers along the text; the list of layers shows each one's figures.",
    });
    canvas.style.height = `${this.rowHeight * layers.length}px`;
    draw(canvas, layers);
    canvas.addEventListener("click", (event) => {
      const { left, top, width, height } = canvas.getBoundingClientRect();
      const within = (part, number) => Math.max(0, Math.min(number - 1, Math.floor(part * number)));
      onChoose(within((event.clientY - top) / height, layers.length), within((event.clientX - left) / width, bins));
    });
    this.row = make("div", { class: "layer-row", hidden: true });
    this.row.style.height = `${this.rowHeight}px`;
    this.element = make(
      "div",
      { class: "layers" },
      make(
        "p",
        { class: "hint" },
        `Layer ${numbers[0]} at the top, layer ${numbers.at(-1)} at the bottom. Click a row to see that layer alone.`,
      ),
      make("div", { class: "layers-map" }, canvas, this.row),
    );
  }

  /** Marks a layer, or none. */
  mark(layer) {
    this.row.hidden = layer === null;
    if (layer !== null) this.row.style.top = `${this.rowHeight * layer}px`;
  }
}

function draw(canvas, layers) {
  const context = canvas.getContext("2d");
  context.fillStyle = COLOUR;
  for (const [layer, shares] of layers.entries()) {
    // Each layer by its own strongest stretch but the first, which has the attention sink.
    const most = Math.max(...(shares.length > 1 ? shares.slice(1) : shares), 1e-9);
    for (const [bin, share] of shares.entries()) {
      context.globalAlpha = Math.sqrt(Math.min(1, share / most));
      context.fillRect(bin, layer, 1, 1);
    }
  }
}
