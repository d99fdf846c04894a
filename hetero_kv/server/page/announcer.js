// Tells screen readers what happens.

import { byId, make } from "./dom.js";

/** Says a text. */
export function say(text) {
  const place = byId("announcer");
  // The same text twice is a change too.
  place.replaceChildren(make("span", {}, text));
}

const SHORTEST = 80;

/** Says an answer sentence by sentence, as it grows. */
export class Reader {
  constructor() {
    this.said = 0;
  }

  /** `text` is the answer so far; `isDone`: nothing comes behind it. */
  read(text, isDone) {
    const rest = text.slice(this.said);
    const ends = [...rest.matchAll(/[.!?:]\s|\n/g)].map((found) => found.index + 1);
    const end = isDone ? rest.length : (ends.at(-1) ?? 0);
    if (end === 0 || (!isDone && end < SHORTEST)) return;
    this.said += end;
    say(rest.slice(0, end));
  }
}

/** A message at the page's edge, with an action where one is given: {label, run}. `onEnd` is called when it goes. */
export function toast(text, action = null, onEnd = () => {}) {
  const SECONDS = 8;
  const note = make("div", { class: "toast" }, make("span", {}, text));
  const end = (isUsed) => {
    clearTimeout(timer);
    note.remove();
    if (!isUsed) onEnd();
  };
  const timer = setTimeout(() => end(false), 1000 * SECONDS);
  if (action) {
    note.append(
      make(
        "button",
        {
          type: "button",
          class: "button quiet",
          on: {
            click: () => {
              end(true);
              action.run();
            },
          },
        },
        action.label,
      ),
    );
  }
  byId("toasts").append(note);
}
