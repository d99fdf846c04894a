// Where questions are written, and documents dropped.

import { say } from "./announcer.js";
import { byId } from "./dom.js";

/** The form at the foot. `actions`: {ask(text), stop()}; `documents` takes the files. */
export class Composer {
  constructor(documents, actions) {
    this.documents = documents;
    this.actions = actions;
    this.question = byId("question");
    this.isAnswering = false;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    this.question.addEventListener("input", () => this.update());
    this.question.addEventListener("keydown", (event) => {
      // Where keys are on the screen, Enter begins a line, as in all fields there.
      const isTouch = matchMedia("(hover: none) and (pointer: coarse)").matches;
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouch) return;
      event.preventDefault();
      this.ask();
    });
    byId("stop").addEventListener("click", () => actions.stop());
    byId("attach").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", ({ target }) => {
      documents.add([...target.files]);
      // The same file can be chosen again.
      target.value = "";
    });
    this.question.addEventListener("paste", (event) => {
      if (event.clipboardData.files.length === 0) return;
      event.preventDefault();
      documents.add([...event.clipboardData.files]);
    });
    this.takeDrops();
  }

  /** Adapts the buttons and the field's height to what there is. */
  update(isAnswering = this.isAnswering) {
    const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
    this.isAnswering = isAnswering;
    byId("send").hidden = isAnswering;
    byId("stop").hidden = !isAnswering;
    byId("send").disabled = !this.canAsk;
    if (hadFocus) (isAnswering ? byId("stop") : this.question).focus();
    this.question.style.height = "auto";
    this.question.style.height = `${this.question.scrollHeight}px`;
  }

  get canAsk() {
    const hasContent = this.question.value.trim() !== "" || this.documents.ready.length > 0;
    return hasContent && !this.documents.isBusy && !this.isAnswering;
  }

  ask() {
    if (this.documents.isBusy) say("A document is still being uploaded.");
    if (!this.canAsk) return;
    const text = this.question.value.trim();
    this.question.value = "";
    this.actions.ask(text);
    this.update();
  }

  takeDrops() {
    const place = byId("drop");
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    // Entering a child leaves its parent.
    let depth = 0;
    const show = (change) => {
      depth = Math.max(0, depth + change);
      place.hidden = depth === 0;
    };
    addEventListener("dragenter", (event) => hasFiles(event) && show(1));
    addEventListener("dragleave", (event) => hasFiles(event) && show(-1));
    addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
    addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      show(-depth);
      this.documents.add([...event.dataTransfer.files]);
      this.question.focus();
    });
  }
}
