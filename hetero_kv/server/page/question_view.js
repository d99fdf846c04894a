// Shows a question and its documents, and lets it be edited.

import { copyButton } from "./clipboard.js";
import { icon, iconButton, make } from "./dom.js";

/** The element of a question. `onEdit` gets the new text. */
export function questionView(message, onEdit) {
  const files = message.files.length
    ? make(
        "ul",
        { class: "documents", "aria-label": "Documents" },
        message.files.map((file) =>
          make("li", { class: "document" }, icon("document"), make("span", { class: "document-name" }, file.name)),
        ),
      )
    : null;
  const text = make("p", { class: "question-text" }, message.text);
  const buttons = make(
    "div",
    { class: "message-buttons" },
    copyButton(() => message.text, "Copy the question"),
    iconButton("edit", "Edit and ask again", () => edit()),
  );
  const bubble = make("div", { class: "bubble" }, files, message.text ? text : null);
  const element = make("article", { class: "message question", "aria-label": "Question" }, bubble, buttons);

  const edit = () => {
    const field = make("textarea", {
      "aria-label": "Edited question",
      rows: Math.min(12, message.text.split("\n").length + 1),
    });
    field.value = message.text;
    const end = () => {
      form.replaceWith(bubble);
      buttons.hidden = false;
      buttons.lastChild.focus();
    };
    const save = (event) => {
      event.preventDefault();
      if (field.value.trim() || message.files.length) onEdit(field.value.trim());
    };
    const form = make(
      "form",
      {
        class: "edit",
        on: {
          submit: save,
          keydown: (event) => {
            if (event.key === "Escape") {
              event.stopPropagation();
              end();
            } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) save(event);
          },
        },
      },
      field,
      make("p", { class: "hint" }, "What follows this question is replaced."),
      make(
        "div",
        { class: "dialog-buttons" },
        make("button", { type: "button", class: "button quiet", on: { click: end } }, "Cancel"),
        make("button", { class: "button primary" }, "Ask"),
      ),
    );
    bubble.replaceWith(form);
    buttons.hidden = true;
    field.focus();
  };
  return element;
}
