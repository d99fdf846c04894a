// The words of an answer as buttons, each for the token that it comes from.

import { make } from "./dom.js";
import { markAt } from "./marks.js";

/** Makes nodes of SourceText whose tokens are buttons. */
export const tokenNodes = (marks) => (source) => {
  const nodes = [];
  let start = 0;
  while (start < source.text.length) {
    const mark = markAt(marks, source.positions[start]);
    let end = start + 1;
    while (end < source.text.length && markAt(marks, source.positions[end]) === mark) end += 1;
    const text = source.text.slice(start, end);
    const blanks = text.length - text.trimStart().length;
    const word = mark === -1 ? "" : text.slice(blanks);
    // The blank before a word is its token's too, but no part of the button.
    nodes.push(document.createTextNode(word ? text.slice(0, blanks) : text));
    if (word) nodes.push(tokenButton(word, marks.tokens[mark]));
    start = end;
  }
  return nodes;
};

const tokenButton = (text, token) =>
  make("span", { class: "token", role: "button", tabindex: -1, "data-token": token, "aria-pressed": "false" }, text);

/** Makes nodes of SourceText without buttons. */
export const plainNodes = (source) => document.createTextNode(source.text);

/**
 * Lets the keyboard and the pointer choose among the buttons in `element`; `onChoose` gets a button's token and text.
 *
 * One of them is a stop of the Tab key; arrow keys lead to the others.
 */
export function choosable(element, onChoose) {
  const buttons = () => [...element.querySelectorAll(".token")];
  const choose = (button) => {
    for (const each of element.querySelectorAll('.token[aria-pressed="true"]'))
      each.setAttribute("aria-pressed", "false");
    const { token } = button.dataset;
    for (const each of element.querySelectorAll(`.token[data-token="${token}"]`))
      each.setAttribute("aria-pressed", "true");
    makeStop(button);
    onChoose(Number(token), button.textContent);
  };
  const makeStop = (button) => {
    element.querySelector('.token[tabindex="0"]')?.setAttribute("tabindex", "-1");
    button.setAttribute("tabindex", "0");
  };
  element.addEventListener("click", ({ target }) => {
    const button = target.closest?.(".token");
    if (button && getSelection().isCollapsed) choose(button);
  });
  element.addEventListener("keydown", (event) => {
    const button = event.target.closest?.(".token");
    if (!button || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      choose(button);
      return;
    }
    const all = buttons();
    const at = all.indexOf(button);
    const next = {
      ArrowRight: at + 1,
      ArrowDown: at + 10,
      ArrowLeft: at - 1,
      ArrowUp: at - 10,
      Home: 0,
      End: all.length - 1,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const to = all[Math.max(0, Math.min(all.length - 1, next))];
    makeStop(to);
    to.focus();
  });
  return {
    /** Makes the first button a stop of the Tab key, and the focus if `isFocused`. */
    start(isFocused) {
      const first = element.querySelector(".token");
      if (!first) return;
      makeStop(first);
      if (isFocused) first.focus();
    },
  };
}
