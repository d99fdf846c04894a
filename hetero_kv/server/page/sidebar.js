// The list of conversations.

import { byId, icon, iconButton, make } from "./dom.js";

/** The list; `actions`: {open(id), rename(id, title), remove(id), begin()}. */
export class Sidebar {
  constructor(actions) {
    this.actions = actions;
    this.place = byId("conversations");
    byId("new-conversation").addEventListener("click", () => {
      this.close();
      actions.begin();
    });
    byId("open-sidebar").addEventListener("click", () => this.open());
    byId("close-sidebar").addEventListener("click", () => this.close());
    byId("shade").addEventListener("click", () => this.close());
    byId("sidebar").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.isOpen) {
        event.stopPropagation();
        this.close();
      }
    });
  }

  /** Whether the list lies over the page, as on a phone. */
  get isOpen() {
    return document.body.classList.contains("with-sidebar");
  }

  open() {
    document.body.classList.add("with-sidebar");
    byId("main").inert = true;
    byId("shade").hidden = false;
    byId("open-sidebar").setAttribute("aria-expanded", "true");
    byId("close-sidebar").focus();
  }

  close() {
    if (!this.isOpen) return;
    document.body.classList.remove("with-sidebar");
    byId("main").inert = false;
    byId("shade").hidden = true;
    byId("open-sidebar").setAttribute("aria-expanded", "false");
    byId("open-sidebar").focus();
  }

  /** Shows conversations; `current` is the id of the open one, `running` has those with an answer under way. */
  show(conversations, current, running) {
    this.place.replaceChildren(
      ...conversations.map((each) => this.item(each, each.id === current, running.has(each.id))),
    );
  }

  item(conversation, isCurrent, isRunning) {
    const open = make(
      "button",
      {
        type: "button",
        class: "open-conversation",
        "aria-current": isCurrent ? "page" : null,
        title: conversation.title,
        on: {
          click: () => {
            this.close();
            this.actions.open(conversation.id);
          },
        },
      },
      make("span", { class: "conversation-title" }, conversation.title),
      isRunning ? make("span", { class: "running", role: "img", "aria-label": "An answer is under way" }) : null,
    );
    const item = make(
      "li",
      { class: isCurrent ? "is-current" : null },
      open,
      iconButton("edit", `Rename ${conversation.title}`, () => this.rename(item, open, conversation)),
      iconButton("trash", `Delete ${conversation.title}`, () => this.actions.remove(conversation.id)),
    );
    return item;
  }

  rename(item, open, conversation) {
    const field = make("input", { class: "rename", "aria-label": "New title", maxlength: 100 });
    field.value = conversation.title;
    let isDone = false;
    const end = (isKept) => {
      if (isDone) return;
      isDone = true;
      if (isKept && field.value.trim()) this.actions.rename(conversation.id, field.value.trim());
      else field.replaceWith(open);
    };
    field.addEventListener("blur", () => end(true));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === "Escape") {
        event.stopPropagation();
        end(event.key === "Enter");
      }
    });
    open.replaceWith(field);
    field.focus();
    field.select();
    item.classList.add("is-renamed");
  }
}
