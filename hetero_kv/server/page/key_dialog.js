// Asks for the API key.

import { make } from "./dom.js";

/** A key that the user types, or null. `isWrong`: one was given, and the server refused it. */
export function askForKey(isWrong) {
  const field = make("input", {
    id: "api-key",
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
  });
  const dialog = make(
    "dialog",
    { class: "dialog", "aria-labelledby": "key-title" },
    make(
      "form",
      { method: "dialog" },
      make("h2", { id: "key-title" }, "API key"),
      make(
        "p",
        {},
        isWrong
          ? "The server refuses this key. Give another one."
          : "This server answers to those who have a key. It stays in this tab until you close it.",
      ),
      make("label", { class: "labelled", for: "api-key" }, "Key", field),
      make(
        "div",
        { class: "dialog-buttons" },
        make("button", { type: "button", class: "button quiet", on: { click: () => dialog.close() } }, "Cancel"),
        make("button", { class: "button primary", value: "given" }, "Use this key"),
      ),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const key = dialog.returnValue === "given" ? field.value.trim() : "";
      dialog.remove();
      resolve(key || null);
    });
  });
}
