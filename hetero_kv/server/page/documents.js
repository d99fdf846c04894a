// The documents of the next question: uploads under way, and those that are there.

import { getText, post, remove, upload } from "./api.js";
import { say } from "./announcer.js";
import { byId, icon, iconButton, make } from "./dom.js";
import { bytes, counted, percent } from "./formats.js";

/** Uploads files and shows them as chips; `onChange` is called when one comes, changes or goes. */
export class Documents {
  constructor(onChange) {
    this.onChange = onChange;
    this.place = byId("documents");
    this.items = [];
    /** The model whose tokens are counted. */
    this.model = null;
  }

  /** Whether an upload is under way. */
  get isBusy() {
    return this.items.some((item) => item.state === "uploading");
  }

  /** The documents that are uploaded. */
  get ready() {
    return this.items.filter((item) => item.state === "ready").map((item) => item.file);
  }

  /** Uploads files. */
  add(files) {
    for (const file of files) {
      const item = { name: file.name, size: file.size, state: "uploading", sent: 0, abort: new AbortController() };
      item.element = make("li", { class: "document" });
      this.place.append(item.element);
      this.items.push(item);
      this.send(item, file);
    }
    this.onChange();
  }

  /** Takes the uploaded documents out, for a question. */
  take() {
    const files = this.ready;
    this.clear();
    return files;
  }

  /** Forgets all documents; those on the server stay. */
  clear() {
    for (const item of this.items) {
      item.abort.abort();
      item.element.remove();
    }
    this.items = [];
    this.onChange();
  }

  async send(item, file) {
    this.show(item);
    try {
      const stored = await upload(
        file,
        (sent) => {
          item.sent = sent;
          this.show(item);
        },
        item.abort.signal,
      );
      item.file = { id: stored.id, name: stored.filename, tokens: {} };
      item.state = "ready";
      say(`${item.name} is uploaded.`);
      await this.count(item);
    } catch (error) {
      if (error.name === "AbortError") return;
      item.state = "failed";
      item.error = error.message;
      say(`${item.name}: ${error.message}`);
    }
    this.show(item);
    this.onChange();
  }

  async count(item) {
    this.show(item);
    this.onChange();
    await countTokens(item.file, this.model);
  }

  show(item) {
    const details = {
      uploading: () => (item.sent < 1 ? `${percent(item.sent)} of ${bytes(item.size)}` : "Reading the text…"),
      failed: () => item.error,
      ready: () => {
        const tokens = tokensOf(item.file, this.model);
        return tokens === null ? bytes(item.size) : counted(tokens, "token");
      },
    };
    item.element.classList.toggle("is-error", item.state === "failed");
    item.element.replaceChildren(
      icon("document"),
      make("span", { class: "document-name" }, item.name),
      make("span", { class: "document-size" }, details[item.state]()),
      iconButton("close", `Remove ${item.name}`, () => this.drop(item)),
      ...(item.state === "uploading"
        ? [make("progress", { max: 1, value: item.sent, "aria-label": `Upload of ${item.name}` })]
        : []),
    );
  }

  drop(item) {
    item.abort.abort();
    item.element.remove();
    this.items = this.items.filter((each) => each !== item);
    if (item.state === "ready") remove(`v1/files/${item.file.id}`).catch(() => {});
    this.onChange();
    byId("question").focus();
  }
}

const modelOf = (id) => (id ?? "").split(":")[0];

/** How many tokens a document has for a model, or null while it is unknown. */
export const tokensOf = (file, model) => file.tokens?.[modelOf(model)] ?? null;

/** Counts a document's tokens for a model; where the server cannot, they stay unknown. */
export async function countTokens(file, model) {
  if (!model || tokensOf(file, model) !== null) return;
  try {
    const content = await getText(`v1/files/${file.id}/content`);
    const { tokens } = await post("tokenize", { content, model });
    file.tokens = { ...file.tokens, [modelOf(model)]: tokens.length };
  } catch {
    // The text is larger than a request may be, or the document is gone; the answer's usage counts it all the same.
  }
}
