// The settings of a conversation: its system message, and how tokens are chosen.

import { make } from "./dom.js";

const NUMBERS = [
  {
    name: "temperature",
    label: "Temperature",
    min: 0,
    max: 5,
    step: "any",
    hint: "0 always takes the likeliest token",
  },
  {
    name: "top_p",
    label: "Top p",
    min: 0.01,
    max: 1,
    step: "any",
    hint: "the likeliest tokens up to this probability",
  },
  { name: "max_tokens", label: "Longest answer", min: 1, max: 1e9, step: 1, hint: "tokens" },
];

/**
 * Lets the user change a conversation's settings; `onSave` is called with {system, sampling}.
 *
 * `defaults` are the server's: {temperature, top_p}.
 */
export function openSettings(conversation, defaults, onSave) {
  const system = make("textarea", { id: "setting-system", rows: 3, placeholder: "None" });
  system.value = conversation.system;
  const fields = NUMBERS.map(({ name, label, min, max, step, hint }) => {
    const shown = name === "max_tokens" ? "as long as fits" : `${defaults[name] ?? "the model's"} (default)`;
    const field = make("input", {
      id: `setting-${name}`,
      type: "number",
      inputmode: "decimal",
      min,
      max,
      step,
      placeholder: shown,
      "aria-describedby": `hint-${name}`,
    });
    field.value = conversation.sampling[name] ?? "";
    return {
      name,
      field,
      row: make(
        "label",
        { class: "labelled", for: `setting-${name}` },
        label,
        field,
        make("span", { class: "hint", id: `hint-${name}` }, hint),
      ),
    };
  });
  const save = () => {
    const sampling = {};
    for (const { name, field } of fields) if (field.value !== "") sampling[name] = Number(field.value);
    onSave({ system: system.value, sampling });
  };
  const dialog = make(
    "dialog",
    { class: "dialog", "aria-labelledby": "settings-title" },
    make(
      "form",
      { method: "dialog" },
      make("h2", { id: "settings-title" }, "Settings of this conversation"),
      make("label", { class: "labelled", for: "setting-system" }, "System message", system),
      make(
        "div",
        { class: "columns" },
        fields.map(({ row }) => row),
      ),
      make(
        "p",
        { class: "hint" },
        "Another system message changes the beginning of the prompt: documents behind it are read again.",
      ),
      make(
        "div",
        { class: "dialog-buttons" },
        make("button", { type: "button", class: "button quiet", on: { click: () => dialog.close() } }, "Cancel"),
        make("button", { class: "button primary", value: "saved" }, "Save"),
      ),
    ),
  );
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "saved") save();
    dialog.remove();
  });
  document.body.append(dialog);
  dialog.showModal();
}
