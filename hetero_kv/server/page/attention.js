// What an answer looked at: a heat strip along the text before it, its strongest passages, and each layer.

import { post } from "./api.js";
import { say } from "./announcer.js";
import { byId, iconButton, make } from "./dom.js";
import { count, percent } from "./formats.js";
import { LayerMap } from "./layer_map.js";
import { HeatStrip, readsAll } from "./heat_strip.js";

const BINS = 200;
const MOST_PASSAGES = 5;

/** The panel below the messages. `onShow` is called when it takes its place, `onClose` when the user closes it. */
export class Attention {
  constructor(onShow, onClose) {
    this.onShow = onShow;
    this.place = byId("attention");
    this.onClose = onClose;
    this.abort = null;
  }

  /** Whether the panel is there. */
  get isOpen() {
    return !this.place.hidden;
  }

  close() {
    this.abort?.abort();
    this.place.hidden = true;
    this.place.replaceChildren();
  }

  /** Shows what token number `token` of an answer looked at. */
  async look(answer, token, text) {
    this.abort?.abort();
    this.abort = new AbortController();
    const { signal } = this.abort;
    this.frame(text, make("p", { class: "hint" }, "Looking…"));
    try {
      const found = await post("v1/attended", { response_id: answer.responseId, token, bins: BINS }, signal);
      this.show(found, text);
    } catch (error) {
      if (error.name === "AbortError") return;
      const reason = reasonOf(error);
      this.frame(text, make("p", { class: "note" }, reason));
      say(reason);
    }
  }

  frame(word, content, tools = null) {
    this.place.hidden = false;
    this.place.replaceChildren(
      make(
        "header",
        { class: "attention-head" },
        make("h2", {}, "What ", make("q", { class: "word" }, word.trim() || "this token"), " looked at"),
        make(
          "div",
          { class: "attention-tools" },
          tools,
          iconButton("close", "Close", () => {
            this.close();
            this.onClose();
          }),
        ),
      ),
      ...[content].flat().filter((each) => each !== null),
    );
  }

  show(found, word) {
    this.found = found;
    this.layer = null;
    this.strip = new HeatStrip(found.bins, (number) => this.choose(number));
    this.passage = make("div", { class: "passage", "aria-live": "polite" });
    this.passages = make("ol", { class: "passages", "aria-label": "Passages it looked at most" });
    this.map = new LayerMap(found.layers, found.layer_numbers, (layer, bin) => {
      this.chooseLayer(layer);
      this.choose(bin);
    });
    this.layers = make(
      "select",
      {
        id: "layer",
        on: { change: () => this.chooseLayer(this.layers.value === "" ? null : Number(this.layers.value)) },
      },
      make("option", { value: "" }, "all layers"),
      found.layer_numbers.map((layer, number) => make("option", { value: number }, `layer ${layer}`)),
    );
    const mapButton = make(
      "button",
      {
        type: "button",
        class: "button quiet small",
        "aria-expanded": "false",
        on: {
          click: () => {
            this.map.element.hidden = !this.map.element.hidden;
            mapButton.setAttribute("aria-expanded", String(!this.map.element.hidden));
            this.onShow();
          },
        },
      },
      "Layer by layer",
    );
    this.map.element.hidden = true;
    this.frame(
      word,
      [
        this.strip.element,
        this.map.element,
        make("div", { class: "attention-texts" }, this.passages, this.passage),
        methodNote(found),
      ],
      [make("label", {}, "Attention of ", this.layers), mapButton],
    );
    this.chooseLayer(null);
    this.choose(strongest(this.shares)[0] ?? 0);
    this.onShow();
  }

  /** The share of each bin in the layer that is chosen, or in all. */
  get shares() {
    return this.layer === null ? this.found.bins.map((bin) => bin.share) : this.found.layers[this.layer];
  }

  chooseLayer(layer) {
    this.layer = layer;
    this.layers.value = layer ?? "";
    this.strip.show(this.shares);
    this.map.mark(layer);
    this.passages.replaceChildren(
      ...strongest(this.shares)
        .slice(0, MOST_PASSAGES)
        .map((number) =>
          make(
            "li",
            {},
            make(
              "button",
              { type: "button", class: "passage-button", "data-bin": number, on: { click: () => this.choose(number) } },
              make("span", { class: "passage-share" }, percent(this.shares[number])),
              make("span", { class: "passage-start" }, this.found.bins[number].text.trim() || "(blank)"),
            ),
          ),
        ),
    );
    if (this.chosen !== undefined) this.choose(this.chosen);
  }

  choose(number) {
    this.chosen = number;
    const bin = this.found.bins[number];
    this.strip.mark(number);
    for (const button of this.passages.querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String(Number(button.dataset.bin) === number));
    }
    this.passage.replaceChildren(
      make(
        "p",
        { class: "passage-figures" },
        make("strong", {}, percent(this.shares[number])),
        ` of the attention · tokens ${count(bin.first)} to ${count(bin.last)}`,
        bin.first >= this.found.prompt_tokens ? ", in the answer" : "",
        bin.chosen < 0.9995 ? ` · ${percent(bin.chosen)} of it read token by token` : "",
      ),
      make("blockquote", { tabindex: 0 }, bin.is_cut ? `${bin.text} …` : bin.text),
    );
  }
}

/**
 * The numbers of the bins, those with the largest shares first.
 *
 * The first bin comes last: models put on the first token what they need nowhere (the attention sink).
 */
function strongest(shares) {
  const numbers = shares.map((_, number) => number).filter((number) => shares[number] > 0);
  return numbers.sort((one, other) => (one === 0) - (other === 0) || shares[other] - shares[one]);
}

/** What a sparse method did not read token by token, or null where it read all. */
function methodNote({ bins, estimated }) {
  if (readsAll(bins)) return null;
  const note = "The grey line at the foot of the strip shows what was read token by token.";
  const share = `${percent(estimated)} of the attention went to the rest, as an estimate.`;
  return make("p", { class: "hint" }, estimated > 0.0005 ? `${note} ${share}` : note);
}

function reasonOf(error) {
  if (error.status === 404) {
    return "The server does not know this answer any more: it remembers recent ones, until it stops. Ask again.";
  }
  if (error.status === 501) return `The server cannot tell for this answer. ${error.message}`;
  return error.message;
}
