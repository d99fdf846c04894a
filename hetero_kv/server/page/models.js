// The models and recipes that the server offers.

import { get } from "./api.js";
import { toast } from "./announcer.js";
import { byId, make } from "./dom.js";
import { contextSize } from "./formats.js";

/** The choice among them; `onChange` is called with the id that the user chooses. */
export class Models {
  constructor(onChange) {
    this.place = byId("model");
    this.all = [];
    this.defaults = new Map();
    this.place.addEventListener("change", () => onChange(this.place.value));
  }

  /** Learns what there is. Throws RequestError. */
  async load() {
    this.all = (await get("v1/models")).data;
    this.place.replaceChildren(
      ...this.all.map(({ id, meta }) => make("option", { value: id }, `${id} · ${contextSize(meta.n_ctx)}`)),
    );
  }

  /** The id that a conversation uses: its own, or the first one where the server does not offer it. */
  of(conversation) {
    // What is offered is not known yet.
    if (!this.all.length) return conversation.model;
    const isOffered = this.all.some(({ id }) => id === conversation.model);
    if (!isOffered && conversation.model) {
      toast(`The server does not offer ${conversation.model} any more; ${this.all[0].id} answers instead.`);
    }
    if (!isOffered) conversation.model = this.all[0].id;
    return conversation.model;
  }

  /** Shows the model of a conversation. */
  show(conversation) {
    this.place.value = this.of(conversation) ?? "";
    this.place.title = this.place.value;
  }

  /** The tokens that a model's context takes, or null. */
  capacity(id) {
    return this.all.find((each) => each.id === id)?.meta.n_ctx ?? null;
  }

  /** The server's settings where a request does not say: {temperature, top_p}. */
  async defaultsOf(id) {
    if (!this.defaults.has(id)) {
      const { default_generation_settings: found } = await get(`props?model=${encodeURIComponent(id ?? "")}`);
      this.defaults.set(id, found.params);
    }
    return this.defaults.get(id);
  }
}
