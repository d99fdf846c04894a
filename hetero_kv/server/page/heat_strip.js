// A strip along the prompt and the answer so far: for each stretch a bar, as high and as warm as its attention.

import { make } from "./dom.js";
import { count, percent } from "./formats.js";

const MOST_LABELS = 4;
// Share of the strip's width that a label needs.
const LABEL_WIDTH = 0.09;

/** Whether a method read all tokens one by one. */
export const readsAll = (bins) => bins.every((bin) => bin.chosen > 0.9995);

/** The strip of `bins`; `onChoose` gets the number of a bin that is pointed at, clicked or reached by arrow keys. */
export class HeatStrip {
  constructor(bins, onChoose) {
    this.bins = bins;
    this.onChoose = onChoose;
    this.chosen = 0;
    this.pinned = null;
    // A method that reads all needs no line that says so.
    const hasLine = !readsAll(bins);
    this.bars = bins.map((bin, number) => {
      const bar = make("div", { class: "bin", role: "option", id: `bin-${number}`, "aria-selected": "false" });
      bar.style.flexGrow = bin.last - bin.first + 1;
      bar.style.setProperty("--chosen", hasLine ? bin.chosen : 0);
      return bar;
    });
    this.labels = make("div", { class: "strip-labels", "aria-hidden": "true" });
    this.list = make(
      "div",
      {
        class: "strip",
        role: "listbox",
        tabindex: 0,
        "aria-orientation": "horizontal",
        "aria-label": "Passages of the prompt and the answer, from the beginning on",
        on: {
          pointermove: (event) => event.pointerType === "mouse" && this.pointed(event),
          pointerleave: () => this.pinned !== null && this.onChoose(this.pinned),
          click: (event) => this.pointed(event, true),
          keydown: (event) => this.pressed(event),
        },
      },
      this.bars,
    );
    const last = bins.at(-1)?.last ?? 0;
    this.element = make(
      "div",
      { class: "strip-with-axis" },
      this.labels,
      this.list,
      make(
        "div",
        { class: "axis", "aria-hidden": "true" },
        [0, 0.25, 0.5, 0.75, 1].map((part) =>
          make("span", {}, part === 0 ? "token 0" : count(Math.round(part * last))),
        ),
      ),
    );
  }

  /** Shows a share for each bin. */
  show(shares) {
    // The first bin has the attention sink, which would make all others look cold.
    const most = Math.max(...(shares.length > 1 ? shares.slice(1) : shares), 1e-9);
    for (const [number, bar] of this.bars.entries()) {
      const { first, last } = this.bins[number];
      bar.style.setProperty("--heat-share", Math.sqrt(Math.min(1, shares[number] / most)));
      bar.setAttribute("aria-label", `${percent(shares[number])}, tokens ${count(first)} to ${count(last)}`);
    }
    this.showLabels(shares);
  }

  /** Marks a bin as the chosen one. */
  mark(number) {
    this.bars[this.chosen]?.setAttribute("aria-selected", "false");
    this.chosen = number;
    this.pinned ??= number;
    this.bars[number]?.setAttribute("aria-selected", "true");
    this.list.setAttribute("aria-activedescendant", `bin-${number}`);
  }

  showLabels(shares) {
    const total = this.bins.at(-1).last + 1;
    const centre = (number) => (this.bins[number].first + this.bins[number].last + 1) / 2 / total;
    const placed = [];
    const least = Math.max(...shares) / 20;
    const order = shares.map((_, number) => number).sort((one, other) => shares[other] - shares[one]);
    for (const number of order) {
      if (placed.length === MOST_LABELS || shares[number] < least) break;
      if (placed.every((other) => Math.abs(centre(other) - centre(number)) > LABEL_WIDTH)) placed.push(number);
    }
    this.labels.replaceChildren(
      ...placed.map((number) => {
        const label = make("span", {}, percent(shares[number]));
        // Within the strip also at its ends.
        label.style.left = `clamp(20px, ${100 * centre(number)}%, calc(100% - 20px))`;
        return label;
      }),
    );
  }

  pointed(event, isPinned = false) {
    const { left, width } = this.list.getBoundingClientRect();
    const token = ((event.clientX - left) / width) * (this.bins.at(-1).last + 1);
    const found = this.bins.findIndex((bin) => token <= bin.last + 1);
    const number = Math.max(0, found === -1 ? this.bins.length - 1 : found);
    if (isPinned) this.pinned = number;
    if (number !== this.chosen || isPinned) this.onChoose(number);
  }

  pressed(event) {
    const last = this.bins.length - 1;
    const to = {
      ArrowRight: this.chosen + 1,
      ArrowLeft: this.chosen - 1,
      PageDown: this.chosen + 10,
      PageUp: this.chosen - 10,
      Home: 0,
      End: last,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.pinned = Math.max(0, Math.min(last, to));
    this.onChoose(this.pinned);
  }
}
